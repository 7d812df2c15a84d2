"""What the machine can do at most, in a setting: its disk, its network, and unpacking."""

from __future__ import annotations

import sys
from collections.abc import Callable, MutableMapping

from tests.bench import inputs
from tests.bench.bench import Bench, Work

_SIZE = 256 << 20
_IGZIP = f"{sys.executable} -m isal.igzip -dc {{path}} > /dev/null"
#: The form that is unpacked, and how. The clusters of a compressed qcow2 hold what a compressed one would
#: hold.
UNPACKING = {
    "raw.gz": ("raw.gz", _IGZIP),
    "qcow2.gz": ("qcow2.gz", _IGZIP),
    "c.qcow2": ("qcow2.gz", _IGZIP),
    "raw.xz": ("raw.xz", "xz -T0 -dc {path} > /dev/null"),
    "raw.zst": ("raw.zst", "zstd -q -dc {path} > /dev/null"),
}


class Machine:
    """The limits of the machine. ``rates``: bytes a second or seconds of unpacking, measured once."""

    def __init__(self, bench: Bench, rates: MutableMapping[str, float]) -> None:
        self._bench = bench
        self._rates = rates

    def limit(self, work: Work, kind: str) -> tuple[str, float] | None:
        """Return the slowest part of the work, and its seconds on this machine; None if nothing is known."""
        found = {}
        if work.written:
            found["disk"] = work.written / self._rate(f"disk {kind}", lambda: self._disk(kind))
        if work.fetched:
            found["network"] = work.fetched / self._rate("network", self._network)
        if work.unpack:
            found["unpack"] = self._rate(f"unpack {work.unpack}", lambda: self._unpack(work.unpack))
        return max(found.items(), key=lambda item: item[1], default=None)

    def _rate(self, name: str, measure: Callable[[], float]) -> float:
        if name not in self._rates:
            self._rates[name] = measure()
        return self._rates[name]

    def _disk(self, kind: str) -> float:
        """Return the bytes a second that the target takes, from memory to the storage."""
        target = self._bench.target(kind)
        noise = inputs.noise(self._bench.directory, _SIZE)
        dd = f"dd if={noise} of={target} bs=1M conv=fsync,notrunc status=none"
        return _SIZE / min(self._bench.shell(dd, target)().wall for _ in range(2))

    def _network(self) -> float:
        """Return the bytes a second of the wire, or of one connection over loopback."""
        if self._bench.setting.wire:
            return self._bench.setting.wire
        url = self._bench.web.url(inputs.noise(self._bench.directory, _SIZE))
        curl = self._bench.shell(f"curl -sf {url} -o /dev/null", self._bench.file)
        return _SIZE / min(curl().wall for _ in range(3))

    def _unpack(self, name: str) -> float:
        form, command = UNPACKING[name]
        return self._bench.shell(command.format(path=self._bench.form(form)), self._bench.file)().wall
