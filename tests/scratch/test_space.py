"""Scratch space is measured, used, and left as it was found."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.scratch import space
from tests.support import devices

MiB = 1 << 20


def test_spill_is_removed(tmp_path: Path) -> None:
    with space.Scratch(tmp_path, "job") as scratch:
        Path(scratch.path("spool")).write_bytes(b"x")
        assert len(os.listdir(tmp_path)) == 1
    assert os.listdir(tmp_path) == []


def test_leftovers_are_removed_first(tmp_path: Path) -> None:
    with space.Scratch(tmp_path, "job") as scratch:
        Path(scratch.path("spool")).write_bytes(b"x")
        scratch.keep()
    with space.Scratch(tmp_path, "job") as scratch:
        assert not Path(scratch.path("spool")).exists()


def test_same_job_resumes_and_another_is_kept(tmp_path: Path) -> None:
    with space.Scratch(tmp_path, "job") as scratch:
        Path(scratch.path("spool")).write_bytes(b"x")
        scratch.keep()
    with space.Scratch(tmp_path, "other"):
        pass
    with space.Scratch(tmp_path, "job", resume=True) as scratch:
        assert Path(scratch.path("spool")).read_bytes() == b"x"


def test_relative_targets_do_not_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two imports to ``disk.img``, each in its own directory."""
    folders = set()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        with space.Scratch(tmp_path, "disk.img") as scratch:
            folders.add(scratch.folder)
    assert len(folders) == 2


def test_leftovers_count_as_free_space(tmp_path: Path) -> None:
    with devices.filesystem("tmpfs", tmp_path) as point:
        before = space.available(point, "job")
        with space.Scratch(point, "job") as scratch:
            devices.fill(Path(scratch.path("spool")), 5 * MiB)
            scratch.keep()
        assert space.available(point, "job") == before
        assert os.listdir(point) != []
        other = space.available(point, "other")
        assert other is not None
        assert before is not None
        assert other <= before - 5 * MiB


def test_space_reserved_for_root_is_not_available(tmp_path: Path) -> None:
    with devices.filesystem("ext4", tmp_path) as point:
        room = os.statvfs(point)
        assert room.f_bavail < room.f_bfree
        assert space.available(point, "job") == room.f_bavail * room.f_frsize


def test_missing_directory_means_no_scratch(tmp_path: Path) -> None:
    assert space.available(None, "job") is None
    assert space.available(tmp_path / "missing", "job") is None


@pytest.mark.parametrize("resume", [False, True])
def test_planted_file_is_not_used(tmp_path: Path, resume: bool) -> None:
    with space.Scratch(tmp_path, "job") as scratch:
        folder = scratch.folder
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").touch()
    folder.symlink_to(victim)
    with space.Scratch(tmp_path, "job", resume=resume) as scratch:
        assert not scratch.folder.is_symlink()
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "spool").touch()
    with space.Scratch(tmp_path, "job", resume=resume) as scratch:
        assert os.listdir(scratch.folder) == []
    assert (victim / "precious").exists()


def test_unwritable_directory_is_reported(tmp_path: Path) -> None:
    with pytest.raises(errors.TargetError, match="no such file or directory"):
        space.Scratch(tmp_path / "missing", "job")
