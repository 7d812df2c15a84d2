"""A volume is emptied of what earlier attempts left, and of nothing else."""

from __future__ import annotations

from pathlib import Path

from cdi_worker.images.folder import staging
from tests.support import devices


def test_empties_a_volume_but_nothing_mounted_below_it(tmp_path: Path) -> None:
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


def test_a_folder_that_is_no_volume_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    staging.empty(tmp_path)
    assert (tmp_path / "file").exists()
