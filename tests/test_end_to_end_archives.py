"""Hostile archives: an error, and neither the volume nor anything outside it has changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import devices, hostile_archives, servers, worker
from tests import disks as disks_module

MiB = 1 << 20
IMAGE, TARGET = 4, 6


@pytest.mark.parametrize("name", sorted({*hostile_archives.ARCHIVES} - {"innocent"}))
def test_hostile_archives(web: servers.Web, disks: disks_module.Disks, tmp_path: Path, name: str) -> None:
    with devices.filesystem("tmpfs", tmp_path, 8 * MiB) as point:
        volume = point / "outer" / "volume"
        volume.mkdir(parents=True)
        url = web.url(hostile_archives.archive(disks, name))
        done = worker.run("import", url, volume, "--content-type=archive")
        assert done.status in (IMAGE, TARGET), done.errors
        assert done.complaint
        assert [*volume.iterdir()] == []
        assert [path.name for path in point.rglob("*")] == ["outer", "volume"]
    assert not Path("/tmp/cdi-test-absolute").exists()
    assert not Path("/etc/outside").exists()


def test_archive_larger_than_the_volume(web: servers.Web, disks: disks_module.Disks, tmp_path: Path) -> None:
    with devices.filesystem("tmpfs", tmp_path, MiB) as volume:
        done = worker.run("import", web.url(disks.tar("gz")), volume, "--content-type=archive")
        assert done.status == TARGET, done.errors
        assert not [*volume.iterdir()]


def test_disk_is_no_archive(web: servers.Web, disks: disks_module.Disks, tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    done = worker.run("import", web.url(disks.raw()), volume, "--content-type=archive")
    assert done.status == IMAGE
    assert "tar" in done.complaint
    assert not [*volume.iterdir()]
