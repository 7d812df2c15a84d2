"""No byte of a file is in two blocks (``formats/test_random``: VDI, VHD and VHDX images)."""

from __future__ import annotations

import pytest

from cdi_worker import errors
from cdi_worker.formats.mapped import blocks
from cdi_worker.formats.mapped.pieces import Piece

MiB = 1 << 20


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
