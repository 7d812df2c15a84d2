"""What each route leaves on a target, where the source or the storage is not as one would like."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

import importer
from tests import devices, misbehave

MIB = 1 << 20
NOISE = random.Random(3).randbytes(2 * MIB + 100)


@pytest.fixture
def server() -> Iterator[misbehave.Server]:
    with misbehave.Server() as running:
        yield running


def wanted(url: str, target: Path) -> importer.Request:
    return importer.Request(source="http", location=importer.Location(url), target=str(target))


@pytest.mark.parametrize("size", [2 * MIB + 100, MIB + 1])
@pytest.mark.parametrize("ranges", [True, False])
def test_an_odd_size_ends_in_zeros(server: misbehave.Server, tmp_path: Path, size: int, ranges: bool) -> None:
    """The last sector holds nothing of what was on the device before."""
    url = server.serve("/disk", misbehave.Page(NOISE[:size], ranges=ranges))
    with devices.loop(tmp_path, 4 * MIB) as device:
        importer.run(wanted(url, device))
        there = device.read_bytes()
    padding = -size % 512
    assert there == NOISE[:size] + bytes(padding) + devices.DIRT * (4 * MIB - size - padding)
