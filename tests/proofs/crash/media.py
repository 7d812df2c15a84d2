"""Where a disk is written: block devices and file systems, and what counts as an accepted disk on them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from tests.support import devices, oracle, processes

MiB = 1 << 20


class Kind:
    """A kind of storage.

    ``sector``: its logical sector in bytes. ``unit``: bytes that it writes whole or not at all.
    """

    sector: int
    unit: int

    def prepare(self, path: Path) -> None:
        """Write what the device holds before the import."""
        raise NotImplementedError

    @contextlib.contextmanager
    def target(self, device: Path, directory: Path) -> Iterator[Path]:
        """Yield the target of an import on the device; ``directory`` is for mount points."""
        raise NotImplementedError
        yield

    def accepted(self, target: Path, expected: Path) -> bool:
        """Return whether something would use the target as a disk."""
        raise NotImplementedError

    def neighbour(self, target: Path) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the storage has another user."""
        return contextlib.nullcontext()


@dataclasses.dataclass(frozen=True)
class Block(Kind):
    """A block device, accepted as soon as the first sector with data of the disk is there."""

    sector: int
    size: int = 24 * MiB

    @property
    def unit(self) -> int:
        """A device may tear a write between any two sectors."""
        return self.sector

    def prepare(self, path: Path) -> None:
        devices.fill(path, self.size)

    @contextlib.contextmanager
    def target(self, device: Path, directory: Path) -> Iterator[Path]:
        yield device

    def accepted(self, target: Path, expected: Path) -> bool:
        at = first_data(expected, self.sector)
        with target.open("rb", buffering=0) as stream:
            stream.seek(at)
            found = stream.read(self.sector)
        if found.startswith(b"cdi-worker "):  # the record of a claim, or a journal
            return False
        return found.strip(b"\0") not in (b"", devices.DIRT * self.sector)


@dataclasses.dataclass(frozen=True)
class FileSystem(Kind):
    """A file system on a device, where a disk is accepted once it has its name.

    File systems rely on blocks of 4 KiB being written whole. ``busy``: a neighbour syncs a file of its own
    again and again, so that the journal commits whatever the import has done, at any moment.
    """

    name: str
    sector: int
    busy: bool = False
    unit: int = 4096

    def prepare(self, path: Path) -> None:
        with path.open("wb") as stream:
            stream.truncate(devices.SMALLEST[self.name])
        with devices.attached(path, sector=self.sector, direct=False) as device:
            devices.make_filesystem(self.name, device)

    @contextlib.contextmanager
    def target(self, device: Path, directory: Path) -> Iterator[Path]:
        point = directory / "mounted"
        point.mkdir(exist_ok=True)
        processes.run("mount", device, point)
        try:
            yield point / "disk.img"
        finally:
            processes.run("umount", point)

    def accepted(self, target: Path, expected: Path) -> bool:
        return target.exists()

    def neighbour(self, target: Path) -> contextlib.AbstractContextManager[None]:
        return _syncing(target.parent / "neighbour") if self.busy else contextlib.nullcontext()


@contextlib.contextmanager
def _syncing(path: Path) -> Iterator[None]:
    """Write to a file and sync it, again and again, until the block ends."""
    over = threading.Event()

    def work() -> None:
        with path.open("wb", buffering=0) as stream:
            while not over.wait(0.02):
                stream.write(b"neighbour")
                os.fsync(stream.fileno())

    working = threading.Thread(target=work)
    working.start()
    try:
        yield
    finally:
        over.set()
        working.join()


def first_data(disk: Path, sector: int) -> int:
    """Return the offset of the first sector of a disk that is not zero."""
    with disk.open("rb") as stream:
        while any_data := stream.read(sector):
            if any_data.strip(b"\0"):
                return stream.tell() - len(any_data)
    raise AssertionError(f"{disk} is empty")


def whole(target: Path, disks: tuple[Path, ...], rest: bytes) -> None:
    """Check that the target is one of the disks, to its last byte; a device is filled with ``rest``."""
    beyond = rest if target.is_block_device() else b"\0"
    failures = []
    for disk in disks:
        try:
            oracle.same(target, disk, beyond=beyond)
        except AssertionError as err:
            failures.append(str(err))
        else:
            return
    raise AssertionError("; ".join(failures))


KINDS: dict[str, Kind] = {
    "block512": Block(512),
    "block4096": Block(4096),
    "ext4": FileSystem("ext4", 512),
    "ext4-4096": FileSystem("ext4", 4096),
    "ext4-busy": FileSystem("ext4", 512, busy=True),
    "xfs": FileSystem("xfs", 512),
    "xfs-4096": FileSystem("xfs", 4096),
    "xfs-busy": FileSystem("xfs", 512, busy=True),
}
