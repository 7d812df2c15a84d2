"""Programs that the worker runs: started clean, watched, and ended with their block.

The only user of ``subprocess``. A program gets an empty private directory, a small fixed
environment, no standard input unless asked for, and a limit on its address space; it is killed when
the thread that started it ends, so a killed worker leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Self

from cdi_worker import errors
from cdi_worker.images.engine import cancelling

SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# glibc reserves 64 MiB of address space for the arena of each thread: unusable under a limit.
_ENVIRONMENT = {"PATH": SEARCH_PATH, "LANG": "C", "LC_ALL": "C", "MALLOC_ARENA_MAX": "2"}
PIPE = subprocess.PIPE
NULL = subprocess.DEVNULL

_TAIL = 4096
_CHUNK = 64 << 10
# What a program gets between SIGTERM and SIGKILL, in seconds.
_GRACE = 5.0


class Watch:
    """Raise ``errors.NoProgress`` when nothing moved for ``seconds``; None: wait for ever."""

    def __init__(self, what: str, seconds: float | None = None) -> None:
        self._what = what
        self._seconds = seconds
        self._fed = time.monotonic()

    @property
    def turn(self) -> float | None:
        """Seconds until the next look, None without a limit. No change of ``/proc/PID/io`` wakes anybody."""
        return None if self._seconds is None else cancelling.TURN

    def feed(self) -> None:
        """Note that something moved."""
        self._fed = time.monotonic()

    def check(self) -> None:
        if self._seconds is not None and time.monotonic() - self._fed > self._seconds:
            raise errors.NoProgress(what=self._what, seconds=self._seconds)


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    """What to run. ``package``: Debian's name for people who miss it; ``address_space`` in bytes.

    ``library_path``: where its libraries are first looked for (LD_LIBRARY_PATH).
    """

    argv: tuple[str, ...]
    package: str
    address_space: int = 2 << 30
    pass_fds: tuple[int, ...] = ()
    library_path: str = ""

    @property
    def tool(self) -> str:
        return self.argv[0]


class Process:
    """A running program, ended with its ``with`` block.

    Start and end it in one thread: the kernel ties its life to that thread (PR_SET_PDEATHSIG).
    ``on_line`` gets each line of its standard error from whichever call happens to read it.
    """

    def __init__(
        self,
        command: Command,
        *,
        stdin: int = NULL,
        stdout: int = NULL,
        on_line: Callable[[str], None] = lambda _line: None,
    ) -> None:
        if shutil.which(command.tool, path=SEARCH_PATH) is None:
            raise errors.MissingTool(tool=command.tool, package=command.package)
        self._command = command
        self._on_line = on_line
        self._tail = bytearray()
        self._line = bytearray()
        self._io: object = None
        self._directory = workspace()
        try:
            self._popen = self._start(stdin, stdout)
        except BaseException:
            self._directory.cleanup()
            raise
        assert self._popen.stderr is not None  # noqa: S101  (PIPE was asked for)
        self._stderr: int | None = self._popen.stderr.fileno()

    def _start(self, stdin: int, stdout: int) -> subprocess.Popen[bytes]:
        # util-linux does between fork and exec what preexec_fn may not do in a program with threads.
        limits = (f"--as={self._command.address_space}", "--core=0")
        wrapper = ("prlimit", *limits, "--", "setpriv", "--pdeathsig", "KILL", "--")
        here = self._directory.name
        libraries = {"LD_LIBRARY_PATH": self._command.library_path} if self._command.library_path else {}
        return subprocess.Popen(  # noqa: S603  (no shell; arguments are ours)
            wrapper + self._command.argv,
            bufsize=0,
            stdin=stdin,
            stdout=stdout,
            stderr=PIPE,
            cwd=here,
            env={**_ENVIRONMENT, "HOME": here, "TMPDIR": here, **libraries},
            pass_fds=self._command.pass_fds,
            # Ctrl-C goes to the whole foreground group: only the worker shall act on it.
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def stdin(self) -> int:
        """Return the descriptor that feeds the program (it was started with ``stdin=PIPE``)."""
        assert self._popen.stdin is not None  # noqa: S101
        return self._popen.stdin.fileno()

    @property
    def stdout(self) -> int:
        """Return the descriptor of what the program writes (it was started with ``stdout=PIPE``)."""
        assert self._popen.stdout is not None  # noqa: S101
        return self._popen.stdout.fileno()

    def close_stdin(self) -> None:
        """Tell the program that its input has ended."""
        assert self._popen.stdin is not None  # noqa: S101
        self._popen.stdin.close()

    def end(self) -> None:
        """End the program, and what it started, if it still runs.

        Its pipes stay open for threads that wait on them.
        """
        for number, patience in ((signal.SIGTERM, _GRACE), (signal.SIGKILL, None)):
            if self._popen.poll() is None:
                os.killpg(self.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._popen.wait(patience)

    def ready(self, fd: int | None, seconds: float | None = None, wake: int | None = None) -> bool:
        """Wait until ``fd`` can be read and take in standard error meanwhile.

        For at most ``seconds``, and no longer than until ``wake`` can be read.
        """
        poll = select.poll()
        for each in {fd, wake, self._stderr} - {None}:
            assert each is not None  # noqa: S101
            poll.register(each, select.POLLIN)
        found = {each for each, _event in poll.poll(None if seconds is None else seconds * 1000)}
        if self._stderr in found:
            self._take_stderr()
        return fd in found

    @property
    def ended(self) -> bool:
        """Tell whether standard error is closed: all has been said."""
        return self._stderr is None

    def output(
        self, *, cancel: cancelling.Cancel = cancelling.NEVER, watch: Watch | None = None
    ) -> Iterator[bytes]:
        """Yield what the program writes until it ends; needs ``stdout=PIPE``.

        Raises ``errors.Cancelled`` and ``errors.NoProgress``. Output, and bytes that the program
        moves by itself (``/proc/PID/io``), feed the watch.
        """
        watch = watch or Watch(self._command.tool)
        fd: int | None = self.stdout
        with cancelling.woken(cancel) as wake:
            while fd is not None or not self.ended:
                cancel.check()
                watch.check()
                if not self.ready(fd, watch.turn, wake):
                    self._feed_by_io(watch)
                elif chunk := os.read(self.stdout, _CHUNK):
                    watch.feed()
                    yield chunk
                else:
                    fd = None

    def finish(self) -> None:
        """Wait for the end and raise ``errors.ToolFailed`` if it was a bad one."""
        while not self.ended:
            self.ready(None)
        if self._popen.wait():
            raise self.failure()

    def failure(self) -> errors.ToolFailed:
        """Return how the program ended, with its last words."""
        status = self._popen.wait()
        reason = self.last_words() or "it gave no reason"
        if status < 0:
            reason = f"ended by {signal.Signals(-status).name}; {reason}"
        return errors.ToolFailed(tool=self._command.tool, exit_status=status, reason=reason)

    def last_words(self) -> str:
        """Return the end of standard error as one printable line."""
        lines = [line.strip() for line in self._tail.decode("utf-8", "replace").splitlines()]
        said = "; ".join([line for line in lines if line][-3:])
        return "".join(letter if letter.isprintable() else " " for letter in said)

    def stop(self) -> None:
        """End the program and remove what it had. Safe to call twice."""
        self.end()
        self._stderr = None
        for pipe in (self._popen.stdin, self._popen.stdout, self._popen.stderr):
            if pipe is not None:
                pipe.close()
        self._directory.cleanup()

    def _take_stderr(self) -> None:
        assert self._stderr is not None  # noqa: S101
        said = os.read(self._stderr, _CHUNK)
        if not said:
            self._stderr = None
        self._tail = (self._tail + said)[-_TAIL:]
        *lines, self._line = (self._line + said).split(b"\n")
        if not said and self._line:
            lines.append(self._line)
        # A line without an end is not kept for ever.
        self._line = self._line[-_TAIL:]
        for line in lines:
            self._on_line(line[-_TAIL:].decode("utf-8", "replace"))

    def _feed_by_io(self, watch: Watch) -> None:
        # qemu-img reports whole percents: minutes apart where the disk is large and the target slow.
        with contextlib.suppress(OSError):
            moved = pathlib.Path(f"/proc/{self.pid}/io").read_bytes()
            if moved != self._io:
                self._io = moved
                watch.feed()


def run(
    command: Command,
    on_output: Callable[[bytes], None] = lambda _chunk: None,
    *,
    cancel: cancelling.Cancel = cancelling.NEVER,
    watch: Watch | None = None,
) -> None:
    """Run a program to its end, handing on what it writes.

    Raises ``errors.MissingTool``, ``errors.ToolFailed``, ``errors.Cancelled``, ``errors.NoProgress``.
    """
    with Process(command, stdout=PIPE) as running:
        for chunk in running.output(cancel=cancel, watch=watch):
            on_output(chunk)
        running.finish()


def workspace() -> tempfile.TemporaryDirectory[str]:
    """Make a private empty directory, removed with its block.

    A pod with a read-only root may have no place for temporary files but ``/dev/shm``.
    """
    prefix = "cdi-worker-"
    try:
        return tempfile.TemporaryDirectory(prefix=prefix)
    except FileNotFoundError:
        return tempfile.TemporaryDirectory(prefix=prefix, dir="/dev/shm")
