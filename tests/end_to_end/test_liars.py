"""Servers that answer ranges with other bytes, or with hardly any: the right disk, or a clear error."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cdi_worker
from cdi_worker import errors
from tests.support import devices, misbehave, oracle, pairs, ways
from tests.support import disks as disks_module

KiB, MiB = 1 << 10, 1 << 20
ROUTES = [*disks_module.BY_RANGES, ("qcow2-512", None)]
Lie = Callable[[int, int], int]


def once(number: int) -> Lie:
    """One answer has the bytes of another range, as from a cache."""
    return lambda first, n: first + 128 * KiB if n == number else first


#: Where the bytes of a range begin, for its first byte and the number of the request. All headers are right.
LIES: dict[str, Lie] = {
    "shifted": lambda first, _: first + 512 if first else 0,
    "shifted-back": lambda first, _: first - 4096 if first >= 4096 else first,
    "counted-from-one": lambda first, _: max(0, first - 1),
    "rounded-down": lambda first, _: first // 4096 * 4096,
    "rounded-up": lambda first, _: -(-first // 65536) * 65536,
    "from-the-beginning": lambda _first, _: 0,
    # Each from another place: a table and the request that confirms it must not agree about wrong bytes.
    "some-of-another-range": lambda first, n: first + 65536 * (1 + n // 7) if n % 7 == 2 else first,
    **{f"answer-{number}-of-another-range": once(number) for number in (1, 3, 6)},
}
#: Offsets that wrap, as those of 32 bits do: tables beyond are a damaged image, and nothing shows the cause.
WRAPPING: dict[str, Lie] = {
    "behind-the-head": lambda first, _: first % (300 * KiB),
    "in-the-middle": lambda first, _: first % (3 * MiB),
}
FEW = cdi_worker.FetchOptions(connections=2, chunk=512 * KiB)


import_disk = functools.partial(
    ways.import_disk, access=cdi_worker.Access(patience=5.0), fetch=FEW, existing="refuse"
)


@pytest.mark.parametrize(("lie", "route"), pairs.dealt(LIES, ROUTES), ids=lambda value: f"{value}")
def test_ranges_with_other_bytes_are_replaced_by_the_stream(
    server: misbehave.Server,
    disks: disks_module.Disks,
    device: Path,
    tmp_path: Path,
    lie: str,
    route: tuple[str, str | None],
) -> None:
    data = disks.wrapped(*route, "dense").read_bytes()
    url = server.serve("/disk", misbehave.Page(data, lie=LIES[lie]))
    import_disk(url, device, scratch=tmp_path)
    oracle.same(device, disks.expected(route[0], "dense"), beyond=devices.DIRT)


@pytest.mark.parametrize(("lie", "variant"), [("behind-the-head", "raw"), ("in-the-middle", "qcow2")])
def test_ranges_that_wrap_are_never_taken_for_the_disk(
    server: misbehave.Server,
    disks: disks_module.Disks,
    device: Path,
    tmp_path: Path,
    lie: str,
    variant: str,
) -> None:
    data = disks.image(variant, "dense").read_bytes()
    url = server.serve("/disk", misbehave.Page(data, lie=WRAPPING[lie]))
    try:
        import_disk(url, device, scratch=tmp_path)
    except errors.ImageError:
        oracle.unusable(device)
    else:
        oracle.same(device, disks.expected(variant, "dense"), beyond=devices.DIRT)


@pytest.mark.parametrize(
    ("variant", "fault"), [("qcow2", {"cut_range": 100}), ("vhdx-log", {"short_range": 1})]
)
def test_ranges_with_hardly_a_byte_are_replaced_by_the_stream(
    server: misbehave.Server,
    disks: disks_module.Disks,
    device: Path,
    tmp_path: Path,
    variant: str,
    fault: dict[str, Any],
) -> None:
    data = disks.image(variant, "dense").read_bytes()
    started = time.monotonic()
    import_disk(server.serve("/disk", misbehave.Page(data, **fault)), device, scratch=tmp_path)
    assert time.monotonic() - started < 20
    oracle.same(device, disks.expected(variant, "dense"), beyond=devices.DIRT)
    assert len(server.gets("/disk")) < 60


def test_server_of_short_ranges_is_read_by_ranges(
    server: misbehave.Server, disks: disks_module.Disks, device: Path, tmp_path: Path
) -> None:
    """A server may answer with a part of the range (RFC 9110, 15.3.7)."""
    data = disks.image("raw", "dense").read_bytes()
    import_disk(server.serve("/disk", misbehave.Page(data, short_range=64 * KiB)), device, scratch=tmp_path)
    oracle.same(device, disks.expected("raw", "dense"), beyond=devices.DIRT)
    assert all("range" in request.headers for request in server.gets("/disk"))
