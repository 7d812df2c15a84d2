"""Emptying a volume removes the files of earlier attempts and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.images import targets
from cdi_worker.images.folder import staging
from tests.support import devices


def test_volume_is_emptied_except_for_mounts_below_it(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").touch()
    with devices.filesystem("tmpfs", tmp_path, 1 << 20) as volume:
        (volume / "left" / "over").mkdir(parents=True)
        (volume / "link").symlink_to(outside)
        (volume / "left" / "link").symlink_to(outside)
        deep = volume / "a b" / "c"
        deep.mkdir(parents=True)
        with (
            devices.filesystem("tmpfs", volume, 1 << 20) as near,
            devices.filesystem("tmpfs", deep, 1 << 20) as far,
        ):
            (near / "file").touch()
            (far / "file").touch()
            staging.empty(volume)
            assert sorted(path.name for path in volume.iterdir()) == sorted(["a b", near.name])
            assert (near / "file").exists()
            assert (far / "file").exists()
        staging.empty(volume)
        assert not list(volume.iterdir())
    assert (outside / "file").exists()


def test_folder_that_is_not_a_mount_is_not_emptied(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    staging.empty(tmp_path)
    assert (tmp_path / "file").exists()


def test_file_behind_a_mount_point_is_not_removed(tmp_path: Path) -> None:
    """A folder of the archive is a mount point of the volume: its files cannot be moved there."""
    with devices.filesystem("tmpfs", tmp_path, 1 << 20) as inner:
        (inner / "file").write_text("kept")
        with targets.take(tmp_path, folder=True) as held, staging.Staging(held) as work:
            (work.path / inner.name).mkdir()
            (work.path / inner.name / "file").write_text("new")
            with pytest.raises(errors.TargetError, match="move into place: device or resource busy"):
                work.commit()
        assert (inner / "file").read_text() == "kept"
