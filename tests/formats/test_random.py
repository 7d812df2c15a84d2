"""Random images made by QEMU, intact and damaged: read as qemu-img reads them, or a clean error."""

from __future__ import annotations

import contextlib
import random
import tempfile
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies

from cdi_worker import errors
from cdi_worker.formats.qcow2 import header
from tests.support import block_images, inspected, placing, processes, qcow2_images, vmdk_images
from tests.support import disks as disks_module

MiB = 1 << 20
#: What makes the images; ``block_images``: VDI, VHD and VHDX.
MAKERS: dict[str, Any] = {"qcow2": qcow2_images, "vmdk": vmdk_images, "blocks": block_images}
every = pytest.mark.parametrize("kind", MAKERS)


def drawn(kind: str, data: strategies.DataObject) -> tuple[bytes, bytes, str]:
    """Return an image in which QEMU finds no error, its raw disk, and qemu-img's name of the format."""
    processes.need("qemu-img", "qemu-io")
    recipe = data.draw(MAKERS[kind].recipes())
    driver = recipe.form if kind == "blocks" else kind
    with tempfile.TemporaryDirectory() as folder:
        image, raw = Path(folder, "image"), Path(folder, "raw")
        MAKERS[kind].make(recipe, image)
        hypothesis.assume(kind != "qcow2" or qcow2_images.is_sound(image))
        disks_module.to_raw(image, driver, raw)
        return image.read_bytes(), raw.read_bytes(), driver


@pytest.mark.slow
@every
@qcow2_images.SETTINGS
@hypothesis.given(strategies.data())
def test_intact_image_is_read_as_by_qemu_img(kind: str, data: strategies.DataObject) -> None:
    image, disk, driver = drawn(kind, data)
    assert placing.read_disk(image, driver) == disk
    assert placing.streamed(image, form=driver) == disk
    required = inspected.check_length(image)
    for length in (data.draw(strategies.integers(0, len(image) - 1)), required - 1, required - 512):
        # The tables of a VMDK may have holes at the end of the file, which count as zeros.
        is_short = length < required and driver != "vmdk"
        assert placing.attempts(image[: max(0, length)], driver) <= (set() if is_short else {disk})
    # At least one byte of the last sector of compressed data must be present; more may be needed.
    with contextlib.suppress(*([] if kind == "blocks" else [errors.Corrupt])):
        assert placing.read_disk(image[:required], driver) == disk


@pytest.mark.slow
@every
@hypothesis.settings(qcow2_images.SETTINGS, max_examples=12)
@hypothesis.given(strategies.data(), strategies.randoms(use_true_random=False))
def test_damaged_image_is_read_as_by_qemu_img_or_refused(
    kind: str, data: strategies.DataObject, dice: random.Random
) -> None:
    """QEMU accepts more than we do; what we accept is read the same."""
    image, _, driver = drawn(kind, data)
    damaged = MAKERS[kind].damaged(image, dice, driver)
    size = placing.size_of(damaged, driver)
    if size is not None and size <= 64 * MiB:  # the test keeps disks in memory
        MAKERS[kind].check(placing.attempts(damaged, driver), damaged, driver)


@pytest.mark.slow
@qcow2_images.SETTINGS
@hypothesis.given(strategies.data(), strategies.integers(1, 40), strategies.booleans())
def test_reader_of_a_stream_keeps_enough_bytes(
    data: strategies.DataObject, clusters: int, last: bool
) -> None:
    """Wherever the stream is split."""
    image, disk, _ = drawn("qcow2", data)
    cluster = header.parse(image).cluster_size
    if last:
        image = qcow2_images.tables_last(image)
    assert placing.passed(image, clusters * cluster, recent=2) == disk
