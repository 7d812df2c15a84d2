"""The disk that nbdkit's vddk plugin serves, as ranges and extents, and what VDDK says meanwhile."""

from __future__ import annotations

import collections
import contextlib
import logging
import re
import threading
import time
from collections.abc import Generator, Iterable, Iterator

from cdi_worker import errors
from cdi_worker.sources import base
from cdi_worker.sources.vmware import nbd

log = logging.getLogger(__name__)

#: Each opens the disk at the host once more: a host allows some 50 for all of its clients (VDDK guide, NFC).
CONNECTIONS = 3
#: Reads on their way on each; the library's own default for its asynchronous reads is 4 as well.
READS = 4
#: Seconds to wait for the words that belong to a failure, which come through a pipe, and seconds that they
#: hold for: what ends one read ends all others of its connection.
WORDS, RECENT = 1.0, 2.0
#: Seconds to wait for VDDK to let go of the host, which for a while counts what was only dropped.
FAREWELL = 5.0

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
    """What nbdkit says: version and host in ``info``, as the contract calls them, and its last errors."""

    def __init__(self, name: str) -> None:
        self.info: dict[str, str] = {}
        self._name = name
        self._errors: collections.deque[tuple[float, str]] = collections.deque(maxlen=4)
        self._connections = 0
        self._changed = threading.Condition()

    def line(self, line: str) -> None:
        """Take in a line. Called from another thread."""
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

    def farewell(self) -> None:
        """Wait until VDDK has closed what it has opened."""
        with self._changed:
            self._changed.wait_for(lambda: not self._connections, FAREWELL)

    def explained(self, error: errors.Error) -> errors.Error:
        """Return ``error`` with the words of VDDK, and without hope where they leave none."""
        with self._changed:
            self._changed.wait_for(self._recent, WORDS)
            said = "; ".join(dict.fromkeys(self._recent()))
        said = said or str(error.fields["reason"])
        for pattern, cause in _CAUSES.items():
            if re.search(pattern, said, re.IGNORECASE):
                return errors.Unreachable(url=self._name, reason=f"{cause} (VDDK: {said})")
        if isinstance(error, errors.Transient):
            return errors.Transient(url=self._name, reason=f"{error.fields['reason']} (VDDK: {said})")
        return error

    def _recent(self) -> list[str]:
        return [said for at, said in self._errors if time.monotonic() - at < RECENT]


class Disk:
    """See ``sources.base.RandomReader``: reads of many threads over a few connections.

    ``longest``: bytes of one read at most.
    """

    def __init__(self, socket: str, name: str, said: Log, longest: int, cancel: base.Cancel) -> None:
        self._name = name
        self._said = said
        self._longest = longest
        self._lock = threading.Lock()
        self._busy = [0] * CONNECTIONS
        self._asking: list[Generator[base.Extent]] = []
        self._clients = [nbd.Client(socket, name, cancel) for _ in range(CONNECTIONS)]

    def open(self) -> int:
        """Have VDDK open the disk; return its size in bytes."""
        try:
            self._size = self._clients[0].size
        except errors.Transient as err:
            raise self._said.explained(err) from err
        return self._size

    def read_range(self, offset: int, into: memoryview, /) -> int:
        """Read one range; see ``sources.base.RandomReader``."""
        with self._lock:
            number = self._busy.index(min(self._busy))
            self._busy[number] += 1
        try:
            return self._clients[number].read_range(offset, into[: self._longest])
        except errors.Transient as err:
            raise self._said.explained(err) from err
        finally:
            with self._lock:
                self._busy[number] -= 1

    def close(self) -> None:
        """End all connections and see VDDK do so, too."""
        for client in self._clients:
            client.close()
        for asking in self._asking:
            with contextlib.suppress(ValueError):  # its thread is just being told
                asking.close()
        self._said.farewell()

    def extents(self, parts: Iterable[tuple[int, int]] | None) -> Iterator[base.Extent]:
        """Return what of the disk, or of parts of it, is data; all of it where VDDK does not tell."""
        asking = self._extents(parts)
        self._asking.append(asking)
        return asking

    def _extents(self, parts: Iterable[tuple[int, int]] | None) -> Generator[base.Extent]:
        try:
            found = self._clients[0].extents(parts)
            if found is None:
                ends = [(0, self._size)] if parts is None else parts
                found = (nbd.Extent(start, end - start, zero=False) for start, end in ends)
            with contextlib.closing(found):
                for extent in found:
                    yield base.Extent(*extent)
        except errors.Transient as err:
            raise self._said.explained(err) from err
