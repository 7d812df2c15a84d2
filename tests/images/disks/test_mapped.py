"""Mapped disks: what is wrong is fetched again, and pieces that wait to be written are not overwritten."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import random
import time

import pytest

from cdi_worker import errors
from cdi_worker.formats import bmap, readers
from cdi_worker.images.disks import base, mapped
from cdi_worker.images.engine import cancelling, fetch

KIB, MIB = 1 << 10, 1 << 20
SIZE = 16 * MIB
NAMES = ("disk", "map")


class Slow:
    """Takes its time with each piece. Ranges that are wrong may be written twice."""

    def __init__(self, size: int = SIZE) -> None:
        self.content = bytearray(b"\xff" * size)

    def write(self, offset: int, data: memoryview, /) -> None:
        time.sleep(0.01)
        self.content[offset : offset + len(data)] = data

    def zero(self, offset: int, length: int, /) -> None:
        self.content[offset : offset + length] = bytes(length)


class Lying:
    """Serves ranges; the first reads of some places are wrong, as often as ``lies`` says."""

    def __init__(self, data: bytes, lies: dict[int, int]) -> None:
        self.data = data
        self.lies = lies

    def read_range(self, offset: int, into: memoryview, /) -> int:
        into[:] = self.data[offset : offset + len(into)]
        for place in self.lies:
            if offset <= place < offset + len(into) and self.lies[place]:
                self.lies[place] -= 1
                into[place - offset] ^= 1
        return len(into)


def disk(seed: int, longest: int) -> tuple[bytes, bmap.Map]:
    """Return a disk of random ranges and its map."""
    chance = random.Random(seed)
    data, ranges, at = bytearray(SIZE), [], 0
    while (start := at + chance.choice([0, 0, 4096, 512 * KIB])) < SIZE:
        at = min(SIZE, start + chance.randrange(4096, longest, 4096))
        data[start:at] = chance.randbytes(at - start)
        ranges.append((start, at, hashlib.sha256(data[start:at]).digest()))
    return bytes(data), bmap.Map(SIZE, 4096, tuple(ranges))


def by_ranges(data: bytes, blocks: bmap.Map, lies: dict[int, int], scope: cancelling.Cancel) -> base.Disk:
    options = fetch.Options(connections=2, chunk=512 * KIB)
    fetcher = fetch.Fetcher(Lying(data, lies), SIZE, options, scope=scope)
    return mapped.ByRanges(lambda _: fetcher, mapped.Selection(blocks), scope, NAMES)


def passing(data: bytes, selection: mapped.Selection) -> base.Disk:
    opened = contextlib.nullcontext(readers.Bytes(data))
    return mapped.Passing(lambda _: opened, selection, cancelling.Cancel(), NAMES, footer=True)


@pytest.mark.slow
@pytest.mark.parametrize("longest", [256 * KIB, 6 * MIB])
@pytest.mark.parametrize("seed", range(3))
def test_each_range_that_is_wrong_is_fetched_again(seed: int, longest: int) -> None:
    data, blocks = disk(seed, longest)
    lies = {random.Random(seed).randrange(start, end): mapped.AGAIN for start, end, _ in blocks.ranges[::3]}
    sink, again = Slow(), []
    made = by_ranges(data, blocks, dict(lies), cancelling.Cancel())
    made.again = lambda start, end: again.append((start, end))
    assert made.deliver(sink, base.EVERYTHING, base.Meter()) == SIZE
    assert sink.content == data
    assert again == [each[:2] for each in blocks.ranges[::3] for _ in range(mapped.AGAIN)]


def test_range_that_stays_wrong_is_an_error() -> None:
    data, blocks = disk(1, MIB)
    start, end, _ = blocks.ranges[4]
    sink, scope = Slow(), cancelling.Cancel()
    with pytest.raises(
        errors.MapMismatch, match=f"bytes {start} to {end - 1} have another checksum, 4 times"
    ):
        by_ranges(data, blocks, {start: 1000}, scope).deliver(sink, base.EVERYTHING, base.Meter())
    # A range of one piece is not written before it is verified.
    assert sink.content[start:end] == b"\xff" * (end - start)
    assert scope.is_set()


@pytest.mark.parametrize("seed", range(3))
def test_stream_delivers_what_differs_from_another_map(seed: int) -> None:
    """Pieces that are verified and not delivered do not overwrite those that wait."""
    data, blocks = disk(seed, 3 * MIB)
    kept = blocks.ranges[seed::2]
    selection = mapped.Selection(blocks, dataclasses.replace(blocks, ranges=kept))
    sink = Slow()
    made = passing(data, selection)
    assert made.deliver(sink, base.EVERYTHING, base.Meter()) == SIZE
    for start, end, digest in blocks.ranges:
        is_kept = (start, end, digest) in kept
        assert sink.content[start:end] == (b"\xff" * (end - start) if is_kept else data[start:end])
    assert made.declared == sum(end - start for start, end, _ in blocks.ranges if (start, end, _) not in kept)
    assert made.covers_all is False


def test_selection_of_two_maps() -> None:
    def map_of(size: int, *ranges: tuple[int, int, bytes]) -> bmap.Map:
        return bmap.Map(size * 4096, 4096, tuple((start * 4096, end * 4096, d) for start, end, d in ranges))

    new = map_of(20, (1, 3, b"a"), (5, 6, b"b"), (10, 12, b"c"))
    old = map_of(14, (1, 3, b"a"), (5, 6, b"x"), (8, 9, b"y"), (10, 11, b"c"), (12, 13, b"z"))
    found = mapped.Selection(new, old)
    assert [start // 4096 for start, _, _ in found.ranges] == [5, 10]
    assert [(start // 4096, end // 4096) for start, end in found.zeros] == [(8, 9), (12, 13), (14, 20)]
    assert found.declared == 3 * 4096 + 8 * 4096
    everything = mapped.Selection(new)
    assert everything.declared == 20 * 4096
    # Equal digests by another algorithm are not the same.
    assert len(mapped.Selection(new, dataclasses.replace(new, algorithm="sha512")).ranges) == 3
    assert mapped.Selection(new, new).declared == 0


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_stream_of_another_length_is_refused(more: int) -> None:
    data, blocks = disk(5, MIB)
    body = (data + b"\0")[: SIZE + more]
    made = passing(body, mapped.Selection(blocks))
    if more == 0:
        assert made.deliver(Slow(), base.EVERYTHING, base.Meter()) == SIZE
        return
    with pytest.raises(errors.MapMismatch):
        made.deliver(Slow(), base.EVERYTHING, base.Meter())


def test_stream_that_ends_in_a_hole_is_refused() -> None:
    data = bytes(range(256)) * 16
    blocks = bmap.Map(8192, 4096, ((0, 4096, hashlib.sha256(data).digest()),))
    with pytest.raises(errors.MapMismatch, match="the image ends before"):
        passing(data + bytes(100), mapped.Selection(blocks)).deliver(
            Slow(8192), base.EVERYTHING, base.Meter()
        )
