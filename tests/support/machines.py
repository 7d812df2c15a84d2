"""A registered source, as a protocol that exports disks: each stage is a whole VMDK, made anew each time.

    machine = machines.Machine(folder)
    machine.take("one", data)
    cdi_worker.run(machine.request(target, current="one"))

A killed process registers it by ``REGISTERED``.
"""

from __future__ import annotations

import dataclasses
import io
import time
from pathlib import Path
from typing import Any

import cdi_worker
from cdi_worker import errors
from cdi_worker.sources import staged
from tests.support import kills, vmdk_stream

REGISTERED = "from tests.support import machines; machines.register()"
_HEAD = 256 << 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Location(staged.Staged):
    """The folder of a machine; ``current``: the name of a disk in it."""


class Export(cdi_worker.Source):
    """The disk as a stream-optimized VMDK, without a length and ranges.

    Beside the disk ``NAME.raw``, the folder may have files: ``level``, of the compression; ``slow``, in which
    case the stream stalls near its end; ``scratch``, whose tables cannot be followed; ``stated``, its size.
    """

    def __init__(self, location: Location, cancel: cdi_worker.Cancel) -> None:
        self._folder = Path(location.endpoint)
        self._location = location
        self._cancel = cancel
        self.name = f"{location.endpoint}#{location.current}"

    def open(self, opening: cdi_worker.Opening) -> cdi_worker.Facts:
        disk = (self._folder / f"{self._location.current}.raw").read_bytes()
        told = {each.name: each.read_text() for each in self._folder.iterdir() if each.suffix != ".raw"}
        self._slow = "slow" in told
        unmarked = (vmdk_stream.TABLE,) if "scratch" in told else ()
        level = int(told.get("level", 1))
        before = self._folder / f"{self._location.previous}.raw"
        self._image = vmdk_stream.streamed(disk, level=level, progress=1, unmarked=unmarked)
        return cdi_worker.Facts(
            name=self.name,
            head=self._image[:_HEAD],
            identity=f"machine {self._location.current}",
            format="vmdk",
            disk_size=int(told.get("stated", len(disk))),
            previous_size=before.stat().st_size if before.exists() else None,
        )

    def stream(self, offset: int = 0) -> cdi_worker.Reader:
        if offset:
            raise errors.NoRanges(url=self.name, reason="made while it is sent")
        return _Reader(self._image, self._cancel, slow=self._slow)


class _Reader(io.BytesIO):
    def __init__(self, data: bytes, cancel: cdi_worker.Cancel, *, slow: bool) -> None:
        super().__init__(data)
        self._cancel = cancel
        self._end = len(data) * 7 // 8 if slow else None

    def readinto(self, into: Any, /) -> int:
        if self._end is None:
            return super().readinto(into)
        while self.tell() >= self._end:
            self._cancel.check()
            time.sleep(0.01)  # until it is killed
        time.sleep(0.002)  # a slow source
        return super().readinto(memoryview(into)[: 64 << 10])


KIND = cdi_worker.Kind("machine", Export, location=Location)


def register() -> None:
    """Register the kind ``machine`` in this process."""
    cdi_worker.register(KIND)


@dataclasses.dataclass(frozen=True)
class Machine:
    """The folder of a machine; ``register`` must have been called."""

    folder: Path

    def take(self, name: str, disk: bytes) -> None:
        """Take a snapshot."""
        (self.folder / f"{name}.raw").write_bytes(disk)

    def tell(self, **told: object) -> None:
        """Change how the next exports are; None: as it was."""
        for name, value in told.items():
            if value is None:
                (self.folder / name).unlink()
            else:
                (self.folder / name).write_text(str(value))

    def request(self, target: Path, current: str = "", previous: str = "", **more: Any) -> cdi_worker.Request:
        """Return the request of a stage; a full copy without ``previous``."""
        where = Location(str(self.folder), current=current, previous=previous, final=more.pop("final", False))
        options = {"existing": "replace", **kills.OPTIONS, **more}
        return cdi_worker.Request(source="machine", location=where, target=str(target), **options)
