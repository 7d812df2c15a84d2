"""nbdkit as a server beside us, for what only its plugins can read."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.images.tools import process

# A plugin such as VDDK maps large libraries and has a stack for each of 16 threads.
_ADDRESS_SPACE = 8 << 30


@dataclasses.dataclass(frozen=True, slots=True)
class Plugin:
    """What to serve. Paths are absolute.

    ``secrets`` are parameters of the kind that nbdkit takes as ``password=+FILE``; ``package`` is Debian's
    name for people who miss nbdkit. ``debug``: flags of ``--debug``, with which it says much more.
    ``library_path``: where what the plugin loads finds its own libraries. ``threads``: requests of each
    connection that are worked on at once; every one of them keeps a buffer for the longest.
    """

    name: str
    parameters: Mapping[str, str] = dataclasses.field(default_factory=dict)
    secrets: Mapping[str, str] = dataclasses.field(default_factory=dict)
    filters: Sequence[str] = ()
    debug: Mapping[str, int] = dataclasses.field(default_factory=dict)
    package: str = "nbdkit"
    library_path: str = ""
    threads: int = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Follow:
    """How it is followed: ``on_line`` gets each line that nbdkit says, from another thread.

    ``cancel`` and ``watch`` end the start; what comes after it is the client's to end.
    """

    on_line: Callable[[str], None] = lambda _line: None
    cancel: cancelling.Cancel = cancelling.NEVER
    watch: process.Watch | None = None


@contextlib.contextmanager
def serve(plugin: Plugin, follow: Follow = Follow()) -> Iterator[str]:
    """Serve read-only while the block runs; gives the path of the unix socket to connect to.

    Raises ``errors.ToolFailed`` with nbdkit's own words when it does not start, or has ended by itself and
    the block failed over that.
    """
    with contextlib.ExitStack() as stack:
        socket = f"{stack.enter_context(process.workspace())}/nbdkit"
        started, says_started = os.pipe()
        stack.callback(os.close, started)
        stack.callback(os.close, says_started)
        secrets = {key: _in_memory(text, stack) for key, text in plugin.secrets.items()}
        argv = _argv(plugin, secrets, f"--unix={socket}", f"--pidfile={_path(says_started)}")
        fds = (says_started, *secrets.values())
        command = process.Command(argv, plugin.package, _ADDRESS_SPACE, fds, plugin.library_path)
        running = stack.enter_context(process.Process(command, on_line=follow.on_line))
        _await(running, started, follow)
        with _listening(running):
            try:
                yield socket
            except errors.Error as err:
                if running.ended:
                    raise running.failure() from err
                raise


def _argv(plugin: Plugin, secrets: Mapping[str, int], *places: str) -> tuple[str, ...]:
    return (
        "nbdkit",
        "--foreground",
        # SIGTERM instead of the SIGKILL of ``process``: plugins let go of what they hold at the other end.
        "--exit-with-parent",
        "--readonly",
        f"--threads={plugin.threads}",
        *places,
        *(["--verbose"] if plugin.debug else []),
        *(f"--debug={flag}={value}" for flag, value in plugin.debug.items()),
        *(f"--filter={name}" for name in plugin.filters),
        plugin.name,
        *(f"{key}={value}" for key, value in plugin.parameters.items()),
        *(f"{key}=+{_path(fd)}" for key, fd in secrets.items()),
    )


def _in_memory(text: str, stack: contextlib.ExitStack) -> int:
    """Return a descriptor to read a secret from, on no disk; more than once, for vddk starts nbdkit anew."""
    fd = os.memfd_create("secret")
    stack.callback(os.close, fd)
    os.write(fd, text.encode())
    return fd


def _path(fd: int) -> str:
    return f"/proc/self/fd/{fd}"


def _await(running: process.Process, started: int, follow: Follow) -> None:
    # nbdkit writes its process id when it can be connected to. Into a pipe: no time is spent asking.
    watch = follow.watch or process.Watch("nbdkit")
    with cancelling.woken(follow.cancel) as wake:
        while not running.ready(started, watch.turn, wake):
            if running.ended:
                raise running.failure()
            follow.cancel.check()
            watch.check()


@contextlib.contextmanager
def _listening(running: process.Process) -> Iterator[None]:
    """Take in what it says, so that it never waits for that."""

    def listen() -> None:
        while not running.ended:
            running.ready(None)

    listener = threading.Thread(target=listen, name="nbdkit-stderr", daemon=True)
    listener.start()
    try:
        yield
    finally:
        running.end()
        listener.join()
