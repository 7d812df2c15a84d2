"""A disk served by nbdkit's vddk plugin: ranges, extents, and the log of VDDK."""

from __future__ import annotations

import collections
import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator

from cdi_worker import errors
from cdi_worker.images.engine import retry
from cdi_worker.sources import base
from cdi_worker.sources.vmware import nbd

log = logging.getLogger(__name__)

#: Each connection opens the disk on the host; a host allows about 50 in total (VDDK guide, NFC).
CONNECTIONS = 3
#: Reads in flight per connection, as VDDK's default for asynchronous reads.
READS = 4
#: Seconds to wait for VDDK's log line of a failure, which arrives through a pipe; and seconds for which a
#: line counts, because the failure of one read fails all others of its connection.
LOG_WAIT, RECENT = 1.0, 2.0
#: Seconds without an extent after which their list fails, if the connection breaks.
LISTING_LIMIT = 10.0
#: Seconds to wait for VDDK to close its sessions: the host counts dropped ones for a while.
CLOSE_LIMIT = 5.0

_VERSION = re.compile(r"VMware VixDiskLib \((.*?)\) Release")
_HOST = re.compile(r"Opened '.*@(.*?):.*' \(0x")
_ERROR = re.compile(r"error: (.*)")
_CONNECTIONS = {"VixDiskLib_AllocateConnectParams ": 1, "VixDiskLib_FreeConnectParams ": -1}
_CAUSES = {
    r"incorrect user ?name or password|cannot login": "wrong user name or password",
    r"thumbprint": "the host's certificate has another thumbprint",
    r"libvixDiskLib|cannot open shared object": "the VDDK library cannot be loaded",
    r"a file was not found": "the host has no such disk or snapshot",
}


class Log:
    """The log of nbdkit: VDDK's version and host in ``info`` (contract, ``vddkInfo``), and recent errors.

    ``hide`` removes secrets from messages. Thread-safe.
    """

    def __init__(self, name: str, hide: Callable[[str], str] = str) -> None:
        self.info: dict[str, str] = {}
        self._hide = hide
        self._name = name
        self._errors: collections.deque[tuple[float, str]] = collections.deque(maxlen=4)
        self._connections = 0
        self._gone: errors.Error | None = None
        self._changed = threading.Condition()

    def line(self, line: str) -> None:
        """Parse a log line."""
        line = self._hide(line)
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
        log.warning("nbdkit has ended reason=%r again=%s", self._hide(str(failure)), again)
        with self._changed:
            self._connections = 0
            self._gone = None if again else failure
            self._changed.notify_all()

    def wait_closed(self) -> None:
        """Wait until VDDK has closed its sessions, at most ``CLOSE_LIMIT`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._connections, CLOSE_LIMIT)

    def explained(self, error: errors.Error, at: int = 0) -> errors.Error:
        """Add VDDK's message to ``error`` at byte ``at``.

        It is permanent if VDDK reports a permanent cause, or if nbdkit cannot be started again.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._recent() or self._gone, LOG_WAIT)
            message = "; ".join(dict.fromkeys(self._recent()))
            gone = self._gone
        if gone is not None:
            reason = f"{self._hide(str(gone))}; run the import again" + (
                f" (VDDK: {message})" if message else ""
            )
            return errors.TransferFailed(url=self._name, offset=at, reason=reason)
        reported = self._hide(str(error.fields["reason"]))
        message = message or reported
        for pattern, cause in _CAUSES.items():
            if re.search(pattern, message, re.IGNORECASE):
                return errors.Unreachable(url=self._name, reason=f"{cause} (VDDK: {message})")
        if isinstance(error, errors.Transient):
            return errors.Transient(url=self._name, reason=f"{reported} (VDDK: {message})")
        return type(error)(**{**error.fields, "reason": reported})

    def _recent(self) -> list[str]:
        return [message for at, message in self._errors if time.monotonic() - at < RECENT]


class Disk:
    """Reads of many threads over a few connections; see ``sources.base.RandomReader``.

    ``longest``: largest read in bytes.
    """

    #: A read over NFC takes some milliseconds, whatever its length, and changed sectors may be many.
    batching = True

    def __init__(self, socket: str, name: str, vddk: Log, longest: int, cancel: base.Cancel) -> None:
        self._name = name
        self._vddk = vddk
        self._longest = longest
        self._cancel = cancel
        self._lock = threading.Lock()
        self._busy = [0] * CONNECTIONS
        self._listings: list[Generator[base.Extent]] = []
        self._clients = [nbd.Client(socket, name, cancel) for _ in range(CONNECTIONS)]

    def open(self) -> int:
        """Open the disk in VDDK; return its size in bytes."""
        try:
            self._size = self._clients[0].size
        except errors.Transient as err:
            raise self._vddk.explained(err) from err
        return self._size

    def read_range(self, offset: int, into: memoryview, /) -> int:
        """Read one range; see ``sources.base.RandomReader``."""
        with self._lock:
            number = self._busy.index(min(self._busy))
            self._busy[number] += 1
        try:
            return self._clients[number].read_range(offset, into[: self._longest])
        except errors.Transient as err:
            raise self._vddk.explained(err, offset) from err
        finally:
            with self._lock:
                self._busy[number] -= 1

    def close(self) -> None:
        """Close all connections and wait until VDDK has closed its sessions."""
        for client in self._clients:
            client.close()
        for listing in self._listings:
            with contextlib.suppress(ValueError):  # another thread is executing it
                listing.close()
        self._vddk.wait_closed()

    def extents(self, parts: Iterable[tuple[int, int]] | None) -> Iterator[base.Extent]:
        """Return the extents of the disk, or of ``parts`` (start, end). All is data if VDDK reports none."""
        listing = self._extents(parts)
        self._listings.append(listing)
        return listing

    def _extents(self, parts: Iterable[tuple[int, int]] | None) -> Generator[base.Extent]:
        left = [(0, self._size)] if parts is None else list(parts)
        patience = retry.Patience(LISTING_LIMIT, self._cancel)
        at = 0
        while True:
            try:
                with contextlib.closing(self._listed(left)) as found:
                    for extent in found:
                        yield extent
                        at = extent.offset + extent.length
                        patience.progress()
                return
            except errors.Transient as err:
                explained = self._vddk.explained(err, at)
                if not isinstance(explained, errors.Transient):
                    raise explained from err
                patience.wait(explained, at)
                left = [(max(start, at), end) for start, end in left if end > at]

    def _listed(self, parts: list[tuple[int, int]]) -> Generator[base.Extent]:
        found = self._clients[0].extents(parts)
        if found is None:
            yield from (base.Extent(start, end - start, zero=False) for start, end in parts)
            return
        with contextlib.closing(found):
            for extent in found:
                yield base.Extent(*extent)
