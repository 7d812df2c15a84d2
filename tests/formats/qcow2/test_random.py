"""Random qcow2 images made by QEMU, intact and damaged: read as qemu-img reads them, or a clean error."""

from __future__ import annotations

import contextlib
import random

import hypothesis
import pytest
from hypothesis import strategies

from cdi_worker import errors
from cdi_worker.formats.qcow2 import check
from tests.support import placing, processes, qcow2_images


@pytest.mark.slow
@qcow2_images.SETTINGS
@hypothesis.given(qcow2_images.recipes())
def test_intact_image_is_read_as_by_qemu_img(recipe: qcow2_images.Recipe) -> None:
    processes.need("qemu-img", "qemu-io")
    data, disk = qcow2_images.made(recipe)
    assert placing.read_disk(data) == disk
    assert placing.streamed(data) == disk
    required = check.required_length(placing.view(data))
    # At least one byte of the last sector of compressed data must be present; more may be needed.
    with contextlib.suppress(errors.Corrupt):
        assert placing.read_disk(data[:required]) == disk
    with pytest.raises(errors.Corrupt):
        placing.read_disk(data[: required - 1])


@pytest.mark.slow
@qcow2_images.SETTINGS
@hypothesis.given(qcow2_images.recipes(), strategies.randoms(use_true_random=False))
def test_damaged_image_is_read_as_by_qemu_img_or_refused(
    recipe: qcow2_images.Recipe, dice: random.Random
) -> None:
    """QEMU accepts more than we do; what we accept is read the same."""
    processes.need("qemu-img", "qemu-io")
    data = qcow2_images.damaged(recipe, dice)
    qcow2_images.check(placing.attempts(data, "qcow2"), data, "qcow2")
