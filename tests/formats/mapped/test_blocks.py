"""Random VDI, VHD and VHDX images, intact and damaged: read as qemu-img reads them, or a clean error."""

from __future__ import annotations

import random

import hypothesis
import pytest
from hypothesis import strategies

from cdi_worker import errors
from cdi_worker.formats.mapped import blocks, image
from cdi_worker.formats.mapped.pieces import Piece
from tests.support import block_images, placing, processes, qcow2_images

MiB = 1 << 20


@pytest.mark.slow
@qcow2_images.SETTINGS
@hypothesis.given(block_images.recipes(), strategies.integers(0))
def test_intact_image_is_read_as_by_qemu_img(recipe: block_images.Recipe, cut: int) -> None:
    processes.need("qemu-img", "qemu-io")
    data, disk = block_images.made(recipe)
    assert placing.read_disk(data, recipe.form) == disk
    assert placing.streamed(data, form=recipe.form) == disk
    view = placing.view(data)
    required = image.required_length(placing.layout(view, recipe.form), view.at, len(data))
    for length in (cut % len(data), required - 1, required - 512, required - MiB):
        assert not placing.attempts(data[: max(0, length)], recipe.form) if length < required else True
    assert placing.read_disk(data[:required], recipe.form) == disk


@pytest.mark.slow
@qcow2_images.SETTINGS
@hypothesis.given(block_images.recipes(), strategies.randoms(use_true_random=False))
def test_damaged_image_is_read_as_by_qemu_img_or_refused(
    recipe: block_images.Recipe, dice: random.Random
) -> None:
    """QEMU accepts more than we do; what we accept is read the same."""
    processes.need("qemu-img", "qemu-io")
    data = block_images.damaged(block_images.made(recipe)[0], recipe.form, dice)
    with_size = placing.size_of(data, recipe.form)
    if with_size is None or with_size > 64 * MiB:
        return  # the test keeps disks in memory
    block_images.check(placing.attempts(data, recipe.form), data, recipe.form)


class TestClaims:
    """Blocks of 8 sectors in a file with a header of 2."""

    @staticmethod
    def allocation(size: int = 1 << 40) -> blocks.BlockAllocation:
        return blocks.BlockAllocation("vdi", size, [(0, 1024)], 4096)

    @staticmethod
    def take(allocation: blocks.BlockAllocation, *spans: tuple[int, int]) -> None:
        allocation.take_pieces([Piece(host, length, 0, length, compressed=False) for host, length in spans])

    def test_adjacent_blocks_at_any_sector(self) -> None:
        allocation = self.allocation()
        self.take(allocation, (1024, 4096), (1024 + 4096, 3 * 4096), (1536 + 4 * 4096, 4096))
        self.take(allocation, (1536 + 5 * 4096, 512))
        assert allocation.required == 1536 + 5 * 4096 + 512

    @pytest.mark.parametrize("host", [512, 1024, 1536, 4608, 5120, 12800, 13312 - 512])
    def test_overlap_is_corrupt(self, host: int) -> None:
        allocation = self.allocation()
        self.take(allocation, (1024, 3 * 4096))
        with pytest.raises(errors.Corrupt, match="used twice"):
            self.take(allocation, (host, 4096))

    def test_overlap_with_a_later_block_is_corrupt(self) -> None:
        allocation = self.allocation()
        self.take(allocation, (2 * 4096 + 512, 4096))
        self.take(allocation, (4096 + 512, 4096))
        with pytest.raises(errors.Corrupt, match="used twice"):
            self.take(self.allocation_with(8192 + 512), (4096 + 1024, 4096))

    def allocation_with(self, host: int) -> blocks.BlockAllocation:
        allocation = self.allocation()
        self.take(allocation, (host, 4096))
        return allocation

    def test_block_behind_the_end_is_truncated(self) -> None:
        allocation = self.allocation(8192)
        self.take(allocation, (4096, 4096))
        with pytest.raises(errors.Truncated):
            self.take(allocation, (8192, 512))

    def test_memory_is_bounded(self) -> None:
        with pytest.raises(errors.Unsupported, match="file of more than"):
            self.take(self.allocation(1 << 62), (1 << 61, 4096))
        with pytest.raises(errors.Unsupported, match="file of more than 33554432 blocks"):
            self.take(blocks.BlockAllocation("vdi", 1 << 62, [], MiB), (1 << 61, MiB))
