"""A fixed VHD read in order: the disk without its footer."""

from __future__ import annotations

import pytest

from cdi_worker.formats import readers, vhd
from tests.support import disks as disks_module
from tests.support import reading


def read_all(data: bytes, step: int) -> bytes:
    return reading.read_all(vhd.WithoutFooter(readers.Bytes(data)), step)


@pytest.mark.parametrize("step", [1, 511, 512, 513, 4096, 1 << 20])
@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 1024, 5000])
def test_stream_without_footer_is_unchanged(size: int, step: int) -> None:
    data = bytes(range(251)) * 20
    assert read_all(data[:size], step) == data[:size]


@pytest.mark.parametrize("step", [511, 512, 513, 70_001, 1 << 20])
def test_footer_is_removed(disks: disks_module.Disks, step: int) -> None:
    data = disks.image("vhd-fixed").read_bytes()[-5000:]
    assert read_all(data, step) == data[:-512]


@pytest.mark.parametrize("change", [b"", b"x"])
def test_footer_must_be_the_last_512_bytes(disks: disks_module.Disks, change: bytes) -> None:
    data = disks.image("vhd-fixed").read_bytes()[-5000:]
    data = data + change if change else data[:-1]
    assert read_all(data, 4096) == data


def test_footer_alone_is_an_empty_disk(disks: disks_module.Disks) -> None:
    assert read_all(disks.image("vhd-fixed").read_bytes()[-512:], 4096) == b""
