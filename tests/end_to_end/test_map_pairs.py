"""Random pairs of a map and a disk: the verdict is that of cmp. Random servers that damage a range by a map.

Each case has a seed, which its failure names: ``pytest 'tests/end_to_end/test_map_pairs.py::NAME[SEED-…]'``
runs the cases of a seed again.
"""

from __future__ import annotations

import dataclasses
import random
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker import errors
from cdi_worker.formats import bmap
from cdi_worker.sources import trust
from tests.support import bmaps, bmaptool, devices, misbehave
from tests.support.mapped_disks import Made, asked, serve
from tests.support.pages import Page

BLOCK, MIB = 4096, 1 << 20
Change = Callable[[bytearray, random.Random], None]


def _disk(path: Path, dice: random.Random) -> bytes:
    """Write a sparse disk of whole sectors; return its bytes."""
    size = dice.randrange(1, 6 * MIB // 512) * 512
    with path.open("wb") as file:
        file.truncate(size)
        for _ in range(dice.randrange(8)):
            at = dice.randrange(size)
            file.seek(at)
            file.write(dice.randbytes(min(size - at, dice.choice([1, 512, BLOCK, 70_000, MIB]))))
    return path.read_bytes()


# -- verify --map


def _same(_data: bytearray, _dice: random.Random) -> None:
    """Change nothing."""


def _bit(data: bytearray, dice: random.Random) -> None:
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)


def _sector(data: bytearray, dice: random.Random) -> None:
    at = dice.randrange(len(data) // 512) * 512
    data[at : at + 512] = dice.randbytes(512)


def _zeroed(data: bytearray, dice: random.Random) -> None:
    """Zero a part, which may be zero already."""
    at = dice.randrange(len(data))
    length = min(len(data) - at, dice.choice([1, BLOCK, MIB]))
    data[at : at + length] = bytes(length)


def _moved(data: bytearray, dice: random.Random) -> None:
    """Swap two blocks, which may have the same bytes."""
    one, other = (dice.randrange(len(data) // 512) * 512 for _ in range(2))
    data[one : one + 512], data[other : other + 512] = data[other : other + 512], data[one : one + 512]


def _ends(data: bytearray, _dice: random.Random) -> None:
    data[0] ^= 1
    data[-1] ^= 1


def _longer(data: bytearray, dice: random.Random) -> None:
    data.extend(bytes(dice.choice([512, MIB])))


def _followed(data: bytearray, dice: random.Random) -> None:
    data.extend(dice.randbytes(512))


def _shorter(data: bytearray, dice: random.Random) -> None:
    del data[-min(len(data) - 512, 512 * dice.randrange(1, 300)) or len(data) :]


CHANGES: tuple[Change, ...] = (
    _same,
    _bit,
    _sector,
    _zeroed,
    _moved,
    _ends,
    _longer,
    _followed,
    _shorter,
    _bit,
)


def _request(disk: Path, map_: Path | None = None) -> cdi_worker.Request:
    location = cdi_worker.Location("")
    demand = trust.Demand(map=str(map_)) if map_ else trust.NOTHING
    return cdi_worker.Request(source="none", location=location, target=str(disk), demand=demand)


def _oracle(disk: Path, expected: Path) -> tuple[bool, int | None]:
    """Return whether cmp finds no difference but zeros at the end of the disk, and the first byte."""
    length = expected.stat().st_size
    found = subprocess.run(["cmp", "-l", disk, expected], capture_output=True, text=True, check=False)
    differing = found.stdout.split("\n", 1)[0].split()
    rest = disk.read_bytes()[length:]
    first = int(differing[0]) - 1 if differing else length if any(rest) else None
    return first is None and disk.stat().st_size >= length, first


@pytest.mark.parametrize("maker", ["map", "bmaptool"])
@pytest.mark.parametrize("seed", range(10))
def test_verdict_by_a_map_is_that_of_cmp(tmp_path: Path, seed: int, maker: str) -> None:
    """200 pairs: ten changes of each of ten disks, by our map and by that of bmaptool."""
    dice = random.Random(f"{maker} {seed}")
    expected, disk, written = tmp_path / "expected", tmp_path / "disk.img", tmp_path / "disk.bmap"
    data = _disk(expected, dice)
    made = (
        bmap.write(cdi_worker.create_map(_request(expected))) if maker == "map" else bmaptool.create(expected)
    )
    written.write_bytes(made)
    assert maker == "bmaptool" or bmap.parse(made) == bmaps.expected(data)
    for change in CHANGES:
        changed = bytearray(data)
        change(changed, dice)
        disk.write_bytes(changed)
        found = cdi_worker.verify_map(_request(disk, written))
        same, first = _oracle(disk, expected)
        case = f"seed {seed} {maker} {change.__name__}: {found}"
        assert found.is_equal == same, case
        # cmp does not count what is missing at the end.
        assert (found.first is None) == (first is None) or change is _shorter, case
        if first is not None and found.first is not None:
            # All of a range has one checksum.
            around = [start for start, end, _ in bmap.parse(made).ranges if start <= first < end]
            assert found.first == (around[0] if around else first), case


# -- import --map


@dataclasses.dataclass
class Damaging:
    """Damages the responses that have a byte at ``place``, the first ``times`` of them."""

    place: int
    times: int

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def __call__(self, first: int, data: bytes) -> bytes:
        at = self.place - first
        with self._lock:
            if not 0 <= at < len(data) or not self.times:
                return data
            self.times -= 1
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("times", [0, 1, 1000], ids=["never", "once", "always"])
@pytest.mark.parametrize("seed", range(34))
def test_import_by_a_map_from_a_server_that_damages_a_range(
    server: misbehave.Server, tmp_path: Path, seed: int, times: int
) -> None:
    """The disk is right, or there is none: two imports for each seed, of ranges and of a stream."""
    dice = random.Random(f"{seed} {times}")
    path, target = tmp_path / "disk", tmp_path / "disk.img"
    data = _disk(path, dice)
    blocks = bmaptool.create(path) if dice.random() < 0.5 else bmap.write(bmaps.expected(data))
    ranges = bmap.parse(blocks).ranges
    for has_ranges in (True, False):
        devices.fill(target, len(data))
        start, end, _ = dice.choice(ranges or ((0, len(data), b""),))
        place = dice.randrange(start, end)
        page = Page(data, ranges=has_ranges, damage=Damaging(place, times))
        request = asked(*serve(server, Made(path, blocks), page), target)
        case = f"seed {seed} times {times} ranges {has_ranges} byte {place} of {len(data)}"
        is_wrong = bool(times and (times > 1 or not has_ranges) and (ranges or not has_ranges))
        try:
            cdi_worker.run(request)
        except errors.MapMismatch:
            assert is_wrong, case
            assert target.read_bytes() == devices.DIRT * len(data), case
        else:
            assert not is_wrong, case
            assert target.read_bytes() == data, case
        assert not [*tmp_path.glob("disk.img.*")], case
