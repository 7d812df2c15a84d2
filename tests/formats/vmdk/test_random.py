"""Random VMDK images, intact and damaged: read as qemu-img reads them, or a clean error."""

from __future__ import annotations

import random

import hypothesis
import pytest
from hypothesis import strategies

from tests.support import placing, processes, qcow2_images, vmdk_images


@pytest.mark.slow
@qcow2_images.SETTINGS
@hypothesis.given(vmdk_images.recipes(), strategies.integers(0))
def test_intact_image_is_read_as_by_qemu_img(recipe: vmdk_images.Recipe, cut: int) -> None:
    processes.need("qemu-img", "qemu-io")
    data, disk = vmdk_images.made(recipe)
    assert placing.read_disk(data, "vmdk") == disk
    assert placing.streamed(data, form="vmdk") == disk
    for length in (cut % len(data), len(data) - 512, len(data) - 1):
        assert placing.attempts(data[:length], "vmdk") <= {disk}


@pytest.mark.slow
@qcow2_images.SETTINGS
@hypothesis.given(vmdk_images.recipes(), strategies.randoms(use_true_random=False))
def test_damaged_image_is_read_as_by_qemu_img_or_refused(
    recipe: vmdk_images.Recipe, dice: random.Random
) -> None:
    """QEMU accepts more than we do; what we accept is read the same."""
    processes.need("qemu-img", "qemu-io")
    data = vmdk_images.damaged(recipe, dice)
    if int.from_bytes(data[12:20], "little") > 1 << 18:
        return  # the test keeps disks in memory
    qcow2_images.check(placing.attempts(data, "vmdk"), data, "vmdk")
