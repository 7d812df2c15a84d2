"""Record every write and flush of a block device.

QEMU's driver ``blklogwrites`` logs what qemu-storage-daemon exports by NBD. nbdfuse makes a file of the
export, and a loop device with direct I/O on it passes each write, discard and flush. (The daemon's own
FUSE export reuses the buffer of a write for the next request before the log has it: QEMU 7.2.) The log has
the format of the kernel's dm-log-writes, Documentation/admin-guide/device-mapper/log-writes.rst.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import devices, processes

#: The unit of the log, whatever the sector size of the device.
_SECTOR = 512
_MAGIC = 0x6A736677736872
_FLUSH, _DISCARD = 1, 4


@dataclasses.dataclass(frozen=True)
class Write:
    """Bytes written to the device; a discard writes zeros, as QEMU's raw files do."""

    offset: int
    data: bytes

    @property
    def end(self) -> int:
        """Return the offset after the last byte."""
        return self.offset + len(self.data)


#: The writes between two flushes.
Epoch = list[Write]


@dataclasses.dataclass(frozen=True)
class Recorder:
    """A device whose writes are recorded. ``base``: its content at the start; ``data``: its content now."""

    device: Path
    base: Path
    sector: int
    data: Path
    _log: Path

    def position(self) -> int:
        """Return the end of the record."""
        return self._log.stat().st_size

    def epochs(self, end: int) -> list[Epoch]:
        """Return the epochs up to a position. Only the last one is not followed by a flush."""
        found: list[Epoch] = [[]]
        with self._log.open("rb") as log:
            for write in _entries(log.read(end)):
                if write is not None:
                    found[-1].append(write)
                elif found[-1]:
                    found.append([])
        return found


def _entries(log: bytes) -> Iterator[Write | None]:
    """Yield the entries of a log; None: a flush."""
    if not log:
        return
    # The number of entries is updated at intervals only.
    magic, version, _, sector = struct.unpack_from("<QQQI", log)
    assert (magic, version, sector) == (_MAGIC, 1, _SECTOR)
    at = _SECTOR
    while at < len(log):
        start, count, flags, _ = struct.unpack_from("<QQQQ", log, at)
        at += _SECTOR
        length = count * _SECTOR
        if flags & _DISCARD:
            yield Write(start * _SECTOR, bytes(length))
        elif length:
            yield Write(start * _SECTOR, log[at : at + length])
            at += length
        if flags & _FLUSH:
            yield None


@contextlib.contextmanager
def recorded(directory: Path, base: Path, sector: int) -> Iterator[Recorder]:
    """Make a recorded device with the content of ``base``; ``directory`` must be empty."""
    processes.need_root()
    processes.need("qemu-storage-daemon", "nbdfuse", "losetup")
    if not Path("/dev/fuse").exists():
        pytest.skip("needs /dev/fuse")
    data, log, socket, point = (directory / name for name in ("data", "log", "nbd", "fuse"))
    copy_sparse(base, data)
    log.touch()
    point.mkdir()
    logged = f"driver=blklogwrites,node-name=logged,file=data,log=log,log-sector-size={_SECTOR},discard=unmap"
    daemon: list[str | Path] = [
        "qemu-storage-daemon",
        "--blockdev", f"driver=file,node-name=data,filename={data},discard=unmap",
        "--blockdev", f"driver=file,node-name=log,filename={log}",
        "--blockdev", logged,
        "--nbd-server", f"addr.type=unix,addr.path={socket}",
        "--export", "type=nbd,id=export,node-name=logged,name=,writable=on",
    ]  # fmt: skip
    exported = functools.partial(processes.is_listening, socket)
    fuse: list[str | Path] = ["nbdfuse", point / "disk", "--unix", socket]
    with (
        processes.running(daemon, log=directory / "daemon.log", ready=exported),
        processes.running(fuse, log=directory / "nbdfuse.log", ready=(point / "disk").exists),
        devices.attached(point / "disk", sector=sector) as device,
    ):
        yield Recorder(device, base, sector, data, log)


def copy_sparse(source: Path, target: Path) -> None:
    """Copy a file without its holes."""
    with source.open("rb", buffering=0) as have, target.open("wb", buffering=0) as want:
        size, at = os.fstat(have.fileno()).st_size, 0
        os.truncate(want.fileno(), size)
        while True:
            try:
                at = os.lseek(have.fileno(), at, os.SEEK_DATA)
            except OSError:
                return
            end = os.lseek(have.fileno(), at, os.SEEK_HOLE)
            have.seek(at)
            want.seek(at)
            while at < end:
                at += os.sendfile(want.fileno(), have.fileno(), None, end - at)
