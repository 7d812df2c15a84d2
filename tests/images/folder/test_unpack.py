"""Unpack archives to a real file system and compare with GNU tar."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
import tarfile
import tempfile
import traceback
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.formats import readers
from cdi_worker.formats.tar import archive
from cdi_worker.images import targets
from cdi_worker.images.folder import staging, unpack
from tests.support import hostile_archives, processes, tar_parts

LIMIT = 1 << 40


def unpack_into(directory, data, limit=LIMIT):
    unpack.unpack(archive.Archive(readers.BytesReader(data), limit_bytes=limit), directory)


def unpack_members(directory, *members):
    unpack_into(directory, tar_parts.packed(*members))


def facts(directory):
    """Return the visible state of a tree, without the times of directories and links."""
    tree = {}
    for path in sorted(directory.rglob("*")):
        status = path.lstat()
        state = [status.st_mode & 0o7777, status.st_size]
        if path.is_symlink():
            state = [str(path.readlink())]
        elif path.is_dir():
            state = ["directory"]
        elif path.is_file():
            state += [int(status.st_mtime), status.st_nlink, path.read_bytes()]
        tree[str(path.relative_to(directory))] = state
    return tree


@pytest.fixture
def volume(tmp_path):
    path = tmp_path / "place"
    path.mkdir()
    return path


def listed_by_gnu_tar(tree, archive_path, *options):
    """Pack ``tree`` by GNU tar with ``options``; return the archive."""
    processes.run("tar", "-c", *options, f"--file={archive_path}", f"--directory={tree}", ".")
    return archive_path.read_bytes()


def same_as_gnu_tar(data, volume, tmp_path):
    """Unpack ``data`` to ``volume``, and check that GNU tar makes the same of it."""
    packed, other = tmp_path / "packed.tar", tmp_path / "other"
    packed.write_bytes(data)
    other.mkdir()
    processes.run("tar", "-x", f"--file={packed}", f"--directory={other}")
    unpack_into(volume, data)
    assert facts(volume) == facts(other)
    assert facts(volume)


def file(name, data=b"x", **fields):
    return tar_parts.member(name, data, **fields)


def symlink(name, to):
    return tar_parts.member(name, type=tarfile.SYMTYPE, linkname=to)


def hard_link(name, to):
    return tar_parts.member(name, type=tarfile.LNKTYPE, linkname=to)


def folder(name, **fields):
    return tar_parts.member(name, type=tarfile.DIRTYPE, **fields)


FILE = tar_parts.packed(file("f", b"hello", mode=0o644))[:1024]
LINK = hard_link("h", "f")[0].tobuf(tarfile.GNU_FORMAT)
LAST = tar_parts.block()


def stated(header, size):
    return tar_parts.resummed(header, 124, b"%011o\0" % size)


def with_kind(kind, size):
    return tar_parts.resummed(tar_parts.block(size=size, mode=0o755), 156, kind)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(FILE + stated(LINK, 5) + LAST + tar_parts.END, id="hard-link-with-a-size"),
        pytest.param(
            FILE + tar_parts.pax([tar_parts.record(b"size", b"600")], then=LINK)[:-1024] + tar_parts.END,
            id="hard-link-with-a-pax-size",
        ),
        pytest.param(with_kind(b"5", 4096) + FILE + tar_parts.END, id="directory-with-a-size"),
        pytest.param(FILE + bytes(512), id="one-zero-block"),
        pytest.param(with_kind(b"D", 5) + b"Yf\0\0\0".ljust(512, b"\0") + FILE + tar_parts.END, id="dumpdir"),
        pytest.param(
            FILE + tar_parts.packed(hard_link("f", "f"))[:512] + tar_parts.END, id="hard-link-to-itself"
        ),
        pytest.param(
            tar_parts.pax([tar_parts.record(b"path", b"other")], b"X"), id="extended-header-of-solaris"
        ),
    ],
)
def test_archive_of_another_tool_is_unpacked_as_by_gnu_tar(volume, tmp_path, data):
    same_as_gnu_tar(data, volume, tmp_path)


def test_acl_of_solaris_is_skipped(volume):
    acl = with_kind(b"A", 5) + b"acl:x".ljust(512, b"\0")
    unpack_into(volume, acl + FILE + tar_parts.END)
    assert list(facts(volume)) == ["f"]


@pytest.mark.parametrize(
    "options",
    [
        ["--format=gnu"],
        ["--format=posix", "--sparse-version=0.0"],
        ["--format=posix", "--sparse-version=0.1"],
        ["--format=posix", "--sparse-version=1.0"],
        ["--format=gnu", "--listed-incremental={}/snapshot"],
        ["--format=posix", "--listed-incremental={}/snapshot"],
    ],
)
def test_tree_is_unpacked_as_by_gnu_tar(disks, volume, tmp_path, options):
    given = [option.format(tmp_path) for option in options]
    same_as_gnu_tar(listed_by_gnu_tar(disks.tree(), tmp_path / "a.tar", "--sparse", *given), volume, tmp_path)
    assert (volume / "sparse").stat().st_blocks * 512 < 64 << 10


@pytest.mark.parametrize("dialect", ["gnu", "posix"])
def test_links_are_kept_as_they_are(volume, tmp_path, dialect):
    """A root file system is full of absolute links, and of links that lead above it."""
    tree = tmp_path / "tree"
    (tree / "etc/alternatives").mkdir(parents=True)
    (tree / "etc/file").write_text("file")
    targets = [
        "/etc/file",
        "../../../../../etc/passwd",
        "/",
        "..",
        "missing",
        "/proc/self/root",
        "file/../x",
        "//",
    ]
    for index, link in enumerate([*targets, "/n" * 1500]):
        (tree / f"etc/link{index}").symlink_to(link)
    os.link(tree / "etc/link0", tree / "hard", follow_symlinks=False)
    os.link(tree / "etc/file", tree / "also")
    options = [f"--format={dialect}"]
    same_as_gnu_tar(listed_by_gnu_tar(tree, tmp_path / "a.tar", *options), volume, tmp_path)
    assert (volume / "hard").readlink() == Path("/etc/file")
    assert (volume / "hard").lstat().st_nlink == 2


def test_nothing_is_changed_through_a_link(volume, tmp_path):
    """Entries that replace links or give them modes and times, and merges into a tree with links."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("kept")
    before = [path.stat() for path in (outside, outside / "file")]
    link = tar_parts.member("l", type=tarfile.SYMTYPE, linkname=str(outside / "file"), mode=0o777, mtime=1)
    data = tar_parts.packed(
        link,
        hard_link("h", "l"),
        link,
        file("h", b"new", mode=0o600, mtime=2),
        symlink("d", str(outside)),
        file("e/file", b"new"),
    )
    (volume / "e").symlink_to(outside)
    (volume / "l").symlink_to(outside)
    unpack_staged(volume, data)
    assert [path.stat() for path in (outside, outside / "file")] == before
    assert (volume / "l").readlink() == outside / "file"
    assert (volume / "h").read_text() == "new"
    assert os.listdir(volume / "e") == ["file"]
    assert not (volume / "e").is_symlink()


def test_holes_take_no_space(disks, volume):
    unpack_into(volume, hostile_archives.archive(disks, "huge-sparse").read_bytes())
    file = volume / "sparse"
    assert file.stat().st_size == 1 << 40
    assert file.stat().st_blocks * 512 < 1 << 20
    with file.open("rb") as opened:
        opened.seek(-512, os.SEEK_END)
        assert opened.read() == b"x" * 512


def test_file_larger_than_a_buffer_is_unpacked(volume):
    data = os.urandom(20 << 20)
    state = []
    reader = archive.Archive(readers.BytesReader(tar_parts.packed(file("large", data))), limit_bytes=LIMIT)
    unpack.unpack(reader, volume, advance=state.append)
    assert (volume / "large").read_bytes() == data
    assert sum(state) == len(data)


def test_modes_are_kept_without_special_bits(volume):
    unpack_members(
        volume, file("file", mode=0o6755), folder("closed", mode=0o1000), file("closed/file", mode=0o400)
    )
    assert (volume / "file").stat().st_mode & 0o7777 == 0o755
    assert (volume / "closed").stat().st_mode & 0o7777 == 0o700
    assert (volume / "closed/file").stat().st_mode & 0o7777 == 0o400


MODES = (0o666, 0o444, 0o000, 0o666, 0o755)


@contextlib.contextmanager
def umask(mask):
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize("mask", [0, 0o022, 0o777])
def test_modes_do_not_depend_on_the_umask(volume, mask):
    members = [file(f"{number}", mode=mode) for number, mode in enumerate(MODES)]
    with umask(mask):
        unpack_members(volume, *members)
    assert [stat.S_IMODE((volume / str(each)).stat().st_mode) for each in range(len(MODES))] == [*MODES]
    assert (volume / "1").read_bytes() == b"x"


def test_file_is_written_before_it_is_read_only(volume, monkeypatch):
    """Some file servers look at the mode for each write."""
    sizes = []

    def changed(fd, mode, chmod=os.fchmod):
        sizes.append(os.fstat(fd).st_size)
        chmod(fd, mode)

    monkeypatch.setattr(os, "fchmod", changed)
    unpack_members(volume, file("file", b"data", mode=0o444))
    assert sizes == [4]


@pytest.mark.parametrize(
    ("mask", "others", "entered"), [(0o022, 0, ()), (0o022, 0, ("inner",)), (0o077, 7, ())]
)
def test_modes_do_not_depend_on_a_default_acl(volume, mask, others, entered):
    """The files of a directory with one get these permissions at most, and no umask counts."""
    (volume / "inner").mkdir()
    entries = ((0x01, 7), (0x04, others), (0x20, others))  # linux/posix_acl_xattr.h: owner, group, others
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", tag, bits, -1) for tag, bits in entries)
    try:
        os.setxattr(volume / "inner", "system.posix_acl_default", acl)
    except OSError:
        pytest.skip("needs a file system with ACLs")
    names = ("first", "inner/second", "third")
    directories = [folder(name, mode=0o755) for name in entered]
    first, *later = (file(name, mode=0o644) for name in names)
    with umask(mask):
        unpack_members(volume, first, *directories, *later)
    assert {stat.S_IMODE((volume / name).stat().st_mode) for name in names} == {0o644}


def test_later_entry_replaces_earlier_one(volume):
    unpack_members(
        volume,
        file("a", b"first"),
        hard_link("hard", "a"),
        file("a", b"second"),
        symlink("link", "hard"),
        file("link", b"third"),
        folder("d"),
        folder("d"),
    )
    assert [(volume / name).read_bytes() for name in ("a", "hard", "link")] == [b"second", b"first", b"third"]
    assert not (volume / "link").is_symlink()


@pytest.mark.parametrize("name", sorted({*hostile_archives.ARCHIVES} - {"innocent"}))
def test_hostile_archive_writes_nothing_outside(disks, volume, name):
    data = hostile_archives.archive(disks, name).read_bytes()
    with pytest.raises(errors.Error):
        unpack_into(volume, data, limit=1 << 30)
    assert os.listdir(volume.parent) == ["place"]
    assert not Path("/tmp/cdi-test-absolute").exists()


@pytest.mark.parametrize(
    "members",
    [
        [symlink("l", "."), file("l/file")],
        [symlink("l", "."), folder("l")],
        [file("f"), file("f/file")],
        [file("f"), folder("f")],
        [hard_link("h", "missing")],
        [hard_link("h", "h")],
        [folder("d"), hard_link("h", "d")],
        [symlink("l", "/"), file("l/tmp/file")],
        [symlink("l", "/"), folder("l", mode=0o700)],
        [symlink("l", "/etc"), hard_link("h", "l/hostname")],
        [symlink("l", ".."), symlink("l/l", "x")],
        [symlink("l", "d"), hard_link("h", "l/x")],
    ],
)
def test_path_through_link_is_refused(volume, members):
    with pytest.raises(errors.Refused, match="link"):
        unpack_members(volume, *members)


def test_file_does_not_replace_a_directory(volume):
    with pytest.raises(errors.TargetError, match="d: unpack: file exists"):
        unpack_members(volume, folder("d"), file("d"))


def test_full_file_system_is_reported(tmp_path):
    processes.need_root()
    processes.run("mount", "-t", "tmpfs", "-o", "size=1m", "none", tmp_path)
    try:
        with pytest.raises(errors.TargetError, match="no space left on device"):
            unpack_members(tmp_path, file("large", bytes(2 << 20)))
    finally:
        processes.run("umount", tmp_path)


class Syncs:
    """In place of ``kernel.sync_filesystem``: notes the number of files, fails the call ``failing``."""

    def __init__(self, volume, failing=None):
        self._volume = volume
        self._failing = failing
        self.files = []

    def __call__(self, fd):
        self.files.append(len(os.listdir(self._volume)))
        if len(self.files) - 1 == self._failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))


def unpack_with_syncs(monkeypatch, volume, syncs):
    monkeypatch.setattr(unpack, "_SYNC", 4096)
    monkeypatch.setattr(unpack.kernel, "sync_filesystem", syncs)
    unpack_members(volume, *(file(f"{each}", bytes(512)) for each in range(1000)))


def test_files_are_synced_while_others_are_unpacked_and_at_the_end(monkeypatch, volume):
    syncs = Syncs(volume)
    unpack_with_syncs(monkeypatch, volume, syncs)
    assert syncs.files[0] < 1000
    assert syncs.files[-1] == 1000
    assert 2 < len(syncs.files) <= 1000 * 1024 // 4096 + 1


@pytest.mark.parametrize("failing", [0, 2])
def test_failed_sync_is_reported(monkeypatch, volume, failing):
    """An error of writeback is reported once."""
    with pytest.raises(errors.TargetError, match="place: sync: input/output error"):
        unpack_with_syncs(monkeypatch, volume, Syncs(volume, failing))


def test_nothing_is_synced_for_a_failed_archive(monkeypatch, volume):
    syncs = Syncs(volume)
    monkeypatch.setattr(unpack.kernel, "sync_filesystem", syncs)
    with pytest.raises(errors.Truncated):
        unpack_into(volume, tar_parts.packed(file("a"))[:600])
    assert syncs.files == []


def test_missing_directory_is_reported(tmp_path):
    with pytest.raises(errors.TargetError, match="no such file"):
        unpack_into(tmp_path / "missing", tar_parts.packed())


@contextlib.contextmanager
def staged(directory, **options):
    """Yield a staging folder of a claimed directory."""
    with targets.take(directory, folder=True) as held, staging.Staging(held, **options) as work:
        yield work


def unpack_staged(directory, data):
    with staged(directory) as work:
        unpack_into(work.path, data)
        work.commit()


def run_as_nobody(work, *arguments):
    """Run a function in a process without privileges; return whether it succeeded."""
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
def test_unprivileged_user_can_unpack():
    """An ordinary user unpacks an archive of root; the owners in it are ignored."""
    processes.need_root()
    data = tar_parts.packed(
        folder("d", mode=0o500, uid=0), file("d/file", uid=0, mode=0o4400), symlink("d/link", "file")
    )
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        os.chown(directory, 65534, 65534)
        assert run_as_nobody(unpack_staged, directory, data)
        unpacked = Path(directory, "d/file")
        assert (unpacked.read_bytes(), unpacked.stat().st_uid) == (b"x", 65534)
        assert os.listdir(directory) == ["d"]


# -- staging


def test_commit_moves_files_into_place(volume):
    (volume / "kept").write_text("kept")
    with staged(volume) as work:
        unpack_members(work.path, file("a/b"), file("c"))
        assert not (volume / "a").exists()
        work.commit()
    assert set(facts(volume)) == {"a", "a/b", "c", "kept"}


def test_files_are_removed_without_commit(volume):
    with contextlib.suppress(errors.Truncated), staged(volume) as work:
        unpack_into(work.path, tar_parts.packed(file("a/b"))[:600])
    assert os.listdir(volume) == []


def test_second_attempt_completes_a_killed_one(volume):
    """The first attempt was killed while it moved files into place."""
    members = [file("a/b"), file("a/c", b"new"), file("d"), file("l")]
    with staged(volume) as work:
        unpack_members(work.path, *members)
    (volume / "a").mkdir()
    (volume / "a/b").write_text("moved")
    (volume / "d").write_text("moved")
    (volume / "l").symlink_to("d")
    assert set(facts(volume)) == {"a", "a/b", "d", "l"}
    with staged(volume) as again:
        unpack_members(again.path, *members)
        again.commit()
    tree = {name: state[-1] for name, state in facts(volume).items() if state != ["directory"]}
    assert tree == {"a/b": b"x", "a/c": b"new", "d": b"x", "l": b"x"}


def test_existing_files_are_refused_on_request(volume):
    (volume / "a").mkdir()
    (volume / "a/kept").write_text("kept")
    with staged(volume, replace=False) as work:
        unpack_members(work.path, file("a/b"))
        work.commit()
    for name in ("a/kept", "a"):
        with staged(volume, replace=False) as work:
            members = file("0"), file(name)
            unpack_members(work.path, *members)
            with pytest.raises(errors.TargetExists, match="replace it"):
                work.commit()
    assert set(facts(volume)) == {"a", "a/b", "a/kept"}
    assert (volume / "a/kept").read_text() == "kept"


def test_directory_replaces_a_file_but_not_vice_versa(volume):
    (volume / "a").write_text("file")
    (volume / "b").mkdir()
    with staged(volume) as work:
        unpack_members(work.path, file("a/b"))
        work.commit()
    assert set(facts(volume)) == {"a", "a/b", "b"}
    with staged(volume) as work:
        unpack_members(work.path, file("b"))
        with pytest.raises(errors.TargetError, match="is a directory"):
            work.commit()
    assert set(facts(volume)) == {"a", "a/b", "b"}


def test_symlink_instead_of_staging_folder_is_not_followed(volume, tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/file").write_text("kept")
    (volume / ".cdi-worker-unpacking").symlink_to(tmp_path / "outside")
    with staged(volume):
        pass
    assert (tmp_path / "outside/file").read_text() == "kept"


@pytest.mark.parametrize(
    ("name", "replace"), [(".cdi-worker-unpacking/file", True), ("disk.img.lock", False)]
)
def test_names_of_our_own_files_are_refused(volume, name, replace):
    """They would take the place of the staging folder and of the lock, and be removed at the end."""
    with staged(volume, replace=replace) as work:
        unpack_members(work.path, file("a"), file(name))
        with pytest.raises(errors.Refused, match="rename it in the archive"):
            work.commit()
    assert facts(volume) == {}


def test_lock_file_that_a_killed_run_left_on_a_cloned_volume_is_dropped(volume, tmp_path):
    with targets.take(tmp_path / "disk.img"):
        left_over = (tmp_path / "disk.img.lock").read_bytes()
    members = file("disk.img"), file("disk.img.lock", left_over)
    with staged(volume) as work:
        unpack_members(work.path, *members)
        work.commit()
    assert set(facts(volume)) == {"disk.img"}


def test_file_larger_than_any_file_system_is_refused(volume):
    """A clone may be larger than the target; its holes take no space."""
    data = tar_parts.pax_sparse(b"1\n0\n20\n", 1 << 63, 20)
    with pytest.raises(errors.Corrupt):
        unpack.unpack(archive.Archive(readers.BytesReader(data), limit_bytes=LIMIT, thin=True), volume)
