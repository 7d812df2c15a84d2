"""The checkpoint of a disk is stored with its file, and decides which deltas may follow."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.images.targets import checkpoint
from tests.support import devices, processes

ONE, TWO, THREE = frozenset({"one"}), frozenset({"two", "2"}), frozenset({"three"})
#: Files may be replaced under their names.
OLD, NEW = ({"two", f"{checkpoint.VERSION}{digit * 64}"} for digit in "12")


@pytest.mark.parametrize(
    ("held", "previous", "current", "allowed"),
    [
        (checkpoint.Checkpoint(ONE), ONE, TWO, True),
        (checkpoint.Checkpoint(TWO), frozenset({"2", "zwei"}), THREE, True),
        (checkpoint.Checkpoint(TWO), ONE, TWO, True),
        (checkpoint.Checkpoint(ONE), TWO, THREE, False),
        (checkpoint.Checkpoint(THREE), ONE, TWO, False),
        (checkpoint.Checkpoint(ONE, TWO), ONE, TWO, True),
        (checkpoint.Checkpoint(ONE, TWO), ONE, THREE, False),
        (checkpoint.Checkpoint(ONE, TWO), TWO, THREE, False),
        (checkpoint.Checkpoint(ONE, TWO), ONE, frozenset({""}), False),
        (checkpoint.Checkpoint(ONE, frozenset({""})), ONE, frozenset({""}), True),
        (checkpoint.Checkpoint(ONE, frozenset(OLD)), ONE, frozenset(OLD), True),
        (checkpoint.Checkpoint(ONE, frozenset(OLD)), ONE, frozenset(NEW), False),
        (checkpoint.Checkpoint(ONE, frozenset(OLD)), ONE, TWO, False),
        (checkpoint.Checkpoint(frozenset(OLD)), ONE, frozenset(OLD), True),
        (checkpoint.Checkpoint(frozenset(OLD)), ONE, frozenset(NEW), False),
        (checkpoint.Checkpoint(frozenset(OLD)), TWO, THREE, True),
        # Of an earlier version, or without an identity: by the name.
        (checkpoint.Checkpoint(ONE, TWO), ONE, frozenset(NEW), True),
        (checkpoint.Checkpoint(TWO), ONE, frozenset(NEW), True),
    ],
)
def test_delta_starts_at_the_checkpoint_of_the_disk(
    held: checkpoint.Checkpoint, previous: frozenset[str], current: frozenset[str], *, allowed: bool
) -> None:
    assert held.allows(previous, current) == allowed


def test_checkpoint_is_stored_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "disk.img"
    assert checkpoint.Checkpoint.read(str(path)) is None
    path.touch()
    assert checkpoint.Checkpoint.read(str(path)) is None
    for held in (checkpoint.Checkpoint(ONE, TWO), checkpoint.Checkpoint(TWO)):
        held.write(str(path))
        path = path.rename(tmp_path / f"{path.name}.changing")
        assert checkpoint.Checkpoint.read(str(path)) == held
    checkpoint.forget(str(path))
    checkpoint.forget(str(path))
    assert checkpoint.Checkpoint.read(str(path)) is None


@pytest.mark.parametrize("text", [b"", b"{}", b"[1]", b"\xff", b'{"at": 1, "to": []}', b"[" * 3000])
def test_damaged_attribute_is_an_error(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "disk.img"
    path.touch()
    os.setxattr(path, checkpoint.NAME, text)
    with pytest.raises(errors.TargetError, match="is damaged; start again"):
        checkpoint.Checkpoint.read(str(path))


def test_too_long_checkpoint_removes_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "disk.img"
    path.touch()
    checkpoint.Checkpoint(ONE).write(str(path))
    checkpoint.Checkpoint(frozenset({"x" * 100_000})).write(str(path))
    assert checkpoint.Checkpoint.read(str(path)) is None


def test_checkpoint_that_finds_no_space_is_an_error(tmp_path: Path) -> None:
    """The old one stays: without any, each delta would be accepted."""
    with devices.filesystem("ext4", tmp_path) as point:
        path = point / "disk.img"
        path.touch()
        checkpoint.Checkpoint(ONE).write(str(path))
        with contextlib.suppress(OSError), (point / "full").open("wb", buffering=0) as full:
            while True:
                full.write(bytes(4096))
        with pytest.raises(errors.TargetError, match="no space left"):
            checkpoint.Checkpoint(ONE, frozenset({"x" * 300})).write(str(path))
        assert checkpoint.Checkpoint.read(str(path)) == checkpoint.Checkpoint(ONE)


def test_file_system_without_attributes_keeps_none(tmp_path: Path) -> None:
    processes.need_root()
    processes.run("mount", "-t", "ramfs", "none", tmp_path)
    try:
        path = tmp_path / "disk.img"
        path.touch()
        checkpoint.Checkpoint(ONE).write(str(path))
        assert checkpoint.Checkpoint.read(str(path)) is None
    finally:
        processes.run("umount", tmp_path)


def test_checkpoint_that_cannot_be_changed_is_an_error(tmp_path: Path) -> None:
    """The disk would be taken for one at its old checkpoint."""
    with devices.filesystem("ext4", tmp_path) as point:
        path = point / "disk.img"
        path.touch()
        checkpoint.Checkpoint(ONE).write(str(path))
        with devices.read_only(point):
            with pytest.raises(errors.TargetError, match="store the checkpoint: read-only file system"):
                checkpoint.Checkpoint(TWO).write(str(path))
            with pytest.raises(errors.TargetError, match="remove the checkpoint: read-only file system"):
                checkpoint.forget(str(path))
        assert checkpoint.Checkpoint.read(str(path)) == checkpoint.Checkpoint(ONE)
