"""Place qcow2 images from a stream (``formats/test_content``: the disk is that of qemu-img)."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.images.disks import following
from cdi_worker.scratch import space
from tests.support import disks as disks_module
from tests.support import placing, qcow2_images

MiB = 1 << 20


@pytest.fixture(
    scope="module", params=["cluster_size=4k", "cluster_size=64k", "compression_type=zstd,cluster_size=2M"]
)
def large(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    """Return an image of many chunks, written alternately at both ends, and its disk."""
    folder = tmp_path_factory.mktemp("large")
    flag = ("", "-c ")
    steps = [
        f"qemu-io write -q {flag[step // 2 % 2]}-s {{folder}}/noise {at}M 2M"
        for step, at in enumerate((0, 60, 4, 56, 8, 52, 12, 48, 16, 44, 20, 40, 24))
    ]
    qcow2_images.make(qcow2_images.Recipe(64 * MiB, request.param, tuple(steps)), folder / "image")
    disks_module.to_raw(folder / "image", "qcow2", folder / "expected")
    return (folder / "image").read_bytes(), (folder / "expected").read_bytes()


@pytest.mark.slow
def test_image_of_many_chunks_is_placed(large: tuple[bytes, bytes]) -> None:
    """Also with more behind it, and with the tables at its end."""
    data, expected = large
    assert placing.streamed(data + os.urandom(10 * MiB)) == expected
    assert placing.streamed(qcow2_images.tables_last(data)) == expected
    for length in (1 << 16, len(data) // 2, len(data) - 600):
        with pytest.raises(errors.Corrupt):
            placing.streamed(data[:length])


@pytest.fixture(scope="module")
def tables_after_data(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    """Return an image with more data than is kept in memory, all of it before the tables, and its disk."""
    folder = tmp_path_factory.mktemp("late")
    with (folder / "raw").open("wb") as raw:
        for number in range(80):
            raw.write(struct.pack(">Q", number) * (MiB // 8))
    disks_module.convert(folder / "raw", folder / "image", disks_module.Format("qcow2"))
    return qcow2_images.tables_last((folder / "image").read_bytes()), (folder / "raw").read_bytes()


@pytest.mark.slow
def test_more_than_memory_needs_scratch(tables_after_data: tuple[bytes, bytes], tmp_path: Path) -> None:
    data, expected = tables_after_data
    with pytest.raises(errors.ScratchRequired):
        placing.streamed(data)
    with space.Spill(tmp_path / "spill") as scratch:
        assert placing.streamed(data, scratch) == expected
    assert (tmp_path / "spill").stat().st_blocks * 512 < len(data) - following.MEMORY + MiB
