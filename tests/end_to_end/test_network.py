"""Network and server errors that an import survives: the disk is correct all the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import cdi_worker
from tests.support import devices, misbehave, oracle, pairs, ways
from tests.support import disks as disks_module

KiB, MiB = 1 << 10, 1 << 20
TROUBLES: dict[str, dict[str, Any]] = {
    "503": {"status": 503},
    "429-with-advice": {"status": 429, "headers": {"Retry-After": "0"}},
    "408": {"status": 408},
    "reset-before-the-first-byte": {"cut": 0},
    "reset": {"cut": 100_001},
    "no-ranges-any-more": {"ranges": False},
    "nonsense-ranges": {"content_range": "nonsense"},
    "other-ranges": {"content_range": "bytes 0-{last}/{total}"},
    "short": {"missing": 1000, "cut": None},
    "stall": {"stall": 5000},
    "slow": {"drip": (64 * KiB, 0.002)},
}


@pytest.mark.parametrize(
    ("trouble", "route"), pairs.dealt(TROUBLES, disks_module.BY_RANGES), ids=lambda value: f"{value}"
)
def test_temporary_error_is_retried(
    server: misbehave.Server,
    disks: disks_module.Disks,
    device: Path,
    tmp_path: Path,
    trouble: str,
    route: tuple[str, str | None],
) -> None:
    """The first response is good, the next ones are not, the rest is."""
    good = misbehave.Page(disks.wrapped(*route).read_bytes())
    bad = dataclasses.replace(good, **TROUBLES[trouble])
    url = server.serve("/disk", (good, 1), (bad, 3), good)
    ways.import_disk(url, device, scratch=tmp_path, access=cdi_worker.Access(patience=1.0))
    oracle.same(device, disks.expected(route[0]), beyond=devices.DIRT)


@pytest.mark.parametrize(
    ("variant", "compression", "ranges"),
    [("raw", None, True), ("qcow2", "zst", False), ("vhdx-log", None, True)],
)
def test_reset_at_any_byte_is_retried(
    server: misbehave.Server,
    disks: disks_module.Disks,
    device: Path,
    tmp_path: Path,
    variant: str,
    compression: str | None,
    ranges: bool,
) -> None:
    good = misbehave.Page(disks.wrapped(variant, compression).read_bytes(), ranges=ranges)
    size = len(good.body)
    for at in (0, 1, 511, 262_144, size // 2, size - 512, size - 1):
        if at == 0 and not ranges:
            continue  # before the first byte: that is an unreachable server
        url = server.serve("/disk", (dataclasses.replace(good, cut_at=at), 1), good)
        ways.import_disk(url, device, scratch=tmp_path)
        oracle.same(device, disks.expected(variant), beyond=devices.DIRT)


@pytest.mark.parametrize("variant", ["raw", "vhdx-log"])
def test_reset_of_every_response_is_survived(
    server: misbehave.Server, disks: disks_module.Disks, device: Path, tmp_path: Path, variant: str
) -> None:
    good = misbehave.Page(disks.image(variant).read_bytes())
    ways.import_disk(server.serve("/disk", dataclasses.replace(good, cut=400_000)), device, scratch=tmp_path)
    oracle.same(device, disks.expected(variant), beyond=devices.DIRT)
    # What QEMU reads may be tables: an answer of zeros only, which its cut end makes likely, is read twice.
    most = 1.6 if variant == "vhdx-log" else 1.2
    assert server.sent("/disk") < most * len(good.body) + MiB


def test_lost_mirror_is_replaced(
    server: misbehave.Server, disks: disks_module.Disks, device: Path, tmp_path: Path
) -> None:
    """Each request is redirected to another mirror, and the first mirror is lost on the way."""
    good = misbehave.Page(disks.image("qcow2").read_bytes())
    with misbehave.Server() as mirrors:
        first = mirrors.serve("/first", (good, 2), dataclasses.replace(good, status=404))
        url = server.serve("/disk", misbehave.Page(to=(first, mirrors.serve("/second", good))))
        ways.import_disk(url, device, scratch=tmp_path)
        oracle.same(device, disks.expected("qcow2"), beyond=devices.DIRT)
        assert len(server.requests) <= 10
