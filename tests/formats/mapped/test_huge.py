"""Images with the largest tables that are accepted: read like others, in pieces, in bounded memory."""

from __future__ import annotations

import os
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from cdi_worker.formats import detect, facts, safety
from cdi_worker.formats.mapped import image
from cdi_worker.images.disks import base, tables
from cdi_worker.images.engine import cancelling, fetch
from tests.support import processes

MiB = 1 << 20
TiB = 1 << 40


class File:
    """A file with random access, as ``RandomReader``."""

    def __init__(self, path: Path) -> None:
        self.size = path.stat().st_size
        self._fd = os.open(path, os.O_RDONLY)

    def read(self, offset: int, length: int) -> bytes:
        return os.pread(self._fd, length, offset)

    def read_range(self, offset: int, into: memoryview, /) -> int:
        return os.preadv(self._fd, [into], offset)

    def interrupt(self) -> None: ...

    def close(self) -> None:
        os.close(self._fd)


class Sums:
    """A disk of any size: the bytes zeroed, and of what is written the length and value at each offset."""

    def __init__(self) -> None:
        self.zeros = 0
        self.written: dict[int, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def write(self, offset: int, data: memoryview) -> None:
        assert bytes(data) == bytes([data[0]]) * len(data)
        with self._lock:
            self.written[offset] = len(data), data[0]

    def zero(self, _offset: int, length: int) -> None:
        with self._lock:
            self.zeros += length


class Kind(NamedTuple):
    """How QEMU makes an image of ``size`` bytes. ``unit``: bytes of a block or cluster."""

    form: str
    driver: str
    size: int
    unit: int
    option: str


KINDS = {
    "vhdx": Kind("vhdx", "vhdx", 64 * TiB, 4 * MiB, "block_size=4M"),  # a table of 128 MiB
    "vdi": Kind("vdi", "vdi", 32 * TiB, MiB, "static=off"),  # a map of 128 MiB
    "vhd": Kind("vhd", "vpc", 2040 << 30, 2 * MiB, "force_size=on"),  # the largest that QEMU accepts
    "qcow2": Kind("qcow2", "qcow2", 32 * TiB, 8 << 10, "cluster_size=8k"),  # a first-level table of 32 MiB
}


@pytest.fixture(params=KINDS)
def huge(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Kind, Path]]:
    """Make an empty image with data in its first unit, in the middle, and in its last unit."""
    kind = KINDS[request.param]
    path = tmp_path / "image"
    processes.need("qemu-img", "qemu-io")
    size = str(kind.size)
    processes.run("qemu-img", "create", "-q", "-f", kind.driver, "-o", kind.option, path, size)
    writes = [f"write -q -P {value} {at} {kind.unit}" for at, value in places(kind).items()]
    processes.run("qemu-io", "-f", kind.driver, *(f"-c{write}" for write in writes), path)
    yield kind, path
    path.unlink()


def places(kind: Kind) -> dict[int, int]:
    """Return the values at the offsets that have data."""
    return {0: 1, kind.size // 2: 2, kind.size - kind.unit: 3}


def delivered(file: File, checked: facts.ImageFacts) -> Sums:
    layout = checked.layout
    assert layout is not None
    fetcher = fetch.Fetcher(file, file.size, fetch.FetchOptions(connections=2), scope=cancelling.Cancel())
    disk = tables.MappedDisk(
        [lambda _: fetcher], lambda reads: image.MappedImage(layout, reads[0], file.size), layout.virtual_size
    )
    sums = Sums()
    assert disk.deliver(sums, base.EVERYTHING, base.DeliveryMeter()) == layout.virtual_size
    return sums


@pytest.mark.slow
def test_sparse_disk_is_read_in_bounded_memory(huge: tuple[Kind, Path]) -> None:
    kind, path = huge
    file = File(path)
    checked = safety.check(kind.form, file.read(0, detect.HEAD), read=file.read, size=file.size)
    assert checked.virtual_size == kind.size
    assert checked.layout is not None
    tracemalloc.start()
    sums = delivered(file, checked)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    file.close()
    assert sums.zeros == kind.size - 3 * kind.unit
    assert sum(length for length, _ in sums.written.values()) == 3 * kind.unit
    assert {at // kind.unit * kind.unit: value for at, (_, value) in sums.written.items()} == places(kind)
    assert peak < 80 * MiB
