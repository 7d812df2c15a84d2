"""nbdkit as a child process, serving a disk that only its plugin can read."""

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
    """A plugin and its parameters. Paths are absolute.

    ``secrets``: parameters passed as ``password=+FILE``. ``package``: Debian package, for the message that
    nbdkit is missing. ``debug``: flags for ``--debug``; any flag enables verbose logging. ``library_path``:
    search path for the libraries that the plugin loads. ``threads``: concurrent requests per connection; each
    has a buffer for the largest request.
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
    """Supervision of nbdkit. ``on_line`` is called with each log line, from another thread.

    ``cancel`` and ``watch`` abort the start; later waits are aborted by the client.
    """

    on_line: Callable[[str], None] = lambda _line: None
    cancel: cancelling.Cancel = cancelling.NEVER
    watch: process.Watch | None = None


@contextlib.contextmanager
def serve(plugin: Plugin, follow: Follow = Follow()) -> Iterator[str]:
    """Serve read-only while the block runs; yield the path of the unix socket.

    Raises ``errors.ToolFailed`` with nbdkit's message if it does not start, or if it exits and the block
    fails.
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
        # SIGTERM before the SIGKILL of ``process``: plugins close their sessions at the server.
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
    """Return a descriptor of a secret in memory. Readable repeatedly, because vddk may restart nbdkit."""
    fd = os.memfd_create("secret")
    stack.callback(os.close, fd)
    os.write(fd, text.encode())
    return fd


def _path(fd: int) -> str:
    return f"/proc/self/fd/{fd}"


def _await(running: process.Process, started: int, follow: Follow) -> None:
    # nbdkit writes its process id into the pipe when it accepts connections, so no polling is needed.
    watch = follow.watch or process.Watch("nbdkit")
    with cancelling.woken(follow.cancel) as wake:
        while not running.ready(started, watch.turn, wake):
            if running.ended:
                raise running.failure()
            follow.cancel.check()
            watch.check()


@contextlib.contextmanager
def _listening(running: process.Process) -> Iterator[None]:
    """Read the log in a thread, so that nbdkit never blocks on a full pipe."""

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
