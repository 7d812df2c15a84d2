"""An update by the old map: the disk is the new one, whatever the order, and what is known is not read."""

from __future__ import annotations

import hashlib
import itertools
import random
import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import pytest

from cdi_worker import errors
from cdi_worker.formats import bmap
from cdi_worker.images.sinks import compared, oldmap
from tests.support import bmaps

BLOCK, MiB = 4096, 1 << 20


class Target(bmaps.Disk):
    """A disk that is updated in place. ``written``: where."""

    path = "disk"

    def __init__(self, data: bytes) -> None:
        super().__init__(len(data))
        self.data[:] = data
        self.storage = self
        self.written: list[tuple[int, int]] = []
        self.end = 0
        self._lock = threading.Lock()

    def reach(self, end: int) -> None:
        with self._lock:
            self.end = max(self.end, end)
            self.data.extend(bytes(max(0, end - len(self.data))))

    def write(self, offset: int, data: memoryview) -> None:
        self.written.append((offset, offset + len(data)))
        super().write(offset, data)

    def zero(self, offset: int, length: int) -> None:
        self.written.append((offset, offset + length))
        super().zero(offset, length)

    def nonzero(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        self.read_bytes += end - start
        return self.allocated(start, end)


def sink_of(target: Any, blocks: bmap.Map) -> tuple[compared.Updating, oldmap.OldMap]:
    updating = compared.Updating(target)
    return updating, oldmap.OldMap(updating, blocks)


def disk(dice: random.Random, blocks: int) -> bytearray:
    """Return a disk of ``blocks`` blocks of data and of zeros."""
    data = bytearray(blocks * BLOCK)
    for _ in range(dice.randrange(1, 8)):
        start = dice.randrange(blocks)
        end = min(blocks, start + dice.choice([1, 20, 300]))
        data[start * BLOCK : end * BLOCK] = dice.randbytes((end - start) * BLOCK)
    return data


def map_of(dice: random.Random, data: bytes) -> bmap.Map:
    """Return a map by us, or one as of bmaptool: ranges of any length, also of zeros."""
    if dice.random() < 0.5:
        return bmaps.expected(data)
    found, at = [], 0
    while at < len(data):
        start = at + dice.choice([0, 0, 1, 40]) * BLOCK
        if any(data[at:start]):
            start = at
        end = min(len(data), start + dice.choice([1, 50, 600]) * BLOCK)
        if start < end:
            found.append((start, end, hashlib.sha256(data[start:end]).digest()))
        at = max(start, end)
    return bmap.Map(len(data), BLOCK, tuple(found))


def changed(dice: random.Random, old: bytes) -> bytearray:
    new = bytearray(old)
    for _ in range(dice.randrange(4)):
        at = dice.randrange(len(new))
        length = min(len(new) - at, dice.choice([1, 512, 70_000, 2 * MiB]))
        new[at : at + length] = dice.choice([bytes(length), dice.randbytes(length)])
    size = len(old) + dice.choice([0, 0, BLOCK, -BLOCK, MiB])
    return new[: max(BLOCK, size)].ljust(size, b"\0")


def deliver(sink: oldmap.OldMap, data: bytes, dice: random.Random) -> None:
    """Deliver a disk in pieces, in any order, by several threads."""
    unit = dice.choice([512, BLOCK, 65536, MiB])
    borders = {0, len(data), *(dice.randrange(0, len(data), unit) for _ in range(dice.choice([0, 5, 40])))}
    parts = list(itertools.pairwise(sorted(borders)))
    dice.shuffle(parts)

    with futures.ThreadPoolExecutor(3) as executor:
        list(executor.map(lambda part: bmaps.deliver(sink, data, *part), parts))
    sink.end()


@pytest.mark.slow
@pytest.mark.parametrize("most", [None, 0, 300_000])
@pytest.mark.parametrize("seed", range(40))
def test_updated_disk_is_the_new_one(seed: int, most: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if most is not None:
        monkeypatch.setattr(oldmap, "_MOST", most)
    dice = random.Random(seed)
    old = bytes(disk(dice, dice.randrange(1, 1200)))
    new = changed(dice, old)
    target = Target(old)
    updating, sink = sink_of(target, map_of(dice, old))
    deliver(sink, bytes(new), dice)
    assert target.data[: len(new)] == new
    assert (target.end, updating.changes.compared) == (len(new), len(new))
    if old == new and most is None:
        assert (target.read_bytes, target.written) == (0, [])


def test_only_ranges_that_differ_are_read() -> None:
    old = random.Random(1).randbytes(4 * MiB) + bytes(4 * MiB)
    new = bytearray(old)
    new[MiB + 5] ^= 1
    new[6 * MiB] = 1
    target = Target(old)
    updating, sink = sink_of(target, bmaps.expected(old))
    for at in range(0, len(new), MiB):
        sink.write(at, memoryview(new)[at : at + MiB])
    assert target.data == new
    # The range, and what is data where the map has none.
    assert target.read_bytes == 2 * MiB
    assert target.written == [(MiB, MiB + BLOCK), (6 * MiB, 6 * MiB + BLOCK)]
    assert updating.changes == compared.Changes(8 * MiB, 2 * BLOCK, 2 * BLOCK)


def test_piece_that_comes_twice_is_not_taken_for_the_whole() -> None:
    old = random.Random(1).randbytes(MiB)
    target = Target(old)
    _, sink = sink_of(target, bmaps.expected(old))
    new = b"\xaa" * (MiB // 2)
    for _ in range(2):
        sink.write(MiB // 2, memoryview(new))
    sink.end()
    assert target.data == old[: MiB // 2] + new


def test_sample_shows_another_disk() -> None:
    data = random.Random(1).randbytes(40 * MiB)
    blocks = bmaps.expected(data)
    oldmap.check(Target(data), blocks)  # type: ignore[arg-type]
    assert oldmap.check(Target(b""), bmap.Map(4096, 4096, ())) is None  # type: ignore[arg-type]
    for place in (0, MiB, 39 * MiB):
        target = Target(data)
        target.data[place] ^= 1
        with pytest.raises(errors.TargetError, match=f"bytes {place} to .* are not what its map says"):
            oldmap.check(target, blocks)  # type: ignore[arg-type]
        assert target.read_bytes <= 16 * MiB


def test_sample_has_holes() -> None:
    blocks = bmap.Map(40 * MiB, 4096, ())
    target = Target(bytes(40 * MiB))
    oldmap.check(target, blocks)  # type: ignore[arg-type]
    target.data[MiB - 1] = 1
    with pytest.raises(errors.TargetError, match="bytes 0 to 1048575 are not what its map says"):
        oldmap.check(target, blocks)  # type: ignore[arg-type]


def test_few_and_long_ranges_are_sampled() -> None:
    data = random.Random(1).randbytes(12 * MiB)
    target = Target(data * 2)
    whole = bmap.Map(2 * len(data), 4096, ((0, 2 * len(data), b"other" * 6 + b"xx"),))
    oldmap.check(target, whole)  # type: ignore[arg-type]
    assert target.read_bytes == 0
    for count in range(1, 12):
        target = Target(data[: count * MiB])
        oldmap.check(target, bmaps.expected(bytes(target.data)))  # type: ignore[arg-type]
        assert target.read_bytes == count * MiB
