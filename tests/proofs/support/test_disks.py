"""Tests of the disks, and of the comparison with them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support import devices, oracle
from tests.support import disks as disks_module


def test_disks_are_the_same_in_every_run(disks: disks_module.Disks, tmp_path: Path) -> None:
    again = disks_module.Disks(tmp_path)
    for content in disks_module.CONTENTS:
        assert again.raw(content).read_bytes() == disks.raw(content).read_bytes()


def test_standard_tools_decompress_disks(disks: disks_module.Disks) -> None:
    for compression, tool in {"gz": "gzip", "xz": "xz", "zst": "zstd", "bz2": "bzip2"}.items():
        with disks.wrapped("raw", compression).open("rb") as packed:
            plain = subprocess.run([tool, "-dc"], stdin=packed, capture_output=True, check=True).stdout
        assert plain == disks.raw().read_bytes(), compression


def test_oracle_detects_one_wrong_byte(disks: disks_module.Disks, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    data = bytearray(disks.raw().read_bytes())
    data[5_000_000] ^= 1
    wrong.write_bytes(data)
    with pytest.raises(AssertionError, match="at byte 5000000"):
        oracle.same(wrong, disks.raw())


@pytest.mark.parametrize(("more", "message"), [(b"\0\0x", "at byte 8388610"), (b"", "")])
def test_oracle_checks_bytes_beyond_the_disk(
    disks: disks_module.Disks, tmp_path: Path, more: bytes, message: str
) -> None:
    longer = tmp_path / "longer"
    longer.write_bytes(disks.raw().read_bytes() + more)
    if message:
        with pytest.raises(AssertionError, match=message):
            oracle.same(longer, disks.raw())
    oracle.same(longer, disks.raw(), beyond=None)


def test_oracle_detects_missing_end(disks: disks_module.Disks, tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_bytes(disks.raw().read_bytes()[:-1])
    with pytest.raises(AssertionError, match="at byte 8388607"):
        oracle.same(short, disks.raw())


@pytest.mark.parametrize("at", [0, 3, 7])
def test_oracle_reads_where_only_one_disk_has_a_hole(tmp_path: Path, at: int) -> None:
    hole, data = tmp_path / "hole", tmp_path / "data"
    for path in (hole, data):
        path.touch()
        os.truncate(path, 8 << 20)
    oracle.same(hole, data)
    devices.change(data, at << 20, bytes(1 << 20))
    oracle.same(hole, data)
    oracle.same(data, hole)
    devices.change(data, (at << 20) + 5, b"x")
    for one, other in ((hole, data), (data, hole)):
        with pytest.raises(AssertionError, match=f"at byte {(at << 20) + 5}:"):
            oracle.same(one, other)


def test_oracle_detects_a_missing_hole(tmp_path: Path) -> None:
    whole, short = tmp_path / "whole", tmp_path / "short"
    for path, size in ((whole, 8 << 20), (short, 7 << 20)):
        path.touch()
        os.truncate(path, size)
    oracle.same(whole, short)
    with pytest.raises(AssertionError, match=f"at byte {7 << 20}:"):
        oracle.same(short, whole)
