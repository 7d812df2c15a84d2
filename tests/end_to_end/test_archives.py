"""Archives are unpacked as they were packed; hostile ones leave nothing, inside the volume or outside."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import devices, hostile_archives, servers, ways, worker
from tests.support import disks as disks_module

MiB = 1 << 20
IMAGE, TARGET, TOO_LARGE = 4, 6, 8


@pytest.mark.parametrize("compression", [None, "gz", "zst"])
def test_archive_is_unpacked(
    disks: disks_module.Disks, web: servers.Web, tmp_path: Path, compression: str | None
) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    url = web.url(disks.tar(compression))
    ways.import_disk(url, volume, content_type="archive")
    assert contents(volume) == contents(disks.tree())
    assert (volume / "sparse").stat().st_blocks * 512 < 2 * MiB


def contents(root: Path) -> dict[str, object]:
    """Return the content of a tree: bytes of files, targets of links."""
    found: dict[str, object] = {}
    for path in sorted(root.rglob("*")):
        kept = path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(root))] = kept
    return found


# All of them: tests/images/folder/test_unpack.py.
@pytest.mark.parametrize("name", ["absolute", "dotdot-deep", "symlink-out", "promised"])
def test_hostile_archive_leaves_nothing(
    web: servers.Web, disks: disks_module.Disks, tmp_path: Path, name: str
) -> None:
    with devices.filesystem("tmpfs", tmp_path, 8 * MiB) as point:
        volume = point / "outer" / "volume"
        volume.mkdir(parents=True)
        url = web.url(hostile_archives.archive(disks, name))
        done = worker.call("import", url, volume, "--content-type=archive")
        assert done.status in (IMAGE, TARGET, TOO_LARGE), done.errors
        assert done.error_message
        assert [*volume.iterdir()] == []
        assert [path.name for path in point.rglob("*")] == ["outer", "volume"]
    assert not Path("/tmp/cdi-test-absolute").exists()
    assert not Path("/etc/outside").exists()


def test_archive_larger_than_the_volume_is_refused(
    web: servers.Web, disks: disks_module.Disks, tmp_path: Path
) -> None:
    with devices.filesystem("tmpfs", tmp_path, MiB) as volume:
        done = worker.call("import", web.url(disks.tar("gz")), volume, "--content-type=archive")
        assert done.status == TOO_LARGE, done.errors
        assert not [*volume.iterdir()]


def test_disk_is_not_accepted_as_archive(web: servers.Web, disks: disks_module.Disks, tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    done = worker.call("import", web.url(disks.raw()), volume, "--content-type=archive")
    assert done.status == IMAGE
    assert "tar" in done.error_message
    assert not [*volume.iterdir()]
