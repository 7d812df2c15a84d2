"""A fixed VHD read in order: the disk comes, the footer does not."""

from __future__ import annotations

import pytest

from cdi_worker.formats import readers, vhd
from tests.support import disks as disks_module
from tests.support import reading


def whole(data: bytes, step: int) -> bytes:
    return reading.drained(vhd.WithoutFooter(readers.Bytes(data)), step)


@pytest.mark.parametrize("step", [1, 511, 512, 513, 4096, 1 << 20])
@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 1024, 5000])
def test_what_is_no_vhd_comes_whole(size: int, step: int) -> None:
    data = bytes(range(251)) * 20
    assert whole(data[:size], step) == data[:size]


@pytest.mark.parametrize("step", [511, 512, 513, 70_001, 1 << 20])
def test_the_footer_does_not_come(disks: disks_module.Disks, step: int) -> None:
    data = disks.image("vhd-fixed").read_bytes()[-5000:]
    assert whole(data, step) == data[:-512]


@pytest.mark.parametrize("change", [b"", b"x"])
def test_one_byte_less_or_more_is_no_footer(disks: disks_module.Disks, change: bytes) -> None:
    data = disks.image("vhd-fixed").read_bytes()[-5000:]
    data = data + change if change else data[:-1]
    assert whole(data, 4096) == data


def test_footer_alone_is_an_empty_disk(disks: disks_module.Disks) -> None:
    assert whole(disks.image("vhd-fixed").read_bytes()[-512:], 4096) == b""
