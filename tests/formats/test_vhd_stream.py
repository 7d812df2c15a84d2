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


def test_stream_without_footer_is_unchanged() -> None:
    data = bytes(range(251)) * 20
    for size in (0, 1, 511, 512, 513, 1024, 5000):
        for step in (1, 511, 512, 513, 4096, 1 << 20):
            assert read_all(data[:size], step) == data[:size]


def test_footer_is_removed_if_it_is_the_last_512_bytes(disks: disks_module.Disks) -> None:
    data = disks.image("vhd-fixed").read_bytes()[-5000:]
    for step in (511, 512, 513, 70_001, 1 << 20):
        assert read_all(data, step) == data[:-512]
    for other in (data[:-1], data + b"x"):
        assert read_all(other, 4096) == other


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
