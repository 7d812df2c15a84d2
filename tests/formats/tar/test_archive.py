"""Entries packed by GNU tar and Python's tarfile, and the ends of an archive."""

from __future__ import annotations

import random
import tarfile

import pytest

from cdi_worker import errors
from cdi_worker.formats import readers
from cdi_worker.formats.tar import archive
from tests.support import processes, tar_parts

NOISE = random.Random(1).randbytes(100_000)


@pytest.mark.parametrize(
    ("dialect", "step"),
    [(tarfile.USTAR_FORMAT, 1), (tarfile.GNU_FORMAT, 511), (tarfile.PAX_FORMAT, 1 << 20)],
)
def test_every_entry_type_is_read(dialect, step):
    found = tar_parts.unpacked(
        tar_parts.packed(
            tar_parts.member("./", type=tarfile.DIRTYPE),
            tar_parts.member("./a", type=tarfile.DIRTYPE, mode=0o2755),
            tar_parts.member("./a/file", NOISE[:5000], mode=0o4644, mtime=1_700_000_000),
            tar_parts.member("empty"),
            tar_parts.member("a/link", type=tarfile.SYMTYPE, linkname="../empty"),
            tar_parts.member("hard", type=tarfile.LNKTYPE, linkname="./a/file"),
            dialect=dialect,
        ),
        step,
    )
    assert list(found) == ["a", "a/file", "empty", "a/link", "hard"]
    entries = {path: entry for path, (entry, _) in found.items()}
    assert entries["a"] == archive.Entry(("a",), "directory", 0o755, 0)
    assert (entries["a/file"].mode, entries["a/file"].mtime, entries["a/file"].size) == (
        0o644,
        1_700_000_000,
        5000,
    )
    assert found["a/file"][1] == {0: NOISE[:5000]}
    assert found["empty"][1] == {0: b""}
    assert (entries["a/link"].kind, entries["a/link"].link) == ("symlink", "../empty")
    assert (entries["hard"].kind, entries["hard"].link) == ("hardlink", "a/file")


@pytest.mark.parametrize("dialect", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_are_read(dialect):
    name = "/".join("n" * 60 for _ in range(3)) if dialect == tarfile.USTAR_FORMAT else "ü/" * 200 + "n" * 250
    link = "l" * (90 if dialect == tarfile.USTAR_FORMAT else 2000)
    found = tar_parts.unpacked(
        tar_parts.packed(
            tar_parts.member(name, b"x"),
            tar_parts.member("s", type=tarfile.SYMTYPE, linkname=link),
            dialect=dialect,
        )
    )
    assert list(found) == [name, "s"]
    assert found["s"][0].link == link


def test_name_that_is_not_utf_8_is_kept():
    found = tar_parts.unpacked(
        tar_parts.packed(
            tar_parts.member(b"\xff\xfe".decode(errors="surrogateescape"), b"x"), errors="surrogateescape"
        )
    )
    assert list(found) == [b"\xff\xfe".decode(errors="surrogateescape")]


def test_trailing_slash_marks_a_directory():
    found = tar_parts.unpacked(tar_parts.resummed(tar_parts.block(), 0, b"dir/\0") + tar_parts.END)
    assert found["dir"][0].kind == "directory"


def test_binary_size_is_read():
    size = (9 << 30) + 5
    entries = iter(archive.Archive(readers.BytesReader(tar_parts.block(size=size)), limit_bytes=size))
    assert next(entries).size == size
    with pytest.raises(errors.Truncated):
        next(entries)


def test_unread_data_is_skipped():
    opened = archive.Archive(
        readers.BytesReader(
            tar_parts.packed(
                tar_parts.member("a", NOISE), tar_parts.member("b", NOISE), tar_parts.member("c")
            )
        ),
        limit_bytes=tar_parts.LIMIT,
    )
    names = []
    for entry in opened:
        names.append(entry.path[0])
        if names == ["a"]:
            opened.readinto(memoryview(bytearray(777)))
    assert names == ["a", "b", "c"]


@pytest.mark.parametrize("dialect", ["gnu", "posix", "ustar", "v7", "oldgnu"])
def test_archives_of_gnu_tar_are_read(disks, dialect, tmp_path):
    tree, path = disks.tree(), tmp_path / "archive.tar"
    sparse = () if dialect in {"ustar", "v7"} else ("--sparse",)
    processes.run("tar", "-c", f"--format={dialect}", *sparse, f"--file={path}", f"--directory={tree}", ".")
    found = tar_parts.unpacked(path.read_bytes())
    assert set(found) == {str(path.relative_to(tree)) for path in tree.rglob("*")}
    for name, (entry, pieces) in found.items():
        if entry.kind == "file":
            content = bytearray(entry.size)
            for offset, data in pieces.items():
                content[offset : offset + len(data)] = data
            assert content == (tree / name).read_bytes()
    stored = sum(len(data) for data in found["sparse"][1].values())
    assert (stored < 10_000) == bool(sparse)


# -- ends of the archive


def test_empty_archive_has_no_entries():
    assert tar_parts.unpacked(tar_parts.END) == {}
    assert tar_parts.unpacked(bytes(10240)) == {}


def test_archive_cut_anywhere_is_truncated():
    """Unless all entries and a zero block are there: not every tool writes two."""
    data = tar_parts.packed(tar_parts.member("a", b"x" * 700), tar_parts.member("b"))[
        : 512 + 1024 + 512 + 1024
    ]
    for length in range(len(data) - 512):
        with pytest.raises(errors.Truncated):
            tar_parts.unpacked(data[:length])
    for length in range(len(data) - 512, len(data) + 1):
        assert list(tar_parts.unpacked(data[:length])) == ["a", "b"]


def test_data_after_the_end_is_garbage():
    data = tar_parts.packed(tar_parts.member("a"))
    for extra in (b"x", bytes(512) + tar_parts.block()):
        with pytest.raises(errors.TrailingGarbage):
            tar_parts.unpacked(data + extra)
    with pytest.raises(errors.TrailingGarbage):
        tar_parts.unpacked(tar_parts.block() + bytes(512) + tar_parts.block() + tar_parts.END)
    assert list(tar_parts.unpacked(data + bytes(100_000))) == ["a"]


class Endless:
    """A stream that begins with ``start`` and repeats ``unit`` for ever."""

    def __init__(self, start, unit):
        self._rest = start
        self._unit = unit * max(1, (1 << 20) // len(unit))

    def readinto(self, into):
        self._rest = self._rest or self._unit
        count = min(len(into), len(self._rest))
        into[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    def close(self):
        pass


def test_endless_zeros_after_the_end_are_garbage():
    with pytest.raises(errors.TrailingGarbage):
        list(archive.Archive(Endless(tar_parts.block(), bytes(512)), limit_bytes=tar_parts.LIMIT))


def test_endless_entries_are_too_large():
    unit = tar_parts.resummed(tar_parts.block(size=1 << 20), 156, b"D") + bytes(1 << 20)
    with pytest.raises(errors.TooLarge):
        list(archive.Archive(Endless(b"", unit), limit_bytes=1 << 20))


def test_content_above_limit_is_too_large():
    data = tar_parts.packed(tar_parts.member("a", b"x" * 1000), tar_parts.member("b", b"x" * 1000))
    assert len(tar_parts.unpacked(data, limit=2000)) == 2
    with pytest.raises(errors.TooLarge):
        tar_parts.unpacked(data, limit=1999)
