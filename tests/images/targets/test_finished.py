"""A finished disk, read past the page cache."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from cdi_worker.images import targets
from cdi_worker.images.sinks import compared

DATA = random.Random(3).randbytes(3 * 4096 + 700)


@pytest.mark.parametrize(
    ("offset", "length"),
    [(0, 4096), (1, 10), (512, 8192), (4095, 2), (12_000, 5000), (12_988, 9), (13_000, 9)],
)
def test_view_of_any_alignment_has_the_bytes_of_the_disk(tmp_path: Path, offset: int, length: int) -> None:
    path = tmp_path / "disk.img"
    path.write_bytes(DATA)
    with (
        targets.ReadingClaim(str(path), None) as held,
        targets.open(str(path), None, targets.TargetOptions(claim=held)) as out,
    ):
        assert bytes(out.storage.view(offset, length)) == DATA[offset : offset + length]


@pytest.mark.parametrize(
    ("stored", "data", "ranges"),
    [(b"ab", b"ab\0", []), (b"ab", b"abc", [(0, 3)]), (b"", b"\0\0", []), (b"ab", b"ab", [])],
)
def test_disk_that_ends_early_is_like_one_with_zeros(
    stored: bytes, data: bytes, ranges: list[tuple[int, int]]
) -> None:
    assert compared.unlike(stored, 0, memoryview(data)) == ranges
