"""VMDK images made at random, whole and damaged: qemu-img's bytes or a clean error."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import hypothesis

from tests import disks, processes, qcow2_images, test_images_place, test_images_place_stream, vmdk_images
from tests.test_formats_qcow2_random import SETTINGS, attempt


def placed(data: bytes) -> bytes:
    return test_images_place.placed(data, "vmdk")


def streamed(data: bytes) -> bytes:
    return test_images_place_stream.streamed(data, form="vmdk")


@SETTINGS
@hypothesis.given(vmdk_images.recipes(), hypothesis.strategies.integers(0))
def test_whole(recipe: vmdk_images.Recipe, cut: int) -> None:
    processes.need("qemu-img", "qemu-io")
    with tempfile.TemporaryDirectory() as folder:
        path, expected = Path(folder, "image"), Path(folder, "expected")
        vmdk_images.make(recipe, path)
        disks.to_raw(path, "vmdk", expected)
        data, disk = path.read_bytes(), expected.read_bytes()
    assert placed(data) == disk
    assert streamed(data) == disk
    for length in (cut % len(data), len(data) - 512, len(data) - 1):
        for way in (placed, streamed):
            assert attempt(way, data[:length]) in {None, disk}


@SETTINGS
@hypothesis.given(vmdk_images.recipes(), hypothesis.strategies.randoms(use_true_random=False))
def test_damaged(recipe: vmdk_images.Recipe, dice: random.Random) -> None:
    """QEMU forgives what we do not; what we accept it reads alike."""
    processes.need("qemu-img", "qemu-io")
    with tempfile.TemporaryDirectory() as folder:
        path, expected = Path(folder, "image"), Path(folder, "expected")
        vmdk_images.make(recipe, path)
        data = bytearray(path.read_bytes())
        places = vmdk_images.words(data)
        for _ in range(dice.randint(1, 3)):
            vmdk_images.damage(data, places, dice)
        if int.from_bytes(data[12:20], "little") > 1 << 18:
            return  # the test keeps disks in memory
        found = {result for way in (placed, streamed) if (result := attempt(way, bytes(data))) is not None}
        if not found:
            return
        path.write_bytes(data)
        assert not qcow2_images.read(path, expected, "vmdk")
        assert found == {expected.read_bytes()}
