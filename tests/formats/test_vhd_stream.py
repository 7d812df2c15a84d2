"""A fixed VHD read in order: the disk without its footer."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies as st

from cdi_worker import errors
from cdi_worker.formats import readers, vhd
from tests.support import disks as disks_module
from tests.support import inspected, reading, vhd_images


def read_all(data: bytes, step: int) -> bytes:
    return reading.read_all(vhd.WithoutFooter(readers.BytesReader(data)), step)


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


SIZES = st.integers(1, 5000)


@hypothesis.given(
    length=SIZES, size=SIZES, creator=st.sampled_from(vhd_images.CREATORS), step=st.integers(1, 6000)
)
def test_stream_and_random_access_agree(length: int, size: int, creator: bytes, step: int) -> None:
    """On the disk, and on whether it is one."""
    image = vhd_images.fixed(bytes(range(1, 251)) * 20, creator, size=size)
    image = image[5000 - length :]
    try:
        found = inspected.check(image)
    except errors.Refused as err:
        found = None
        reason = str(err)
    stream = vhd.WithoutFooter(readers.BytesReader(image))
    disk = reading.read_all(stream, step)
    assert disk == image[:-512]
    if found is not None:
        assert found.raw == len(disk)
        vhd.check_fixed(stream.footer, len(disk))
    else:
        with pytest.raises(errors.Refused) as caught:
            vhd.check_fixed(stream.footer, len(disk))
        assert str(caught.value) == reason
