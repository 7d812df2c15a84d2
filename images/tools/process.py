"""Run programs: in a clean environment, with limits and a watch, ended with their ``with`` block.

The only user of ``subprocess``. A program gets an empty private directory, a small fixed environment, no
standard input, and a limit on its address space. It is killed when the thread that started
it ends, so a killed worker leaves no process behind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pathlib
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Self

from cdi_worker import errors, masking
from cdi_worker.images.engine import cancelling
from cdi_worker.images.tools import workspace

log = logging.getLogger(__name__)

SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# glibc reserves 64 MiB of address space for the arena of each thread: too much with a limit.
_ENVIRONMENT = {"PATH": SEARCH_PATH, "LANG": "C", "LC_ALL": "C", "MALLOC_ARENA_MAX": "2"}
PIPE = subprocess.PIPE
NULL = subprocess.DEVNULL

_TAIL = 4096
_CHUNK = 64 << 10
# Seconds between SIGTERM and SIGKILL.
_GRACE = 5.0


class Watch:
    """Raise ``errors.NoProgress`` after ``seconds`` without progress; None: no limit."""

    def __init__(self, what: str, seconds: float | None = None) -> None:
        self._what = what
        self._seconds = seconds
        self._fed = time.monotonic()

    @property
    def turn(self) -> float | None:
        """Poll interval in seconds, None without a limit. ``/proc/PID/io`` cannot be waited for."""
        return None if self._seconds is None else cancelling.TURN

    def feed(self) -> None:
        """Report progress."""
        self._fed = time.monotonic()

    def check(self) -> None:
        if self._seconds is not None and time.monotonic() - self._fed > self._seconds:
            raise errors.NoProgress(what=self._what, seconds=self._seconds)


@dataclasses.dataclass(frozen=True)
class Command:
    """A command to run. ``package``: the Debian package with the program; ``address_space`` in bytes.

    ``library_path``: LD_LIBRARY_PATH.
    """

    argv: tuple[str, ...]
    package: str
    address_space: int = 2 << 30
    pass_fds: tuple[int, ...] = ()
    library_path: str = ""

    @property
    def tool(self) -> str:
        return self.argv[0]


def require(tool: str, package: str) -> None:
    """Raise ``errors.MissingTool`` unless the program ``tool`` is installed."""
    if shutil.which(tool, path=SEARCH_PATH) is None:
        raise errors.MissingTool(tool=tool, package=package)


class Process:
    """A running program, ended with its ``with`` block.

    Start and end it in one thread: the kernel kills it when that thread ends (PR_SET_PDEATHSIG). ``on_line``
    is called with each line of its standard error, by any method that reads it.
    """

    def __init__(
        self,
        command: Command,
        *,
        stdout: int = NULL,
        on_line: Callable[[str], None] = lambda _line: None,
    ) -> None:
        require(command.tool, command.package)
        self._command = command
        self._on_line = on_line
        self._tail = bytearray()
        self._line = bytearray()
        self._directory = workspace.Workspace()
        # preexec_fn is not safe in a program with threads: util-linux sets the limits and the signal instead.
        limits = (f"--as={command.address_space}", "--core=0")
        wrapper = ("prlimit", *limits, "--", "setpriv", "--pdeathsig", "KILL", "--")
        here = self._directory.name
        libraries = {"LD_LIBRARY_PATH": command.library_path} if command.library_path else {}
        try:
            self._popen = subprocess.Popen(  # noqa: S603  (no shell; arguments are ours)
                wrapper + command.argv,
                bufsize=0,
                stdin=NULL,
                stdout=stdout,
                stderr=PIPE,
                cwd=here,
                env={**_ENVIRONMENT, "HOME": here, "TMPDIR": here, **libraries},
                pass_fds=command.pass_fds,
                # Ctrl-C sends SIGINT to the whole foreground process group; only the worker should handle it.
                start_new_session=True,
            )
        except BaseException:
            self._directory.cleanup()
            raise
        self.pid = self._popen.pid
        log.debug("program pid=%d argv=%r", self.pid, command.argv)
        self._stderr: int | None
        #: The descriptor of its standard output, -1 unless it is a pipe.
        pipes = self._popen.stdout, self._popen.stderr
        self.stdout, self._stderr = (-1 if pipe is None else pipe.fileno() for pipe in pipes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def end(self) -> None:
        """End the program and its children if they still run. Its pipes stay open for other threads."""
        for number, patience in ((signal.SIGTERM, _GRACE), (signal.SIGKILL, None)):
            if self._popen.poll() is None:
                os.killpg(self.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._popen.wait(patience)

    def ready(self, fd: int | None, seconds: float | None = None, wake: int | None = None) -> bool:
        """Wait until ``fd`` is readable, reading standard error meanwhile; return whether it is.

        Returns after ``seconds`` at the latest, or when ``wake`` is readable.
        """
        poll = select.poll()
        for each in (fd, wake, self._stderr):
            if each is not None:
                poll.register(each, select.POLLIN)
        found = {each for each, _event in poll.poll(None if seconds is None else seconds * 1000)}
        if self._stderr is not None and self._stderr in found:
            received = os.read(self._stderr, _CHUNK)
            if not received:
                self._stderr = None
            self._tail = (self._tail + received)[-_TAIL:]
            *lines, self._line = (self._line + received).split(b"\n")
            if not received and self._line:
                lines.append(self._line)
            # Only the end of a long line is kept, which bounds memory.
            self._line = self._line[-_TAIL:]
            for line in lines:
                self._on_line(line[-_TAIL:].decode("utf-8", "replace"))
        return fd in found

    @property
    def ended(self) -> bool:
        """Return whether standard error is closed."""
        return self._stderr is None

    def readinto(self, into: memoryview, /) -> int:
        """Fill ``into`` with the program's standard output; return fewer bytes only at its end.

        Programs write a few KiB at a time: returning each separately costs more than collecting them.
        """
        count = 0
        while count < len(into):
            # A program whose messages fill the pipe of standard error would write no output.
            if self.ready(self.stdout):
                more = os.readv(self.stdout, [into[count:]])
                if not more:
                    break
                count += more
        return count

    def finish(self) -> None:
        """Wait for the end. Raises ``errors.ToolFailed`` for an exit status other than 0."""
        while not self.ended:
            self.ready(None)
        if self._popen.wait():
            raise self.failure()

    def failure(self) -> errors.ToolFailed:
        """Return the error of a failed program, with the last three lines of its standard error."""
        status = self._popen.wait()
        lines = [line.strip() for line in self._tail.decode("utf-8", "replace").splitlines()]
        received = "; ".join([line for line in lines if line][-3:])
        reason = masking.quoted(received, len(received)) or "no message on standard error"
        if status < 0:
            reason = f"killed by {signal.Signals(-status).name}; {reason}"
        return errors.ToolFailed(tool=self._command.tool, exit_status=status, reason=reason)

    def stop(self) -> None:
        """End the program, close its pipes and remove its directory. Idempotent."""
        self.end()
        # A closed descriptor's number is soon that of another file.
        self.stdout, self._stderr = -1, None
        for pipe in (self._popen.stdout, self._popen.stderr):
            if pipe is not None:
                pipe.close()
        self._directory.cleanup()


@contextlib.contextmanager
def memory_file(data: bytes) -> Iterator[int]:
    """Yield a descriptor of a file in memory with ``data``, for a program that opens ``/proc/self/fd/N``."""
    with open(os.memfd_create("data"), "wb") as file:
        file.write(data)
        file.flush()
        yield file.fileno()


def run(
    command: Command,
    on_output: Callable[[bytes], None] = lambda _chunk: None,
    *,
    cancel: cancelling.Cancel = cancelling.NEVER,
    watch: Watch | None = None,
) -> None:
    """Run a program to its end; ``on_output`` gets its standard output.

    Output and the program's own I/O (``/proc/PID/io``) count as progress. Raises ``errors.MissingTool``,
    ``errors.ToolFailed``, ``errors.Cancelled``, ``errors.NoProgress``.
    """
    watch = watch or Watch(command.tool)
    with Process(command, stdout=PIPE) as running, cancelling.wake_on(cancel) as wake:
        fd: int | None = running.stdout
        io = b""
        while fd is not None or not running.ended:
            wake.check()
            watch.check()
            if not running.ready(fd, watch.turn, wake.fd):
                # qemu-img prints whole percents, which are minutes apart for a large disk.
                with contextlib.suppress(OSError):
                    before, io = io, pathlib.Path(f"/proc/{running.pid}/io").read_bytes()
                    if before != io:
                        watch.feed()
            elif chunk := os.read(running.stdout, _CHUNK):
                watch.feed()
                on_output(chunk)
            else:
                fd = None
        running.finish()
