"""The limits and the log of VDDK, in nbdkit's vddk plugin."""

from __future__ import annotations

import collections
import logging
import re
import threading
import time
from pathlib import Path

from cdi_worker import errors

log = logging.getLogger(__name__)

#: The machine that VMware builds VDDK for, and Debian nbdkit's plugin.
MACHINE = "x86_64"
#: Reads in flight per connection, as VDDK's default for asynchronous reads.
READS = 4
#: Seconds to wait for VDDK's log line of a failure, which arrives through a pipe; and seconds for which a
#: line counts, because the failure of one read fails all others of its connection.
LOG_WAIT, RECENT = 1.0, 2.0
#: Seconds without an extent after which the rest is read without them, if the connection breaks.
LISTING_LIMIT = 10.0
#: Longest time in which VDDK opens a disk, in seconds: it may take a minute.
LIMIT = 180.0
#: Seconds to wait for VDDK to close its sessions: the host counts dropped ones for a while.
CLOSE_LIMIT = 5.0

_VERSION = re.compile(r"VMware VixDiskLib \((.*?)\) Release")
_HOST = re.compile(r"Opened '.*@(.*?):.*' \(0x")
_ERROR = re.compile(r"error: (.*)")
_CONNECTIONS = {"VixDiskLib_AllocateConnectParams ": 1, "VixDiskLib_FreeConnectParams ": -1}
_CAUSES = {
    r"incorrect user ?name or password|cannot login": "wrong user name or password",
    # Before the library, which is loaded in the same words.
    r"cannot open plugin": "nbdkit cannot load its plugin vddk; install nbdkit-plugin-vddk",
    r"thumbprint": "the host's certificate has another thumbprint",
    r"libvixDiskLib|cannot open shared object": "the VDDK library cannot be loaded",
    r"a file was not found": "the host has no such disk or snapshot",
}


def missing(folder: str, architecture: str) -> str:
    """Return why VMware's library in ``folder`` cannot be loaded on this machine; empty: it can be tried."""
    if architecture != MACHINE:
        return f"VMware has no VDDK library for {architecture}"
    if not any(Path(folder).glob("lib64/libvixDiskLib.so*")):
        return f"{folder}: VDDK library not found"
    return ""


class Log:
    """The log of nbdkit: VDDK's version and host in ``info`` (contract, ``vddkInfo``), and recent errors.

    Thread-safe.
    """

    def __init__(self, name: str) -> None:
        self.info: dict[str, str] = {}
        self._name = name
        self._errors: collections.deque[tuple[float, str]] = collections.deque(maxlen=4)
        self._connections = 0
        self._gone: errors.Error | None = None
        self._changed = threading.Condition()

    def line(self, line: str) -> None:
        """Parse a log line."""
        log.debug("%s", line)
        for key, pattern in (("Version", _VERSION), ("Host", _HOST)):
            if found := pattern.search(line):
                self.info[key] = found[1]
        with self._changed:
            if found := _ERROR.search(line):
                self._errors.append((time.monotonic(), found[1]))
            for call, change in _CONNECTIONS.items():
                self._connections += change if call in line else 0
            self._changed.notify_all()

    def ended(self, failure: errors.Error, again: bool) -> None:
        """Take note that nbdkit has ended, with all its connections, and whether it is started again."""
        log.warning("nbdkit has ended reason=%r again=%s", str(failure), again)
        with self._changed:
            self._connections = 0
            self._gone = None if again else failure
            self._changed.notify_all()

    def wait_closed(self) -> None:
        """Wait until VDDK has closed its sessions, at most ``CLOSE_LIMIT`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._connections, CLOSE_LIMIT)

    def explain(self, error: errors.Error, at: int = 0) -> errors.Error:
        """Add VDDK's message to ``error`` at byte ``at``.

        It is permanent if VDDK reports a permanent cause, or if nbdkit cannot be started again.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._recent() or self._gone, LOG_WAIT)
            message = "; ".join(dict.fromkeys(self._recent()))
            gone = self._gone
        if gone is not None:
            reason = f"{gone}; run the import again" + (f" (VDDK: {message})" if message else "")
            return errors.TransferFailed(url=self._name, offset=at, reason=reason)
        reported = str(error.fields["reason"])
        message = message or reported
        for pattern, cause in _CAUSES.items():
            if re.search(pattern, message, re.IGNORECASE):
                return errors.Unreachable(url=self._name, reason=f"{cause} (VDDK: {message})")
        if isinstance(error, errors.Transient):
            reported = f"{reported} (VDDK: {message})"
        return type(error)(**{**error.fields, "reason": reported})

    def _recent(self) -> list[str]:
        return [message for at, message in self._errors if time.monotonic() - at < RECENT]
