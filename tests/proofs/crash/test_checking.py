"""The check of power cuts finds what it is for: targets that flush too late, or not at all."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from cdi_worker import units
from cdi_worker.images import kernel, targets
from cdi_worker.images.targets import base, block, claim, file
from tests.proofs.crash import checking, media

DATA = random.Random(1).randbytes((3 << 20) + 300_000)
STEP = 64 << 10
PLAN = checking.Plan(epochs=2, cuts=2, sets=4, reruns=0)


def write_head(device: block.BlockStorage) -> None:
    """Write the head at once."""
    device._device.expect(b"")
    device._put(0, memoryview(device.head))


class HeadWithoutFlush(block.BlockTarget):
    """Write the head while the data may still be in the device's cache."""

    def _ready(self, _size: int) -> None:
        """Do not sync the data."""

    def _finish(self) -> None:
        write_head(self.storage)
        os.fsync(self.storage.fd)


class HeadInOnePiece(block.BlockTarget):
    """Write the head at once, so that a power cut may tear it."""

    def _finish(self) -> None:
        os.fsync(self.storage.fd)
        write_head(self.storage)
        os.fsync(self.storage.fd)


class HeadNeverFlushed(block.BlockTarget):
    """Report success while the head may still be in the device's cache."""

    def _finish(self) -> None:
        os.fsync(self.storage.fd)
        write_head(self.storage)
        kernel.start_writeback(self.storage.fd, 0, block.HEAD)
        kernel.finish_writeback(self.storage.fd, 0, block.HEAD)


class RenameWithoutSync(file.FileTarget):
    """Rename a file whose data may still be in the page cache."""

    def _ready(self, size: int) -> None:
        os.ftruncate(self.storage.fd, size)
        self.storage.close()

    def _finish(self) -> None:
        Path(self.written_path).rename(self.path)
        kernel.sync_directory(self._directory)


Opened = Callable[[claim.Claim, int, base.TargetOptions], base.Target]


def violations(kind: str, opened: Opened, tmp_path: Path) -> list[str]:
    """Record a target of a class being written, and return the violations found."""
    expected, place = tmp_path / "expected", tmp_path / "check"
    expected.write_bytes(DATA + bytes(-len(DATA) % units.SECTOR))
    place.mkdir()

    def write(target: Path, _scratch: Path) -> None:
        with targets.take(target) as held, opened(held, len(DATA), base.TargetOptions(claim=held)) as out:
            for at in range(0, len(DATA), STEP):  # the writeback of long pieces starts at once
                out.write(at, memoryview(DATA)[at : at + STEP])
            out.commit()

    made = checking.Import(write, expected)
    return checking.Check(media.KINDS[kind], made, place, PLAN, seed=kind).run().violations


@pytest.mark.parametrize(("kind", "right"), [("block512", block.BlockTarget), ("ext4", file.FileTarget)])
def test_right_target_passes(kind: str, right: Opened, tmp_path: Path) -> None:
    assert violations(kind, right, tmp_path) == []


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("block512", HeadWithoutFlush),
        ("block4096", HeadInOnePiece),
        ("block512", HeadNeverFlushed),
        ("ext4", RenameWithoutSync),
        ("xfs", RenameWithoutSync),
    ],
)
def test_wrong_target_is_found(kind: str, wrong: Opened, tmp_path: Path) -> None:
    assert violations(kind, wrong, tmp_path)
