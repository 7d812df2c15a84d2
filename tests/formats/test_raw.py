"""What the first bytes of a raw disk show: its partition table, and whether it is one."""

from __future__ import annotations

import os
import random
import subprocess

import pytest

from cdi_worker.formats import raw
from cdi_worker.formats.compressed import layers
from tests.support import processes

SECTOR = 512


@pytest.fixture(scope="module")
def gpt(tmp_path_factory):
    """The first 64 KiB of a disk with a GPT of 512-byte sectors."""
    path = tmp_path_factory.mktemp("gpt") / "disk"
    path.write_bytes(bytes(8 << 20))
    processes.need("sfdisk")
    subprocess.run(["sfdisk", "-q", path], input=b"label: gpt\n,,L\n", check=True)
    return path.read_bytes()[: 64 << 10]


def of_large_sectors(gpt):
    """Move the header of a GPT to the second sector of 4096 bytes; its fields are the same."""
    header = gpt[SECTOR : 2 * SECTOR]
    return gpt[:SECTOR] + bytes(4096 - SECTOR) + header + bytes(60 << 10)


def test_sector_size_is_that_of_the_gpt(gpt):
    assert raw.partition_sector_size(gpt) == 512
    assert raw.partition_sector_size(of_large_sectors(gpt)) == 4096


def test_a_disk_for_both_sizes_of_sectors_has_none(gpt):
    both = gpt[:4096] + gpt[SECTOR : 2 * SECTOR] + gpt[4096 + SECTOR :]
    assert raw.partition_sector_size(both) is None


def test_a_head_without_a_whole_gpt_has_no_sector_size(gpt):
    for length in (0, 1, 512, 1023, 4096, 4607):
        assert raw.partition_sector_size(gpt[: min(length, 1023)]) is None
        assert raw.partition_sector_size(of_large_sectors(gpt)[:length]) is None


def test_a_damaged_gpt_has_no_sector_size(gpt):
    for at in (0, 8, 12, 16, 24, 40, 91):
        damaged = bytearray(gpt)
        damaged[SECTOR + at] ^= 0xFF
        assert raw.partition_sector_size(bytes(damaged)) is None, at


MAKERS = {
    "ext4": ("mkfs.ext4", "-q", "-F"),
    "xfs": ("mkfs.xfs", "-q"),
    "btrfs": ("mkfs.btrfs", "-q"),
    "fat": ("mkfs.vfat",),
    "swap": ("mkswap",),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_file_systems_are_known(tmp_path, maker):
    path = tmp_path / "disk"
    processes.need(MAKERS[maker][0])
    path.touch()
    os.truncate(path, 320 << 20)
    processes.run(*MAKERS[maker], path)
    with path.open("rb") as file:
        head = file.read(layers.ENOUGH)
    assert raw.is_plausible(head)


def test_partition_tables_and_zeros_are_known(gpt):
    assert raw.is_plausible(gpt)
    assert raw.is_plausible(of_large_sectors(gpt))
    assert raw.is_plausible(bytes(layers.ENOUGH))
    # A server may send more with the first request.
    assert raw.is_plausible(bytes(layers.ENOUGH) + b"\1")
    assert raw.is_plausible(bytes(512))


def test_every_signature_fits_into_the_head_and_counts_only_whole():
    for at, magic in raw._SIGNATURES:
        head = b"\1" * at + magic
        assert len(head) <= layers.ENOUGH
        assert raw.is_plausible(head), magic
        assert not raw.is_plausible(head[:-1]), magic


def test_noise_is_not_known():
    assert not raw.is_plausible(random.Random(1).randbytes(layers.ENOUGH))
    assert not raw.is_plausible(bytes(layers.ENOUGH - 1) + b"\1")
