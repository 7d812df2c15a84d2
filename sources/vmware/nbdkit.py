"""nbdkit as a child process, serving a disk that only its plugin can read."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.images.tools import process, workspace

#: nbdkit is not started again after so many ends within a number of seconds: VDDK fails on this disk.
MOST_ENDS, SPAN = 4, 30.0

# A plugin such as VDDK maps large libraries and has a stack for each of 16 threads.
_ADDRESS_SPACE = 8 << 30


@dataclasses.dataclass(frozen=True)
class Plugin:
    """A plugin and its parameters. Paths are absolute.

    ``secrets``: parameters passed as ``password=+FILE``. ``files``: parameters that name a file with this
    content. ``package``: Debian package, for the message that nbdkit is missing. ``debug``: flags for
    ``--debug``; any flag enables verbose logging. ``library_path``: search path for the libraries that the
    plugin loads. ``threads``: concurrent requests per connection; each has a buffer for the largest request.
    """

    name: str
    parameters: Mapping[str, str] = dataclasses.field(default_factory=dict)
    secrets: Mapping[str, str] = dataclasses.field(default_factory=dict)
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    debug: Mapping[str, int] = dataclasses.field(default_factory=dict)
    package: str = "nbdkit"
    library_path: str = ""
    threads: int = 16


@dataclasses.dataclass(frozen=True)
class Follow:
    """Supervision of nbdkit. ``on_line`` is called with each log line, from another thread.

    ``on_end`` is called, from another thread, when nbdkit has ended by itself: with its error, and whether it
    is started again. ``cancel`` aborts the start; later waits are aborted by the client.
    """

    on_line: Callable[[str], None] = lambda _line: None
    on_end: Callable[[errors.Error, bool], None] = lambda _error, _again: None
    cancel: cancelling.Cancel = cancelling.NEVER


@contextlib.contextmanager
def serve(plugin: Plugin, follow: Follow = Follow()) -> Iterator[str]:
    """Serve read-only while the block runs; yield the path of the unix socket.

    If nbdkit ends by itself, it is started again on the same socket, unless it has ended ``MOST_ENDS`` times
    within ``SPAN`` seconds. Raises ``errors.ToolFailed`` with nbdkit's message if it does not start.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(workspace.Workspace())
        # A file in memory can be read repeatedly: vddk may restart nbdkit.
        secrets = {
            key: stack.enter_context(process.memory_file(text.encode()))
            for key, text in plugin.secrets.items()
        }
        files = {key: str(pathlib.Path(folder, key)) for key in plugin.files}
        for key, path in files.items():
            # The plugin wants a path that it can resolve, which one below /proc/self/fd is not.
            pathlib.Path(path).write_text(plugin.files[key])
        plugin = dataclasses.replace(plugin, parameters={**plugin.parameters, **files})
        server = _Server(plugin, follow, f"{folder}/nbdkit", secrets)
        stack.callback(server.close)
        server.start()
        keeping = threading.Thread(target=server.keep, name="nbdkit-stderr", daemon=True)
        keeping.start()
        stack.callback(keeping.join)
        stack.callback(server.end)
        yield server.socket


class _Server:
    """nbdkit on a socket; ``keep`` starts it again when it ends."""

    def __init__(self, plugin: Plugin, follow: Follow, socket: str, secrets: Mapping[str, int]) -> None:
        self.socket = socket
        self._plugin = plugin
        self._follow = follow
        self._secrets = secrets
        self._ends: collections.deque[float] = collections.deque(maxlen=MOST_ENDS)
        self._ending = cancelling.Cancel()
        self._lock = threading.Lock()
        self._running: process.Process | None = None

    def start(self) -> None:
        """Start nbdkit and wait until it accepts connections."""
        pathlib.Path(self.socket).unlink(missing_ok=True)
        with contextlib.ExitStack() as stack:
            # nbdkit writes its process id into the pipe when it accepts connections: no polling is needed.
            started, says_started = os.pipe()
            stack.callback(os.close, started)
            stack.callback(os.close, says_started)
            plugin = self._plugin
            argv = (
                "nbdkit",
                "--foreground",
                # SIGTERM before the SIGKILL of ``process``: plugins close their sessions at the server.
                "--exit-with-parent",
                "--readonly",
                f"--threads={plugin.threads}",
                f"--unix={self.socket}",
                f"--pidfile={_path(says_started)}",
                *(["--verbose"] if plugin.debug else []),
                *(f"--debug={flag}={value}" for flag, value in plugin.debug.items()),
                plugin.name,
                *(f"{key}={value}" for key, value in plugin.parameters.items()),
                *(f"{key}=+{_path(fd)}" for key, fd in self._secrets.items()),
            )
            fds = (says_started, *self._secrets.values())
            command = process.Command(argv, plugin.package, _ADDRESS_SPACE, fds, plugin.library_path)
            with self._lock:
                self._ending.check()
                self._running = running = process.Process(command, on_line=self._follow.on_line)
            with cancelling.wake_on(self._follow.cancel) as wake:
                while not running.ready(started, None, wake.fd):
                    if running.ended:
                        raise running.failure()
                    wake.check()

    def keep(self) -> None:
        """Read the log, so that nbdkit never blocks on a full pipe, and start nbdkit again when it ends.

        This thread lives until the end: the kernel ends a process with the thread that started it.
        """
        while True:
            running = self._running
            assert running is not None  # noqa: S101  (``start`` has returned)
            while not running.ended:
                running.ready(None)
            if self._ending.is_set():
                return
            failure: errors.Error = running.failure()
            self._ends.append(time.monotonic())
            again = len(self._ends) < MOST_ENDS or self._ends[-1] - self._ends[0] > SPAN
            self._follow.on_end(failure, again)
            running.stop()
            if not again:
                return
            try:
                self.start()
            except errors.Error as err:
                if not self._ending.is_set():
                    self._follow.on_end(err, False)
                return

    def end(self) -> None:
        """End nbdkit; ``keep`` returns."""
        self._ending.set()
        with self._lock:
            running = self._running
        if running is not None:
            running.end()

    def close(self) -> None:
        """Close the pipes of the last process. Called after ``keep`` has returned."""
        if self._running is not None:
            self._running.stop()


def _path(fd: int) -> str:
    return f"/proc/self/fd/{fd}"
