"""Archives onto a real file system, compared with what GNU tar makes of them."""

from __future__ import annotations

import contextlib
import os
import tarfile
import tempfile
import traceback
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.formats import readers
from cdi_worker.formats.tar import archive
from cdi_worker.images.folder import staging, unpack
from tests.support import hostile_archives, processes, tar_parts

LIMIT = 1 << 40


def into(directory, data, limit=LIMIT):
    unpack.unpack(archive.Archive(readers.Bytes(data), limit_bytes=limit), directory)


def facts(directory):
    """Return what can be seen of a tree, but for the times of directories and links."""
    found = {}
    for path in sorted(directory.rglob("*")):
        status = path.lstat()
        told = [status.st_mode & 0o7777, status.st_size]
        if path.is_symlink():
            told = [str(path.readlink())]
        elif path.is_dir():
            told = ["directory"]
        elif path.is_file():
            told += [int(status.st_mtime), status.st_nlink, path.read_bytes()]
        found[str(path.relative_to(directory))] = told
    return found


@pytest.fixture
def place(tmp_path):
    path = tmp_path / "place"
    path.mkdir()
    return path


@pytest.mark.parametrize("dialect", ["gnu", "posix"])
def test_as_gnu_tar(disks, place, tmp_path, dialect):
    tree, path, other = disks.tree(), tmp_path / "archive.tar", tmp_path / "other"
    other.mkdir()
    processes.run(
        "tar", "-c", "--sparse", f"--format={dialect}", f"--file={path}", f"--directory={tree}", "."
    )
    processes.run("tar", "-x", f"--file={path}", f"--directory={other}")
    into(place, path.read_bytes())
    assert facts(place) == facts(other)
    assert facts(place)
    assert (place / "sparse").stat().st_blocks * 512 < 64 << 10


def test_terabyte_of_holes_costs_nothing(disks, place):
    into(place, hostile_archives.archive(disks, "huge-sparse").read_bytes())
    file = place / "sparse"
    assert file.stat().st_size == 1 << 40
    assert file.stat().st_blocks * 512 < 1 << 20
    with file.open("rb") as opened:
        opened.seek(-512, os.SEEK_END)
        assert opened.read() == b"x" * 512


def test_larger_than_a_buffer(place):
    data = os.urandom(20 << 20)
    told = []
    reader = archive.Archive(
        readers.Bytes(tar_parts.packed(tar_parts.member("large", data))), limit_bytes=LIMIT
    )
    unpack.unpack(reader, place, advance=told.append)
    assert (place / "large").read_bytes() == data
    assert sum(told) == len(data)


def test_modes(place):
    into(
        place,
        tar_parts.packed(
            tar_parts.member("file", b"x", mode=0o6755),
            tar_parts.member("closed", type=tarfile.DIRTYPE, mode=0o1000),
            tar_parts.member("closed/file", b"x", mode=0o400),
        ),
    )
    assert (place / "file").stat().st_mode & 0o7777 == 0o755
    assert (place / "closed").stat().st_mode & 0o7777 == 0o700
    assert (place / "closed/file").stat().st_mode & 0o7777 == 0o400


def test_later_entries_replace_earlier_ones(place):
    into(
        place,
        tar_parts.packed(
            tar_parts.member("a", b"first"),
            tar_parts.member("hard", type=tarfile.LNKTYPE, linkname="a"),
            tar_parts.member("a", b"second"),
            tar_parts.member("link", type=tarfile.SYMTYPE, linkname="hard"),
            tar_parts.member("link", b"third"),
            tar_parts.member("d", type=tarfile.DIRTYPE),
            tar_parts.member("d", type=tarfile.DIRTYPE),
        ),
    )
    assert [(place / name).read_bytes() for name in ("a", "hard", "link")] == [b"second", b"first", b"third"]
    assert not (place / "link").is_symlink()


@pytest.mark.parametrize("name", sorted({*hostile_archives.ARCHIVES} - {"innocent"}))
def test_nothing_gets_outside(disks, place, name):
    data = hostile_archives.archive(disks, name).read_bytes()
    with pytest.raises(errors.Error):
        into(place, data, limit=1 << 30)
    assert os.listdir(place.parent) == ["place"]
    assert not Path("/tmp/cdi-test-absolute").exists()


@pytest.mark.parametrize(
    "members",
    [
        [tar_parts.member("l", type=tarfile.SYMTYPE, linkname="."), tar_parts.member("l/file", b"x")],
        [
            tar_parts.member("l", type=tarfile.SYMTYPE, linkname="."),
            tar_parts.member("l", type=tarfile.DIRTYPE),
        ],
        [tar_parts.member("f", b"x"), tar_parts.member("f/file", b"x")],
        [tar_parts.member("f", b"x"), tar_parts.member("f", type=tarfile.DIRTYPE)],
        [tar_parts.member("h", type=tarfile.LNKTYPE, linkname="missing")],
        [tar_parts.member("h", type=tarfile.LNKTYPE, linkname="h")],
        [
            tar_parts.member("d", type=tarfile.DIRTYPE),
            tar_parts.member("h", type=tarfile.LNKTYPE, linkname="d"),
        ],
        [
            tar_parts.member("a/b/l", type=tarfile.SYMTYPE, linkname="../../x"),
            tar_parts.member("h", type=tarfile.LNKTYPE, linkname="a/b/l"),
        ],
        [
            tar_parts.member("l", type=tarfile.SYMTYPE, linkname="d"),
            tar_parts.member("h", type=tarfile.LNKTYPE, linkname="l/x"),
        ],
    ],
)
def test_ways_through_links_are_refused(place, members):
    with pytest.raises(errors.Refused, match="link"):
        into(place, tar_parts.packed(*members))


def test_file_in_place_of_a_directory(place):
    with pytest.raises(errors.TargetError, match="d: unpack: file exists"):
        into(
            place, tar_parts.packed(tar_parts.member("d", type=tarfile.DIRTYPE), tar_parts.member("d", b"x"))
        )


def test_full(tmp_path):
    processes.need("mount")
    processes.run("mount", "-t", "tmpfs", "-o", "size=1m", "none", tmp_path)
    try:
        with pytest.raises(errors.TargetError, match="no space left on device"):
            into(tmp_path, tar_parts.packed(tar_parts.member("large", bytes(2 << 20))))
    finally:
        processes.run("umount", tmp_path)


def test_no_such_directory(tmp_path):
    with pytest.raises(errors.TargetError, match="no such file"):
        into(tmp_path / "missing", tar_parts.packed())


def staged(directory, data):
    with staging.Staging(directory) as work:
        into(work.path, data)
        work.commit()


def as_nobody(work, *arguments):
    """Run a function in a process without privileges; return whether it came to its end."""
    process = os.fork()
    if process:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    try:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        work(*arguments)
        os._exit(0)
    finally:
        traceback.print_exc()
        os._exit(1)


# The child only makes system calls; threads of other tests' servers do not matter to it.
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_as_nobody():
    """An ordinary user unpacks what root packed; owners stay behind."""
    data = tar_parts.packed(
        tar_parts.member("d", type=tarfile.DIRTYPE, mode=0o500, uid=0),
        tar_parts.member("d/file", b"x", uid=0, mode=0o4400),
        tar_parts.member("d/link", type=tarfile.SYMTYPE, linkname="file"),
    )
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        os.chown(directory, 65534, 65534)
        assert as_nobody(staged, directory, data)
        file = Path(directory, "d/file")
        assert (file.read_bytes(), file.stat().st_uid) == (b"x", 65534)
        assert os.listdir(directory) == ["d"]


# -- staging


def test_staged_and_committed(place):
    (place / "kept").write_text("kept")
    with staging.Staging(place) as work:
        into(work.path, tar_parts.packed(tar_parts.member("a/b", b"x"), tar_parts.member("c", b"x")))
        assert not (place / "a").exists()
        work.commit()
    assert set(facts(place)) == {"a", "a/b", "c", "kept"}


def test_nothing_is_left_without_a_commit(place):
    with contextlib.suppress(errors.Truncated), staging.Staging(place) as work:
        into(work.path, tar_parts.packed(tar_parts.member("a/b", b"x"))[:600])
    assert os.listdir(place) == []


def test_second_attempt_after_a_kill(place):
    """The first was killed while it moved things into place."""
    members = [
        tar_parts.member("a/b", b"x"),
        tar_parts.member("a/c", b"new"),
        tar_parts.member("d", b"x"),
        tar_parts.member("l", b"x"),
    ]
    work = staging.Staging(place).__enter__()
    into(work.path, tar_parts.packed(*members))
    (place / "a").mkdir()
    (place / "a/b").write_text("moved")
    (place / "d").write_text("moved")
    (place / "l").symlink_to("d")
    staging.remove_left_over(place)
    assert set(facts(place)) == {"a", "a/b", "d", "l"}
    with staging.Staging(place) as again:
        into(again.path, tar_parts.packed(*members))
        again.commit()
    found = {name: told[-1] for name, told in facts(place).items() if told != ["directory"]}
    assert found == {"a/b": b"x", "a/c": b"new", "d": b"x", "l": b"x"}


def test_directory_in_place_of_a_file(place):
    (place / "a").write_text("file")
    (place / "b").mkdir()
    with staging.Staging(place) as work:
        into(work.path, tar_parts.packed(tar_parts.member("a/b", b"x")))
        work.commit()
    assert set(facts(place)) == {"a", "a/b", "b"}
    with staging.Staging(place) as work:
        into(work.path, tar_parts.packed(tar_parts.member("b", b"x")))
        with pytest.raises(errors.TargetError, match="is a directory"):
            work.commit()
    assert set(facts(place)) == {"a", "a/b", "b"}


def test_symlink_where_the_staging_goes(place, tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/file").write_text("kept")
    staging.Staging(place).path.symlink_to(tmp_path / "outside")
    with staging.Staging(place):
        pass
    assert (tmp_path / "outside/file").read_text() == "kept"
