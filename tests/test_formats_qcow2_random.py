"""Images that QEMU made at random, whole and damaged: qemu-img's bytes or a clean error."""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies

from formats import qcow2
from importer import errors
from tests import disks, processes, qcow2_images, test_images_place, test_images_place_stream

SETTINGS = hypothesis.settings(max_examples=20, deadline=None, print_blob=True)


def attempt(way: Callable[[bytes], bytes], data: bytes) -> bytes | None:
    """Return the disk, or None after a clean error."""
    try:
        return way(data)
    except (errors.ImageError, errors.ScratchRequired):
        return None


@SETTINGS
@hypothesis.given(qcow2_images.recipes())
def test_whole(recipe: qcow2_images.Recipe) -> None:
    processes.need("qemu-img", "qemu-io")
    with tempfile.TemporaryDirectory() as folder:
        path, expected = Path(folder, "image"), Path(folder, "expected")
        qcow2_images.make(recipe, path)
        hypothesis.assume(qcow2_images.sound(path))
        disks.to_raw(path, "qcow2", expected)
        data, disk = path.read_bytes(), expected.read_bytes()
    assert test_images_place.placed(data) == disk
    assert test_images_place_stream.streamed(data) == disk
    required = qcow2.required_length(lambda offset, length: data[offset : offset + length], len(data))
    # Of the last sector of compressed data one byte must be there, and more may be needed.
    with contextlib.suppress(errors.Corrupt):
        assert test_images_place.placed(data[:required]) == disk
    with pytest.raises(errors.Corrupt):
        test_images_place.placed(data[: required - 1])


@SETTINGS
@hypothesis.given(qcow2_images.recipes(), strategies.randoms(use_true_random=False))
def test_damaged(recipe: qcow2_images.Recipe, dice: random.Random) -> None:
    """QEMU forgives what we do not; what we accept it reads alike."""
    processes.need("qemu-img", "qemu-io")
    with tempfile.TemporaryDirectory() as folder:
        path, expected = Path(folder, "image"), Path(folder, "expected")
        qcow2_images.make(recipe, path)
        data = bytearray(path.read_bytes())
        places = qcow2_images.words(data)
        for _ in range(dice.randint(1, 3)):
            qcow2_images.damage(data, places, dice)
        found = {
            result
            for way in (test_images_place.placed, test_images_place_stream.streamed)
            if (result := attempt(way, bytes(data))) is not None
        }
        if not found:
            return
        path.write_bytes(data)
        complaint = qcow2_images.read(path, expected)
        hypothesis.assume(not qcow2_images.elsewhere(complaint))
        assert not complaint
        assert found == {expected.read_bytes()}
