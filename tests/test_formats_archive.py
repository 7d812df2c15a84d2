"""Entries as GNU tar and Python's tarfile pack them; what is malformed or leads outside is refused."""

from __future__ import annotations

import contextlib
import io
import random
import struct
import tarfile
import time

import hypothesis
import pytest
from hypothesis import strategies as st

from formats import archive, readers, tar, tar_sparse
from importer import errors
from tests import hostile_archives, processes, reading

LIMIT = 1 << 30
NOISE = random.Random(1).randbytes(100_000)


def unpacked(data, step=1 << 20, limit=LIMIT):
    """Return {path: (entry, {offset: data})}."""
    opened = archive.Archive(reading.Portions(data, step), limit_bytes=limit)
    found = {}
    for entry in opened:
        pieces = {}
        for offset, length in entry.runs():
            buffer = memoryview(bytearray(length))
            count = 0
            while count < length:
                got = opened.readinto(buffer[count:])
                assert got
                count += got
            pieces[offset] = bytes(buffer)
        assert opened.readinto(memoryview(bytearray(1))) == 0
        found["/".join(entry.path)] = (entry, pieces)
    return found


def member(name, data=b"", **fields):
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, data


def packed(*members, dialect=tarfile.GNU_FORMAT, **options):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=dialect, **options) as made:
        for info, data in members:
            made.addfile(info, io.BytesIO(data))
    return file.getvalue()


def block(**fields):
    """Return a header block with fields of tarfile.TarInfo."""
    return member("name", **fields)[0].tobuf(tarfile.GNU_FORMAT)


def resummed(header, offset, data):
    """Write over a header and make its checksum right."""
    changed = bytearray(header)
    changed[offset : offset + len(data)] = data
    changed[148:156] = b" " * 8
    changed[148:156] = b"%06o\0 " % sum(changed[:512])
    return bytes(changed)


END = bytes(1024)


@pytest.mark.parametrize("step", [1, 511, 1 << 20])
@pytest.mark.parametrize("dialect", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_kind_of_entry(dialect, step):
    found = unpacked(
        packed(
            member("./", type=tarfile.DIRTYPE),
            member("./a", type=tarfile.DIRTYPE, mode=0o2755),
            member("./a/file", NOISE[:5000], mode=0o4644, mtime=1_700_000_000),
            member("empty"),
            member("a/link", type=tarfile.SYMTYPE, linkname="../empty"),
            member("hard", type=tarfile.LNKTYPE, linkname="./a/file"),
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
def test_long_names(dialect):
    name = "/".join("n" * 60 for _ in range(3)) if dialect == tarfile.USTAR_FORMAT else "ü/" * 300 + "n" * 250
    link = "l" * (90 if dialect == tarfile.USTAR_FORMAT else 2000)
    found = unpacked(
        packed(member(name, b"x"), member("s", type=tarfile.SYMTYPE, linkname=link), dialect=dialect)
    )
    assert list(found) == [name, "s"]
    assert found["s"][0].link == link


def test_name_that_is_no_unicode():
    found = unpacked(
        packed(member(b"\xff\xfe".decode(errors="surrogateescape"), b"x"), errors="surrogateescape")
    )
    assert list(found) == [b"\xff\xfe".decode(errors="surrogateescape")]


def test_old_directory():
    found = unpacked(resummed(block(), 0, b"dir/\0") + END)
    assert found["dir"][0].kind == "directory"


def test_large_file_by_binary_size():
    size = (9 << 30) + 5
    entries = iter(archive.Archive(readers.Bytes(block(size=size)), limit_bytes=size))
    assert next(entries).size == size
    with pytest.raises(errors.Truncated):
        next(entries)


def test_unread_data_is_passed_over():
    opened = archive.Archive(
        readers.Bytes(packed(member("a", NOISE), member("b", NOISE), member("c"))), limit_bytes=LIMIT
    )
    names = []
    for entry in opened:
        names.append(entry.path[0])
        if names == ["a"]:
            opened.readinto(memoryview(bytearray(777)))
    assert names == ["a", "b", "c"]


@pytest.mark.parametrize("dialect", ["gnu", "posix", "ustar", "v7", "oldgnu"])
def test_gnu_tar(disks, dialect, tmp_path):
    tree, path = disks.tree(), tmp_path / "archive.tar"
    sparse = () if dialect in {"ustar", "v7"} else ("--sparse",)
    processes.run("tar", "-c", f"--format={dialect}", *sparse, f"--file={path}", f"--directory={tree}", ".")
    found = unpacked(path.read_bytes())
    assert set(found) == {str(path.relative_to(tree)) for path in tree.rglob("*")}
    for name, (entry, pieces) in found.items():
        if entry.kind == "file":
            content = bytearray(entry.size)
            for offset, data in pieces.items():
                content[offset : offset + len(data)] = data
            assert content == (tree / name).read_bytes()
    stored = sum(len(data) for data in found["sparse"][1].values())
    assert (stored < 10_000) == bool(sparse)


@pytest.mark.parametrize("dialect", ["gnu", "posix"])
def test_sparse_file_with_many_runs(tmp_path, dialect):
    with (tmp_path / "sparse").open("wb") as file:
        for index in range(300):
            file.seek(index << 20)
            file.write(b"%d" % index)
        file.truncate(400 << 20)
    path = tmp_path / "archive.tar"
    argv = (
        "tar",
        "-c",
        "--sparse",
        f"--format={dialect}",
        f"--file={path}",
        f"--directory={tmp_path}",
        "sparse",
    )
    processes.run(*argv)
    for step in (100, 1 << 20):
        entry, pieces = unpacked(path.read_bytes(), step)["sparse"]
        assert entry.size == 400 << 20
        assert {offset: data.rstrip(b"\0") for offset, data in pieces.items() if data} == {
            index << 20: b"%d" % index for index in range(300)
        }


# -- borders


def test_empty_archive():
    assert unpacked(END) == {}
    assert unpacked(bytes(10240)) == {}


def test_every_shorter_archive_is_truncated():
    data = packed(member("a", b"x" * 700), member("b"))[: 512 + 1024 + 512 + 1024]
    assert list(unpacked(data)) == ["a", "b"]
    for length in range(len(data)):
        with pytest.raises(errors.Truncated):
            unpacked(data[:length])


def test_more_is_garbage():
    data = packed(member("a"))
    for extra in (b"x", bytes(512) + block()):
        with pytest.raises(errors.TrailingGarbage):
            unpacked(data + extra)
    assert list(unpacked(data + bytes(100_000))) == ["a"]


def test_limit():
    data = packed(member("a", b"x" * 1000), member("b", b"x" * 1000))
    assert len(unpacked(data, limit=2000)) == 2
    with pytest.raises(errors.TooLarge):
        unpacked(data, limit=1999)


# -- what a rule forbids

RULES = {
    "absolute": "absolute",
    "dotdot": "dotdot",
    "dotdot-deep": "dotdot",
    "symlink-out": "link",
    "symlink-absolute": "link",
    "hardlink-out": "dotdot",
    "hardlink-absolute": "absolute",
    "character-device": "type",
    "block-device": "type",
    "fifo": "type",
}
OTHERS = {
    "huge-sparse": errors.TooLarge,
    "promised": errors.Truncated,
    "truncated": errors.Truncated,
    "garbage": errors.Corrupt,
}


@pytest.mark.parametrize("name", RULES)
def test_hostile_archive_is_refused(disks, name):
    data = hostile_archives.archive(disks, name).read_bytes()
    with pytest.raises(errors.Refused) as caught:
        unpacked(data)
    assert caught.value.fields["rule"] == RULES[name]


@pytest.mark.parametrize("name", OTHERS)
def test_broken_archive(disks, name):
    with pytest.raises(OTHERS[name]):
        unpacked(hostile_archives.archive(disks, name).read_bytes(), limit=2 << 30)


@pytest.mark.parametrize(
    ("place", "target"),
    [
        ("l", ".."),
        ("a/l", "../.."),
        ("a/l", "../../b"),
        ("l", "a/../b"),
        ("a/l", "./../b/.."),
        ("l", "/"),
        ("l", "//b"),
        ("l", "a" * 4096),
    ],
)
def test_symlink_that_may_lead_outside(place, target):
    with pytest.raises(errors.Refused, match="link"):
        unpacked(packed(member(place, type=tarfile.SYMTYPE, linkname=target)))


@pytest.mark.parametrize(
    ("place", "target"),
    [("l", "."), ("l", "a/b"), ("a/l", ".."), ("a/b/l", "../../c"), ("a/l", "./../b/./c")],
)
def test_symlink_that_stays_inside(place, target):
    assert unpacked(packed(member(place, type=tarfile.SYMTYPE, linkname=target)))[place][0].link == target


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "a/..", "n" * 256, "d/" * 2100 + "n"])
def test_names_that_are_refused(name):
    with pytest.raises(errors.Refused):
        unpacked(packed(member(name, b"x")))


@pytest.mark.parametrize("kind", [b"3", b"4", b"6", b"M", b"D", b"N", b"A", b"\xff"])
def test_other_types_are_refused(kind):
    with pytest.raises(errors.Refused, match="type"):
        unpacked(resummed(block(), 156, kind) + END)


def test_label_is_passed_over():
    assert list(unpacked(resummed(block(), 156, b"V") + packed(member("a")))) == ["a"]


@pytest.mark.parametrize(
    "data",
    [
        b"x" * 512 + END,
        resummed(block(), 124, b"-1234567890\0") + END,
        resummed(block(), 124, b"\xff" * 12) + END,
        resummed(block(), 124, b"\x80" + b"\xff" * 11) + END,
        resummed(block(size=512), 156, b"5") + bytes(512) + END,
        block() + bytes(512) + block() + END,
        resummed(block(size=5), 156, b"L") + b"name".ljust(512, b"\0") + END,
        (resummed(block(size=5), 156, b"L") + b"name".ljust(512, b"\0")) * 2 + block() + END,
    ],
)
def test_malformed(data):
    with pytest.raises(errors.Corrupt):
        unpacked(data)


def test_header_bombs():
    for kind in b"LKxg":
        data = resummed(block(size=1 << 40), 156, bytes([kind]))
        with pytest.raises(errors.Refused, match="header"):
            unpacked(data + END)


def pax(records, kind=b"x", then=None):
    body = b"".join(records)
    header = resummed(block(size=len(body)), 156, kind) + body + bytes(-len(body) % 512)
    return header + (then or block()) + END


def record(key, value):
    length = len(key) + len(value) + 3
    total = length + len(str(length))
    total = length + len(str(total))
    return b"%d %s=%s\n" % (total, key, value)


@pytest.mark.parametrize(
    "records",
    [
        [b"x"],
        [b"5 a=\n", b"5 a=\n"],
        [b"999 path=a\n"],
        [b"6 path=a\n"],
        [b"7 path\n"],
        [b"0 path=a\n"],
        [record(b"path", b"a\0b")],
        [record(b"size", b"-1")],
        [record(b"size", b"\xd9\xa1")],
        [record(b"size", b"9" * 19)],
        [record(b"GNU.sparse.major", b"1"), record(b"GNU.sparse.minor", b"0")],
    ],
)
def test_malformed_extended_header(records):
    with pytest.raises(errors.Corrupt):
        unpacked(pax(records))


@pytest.mark.parametrize("key", [b"path", b"linkpath", b"size", b"GNU.sparse.name"])
def test_global_header_about_an_entry(key):
    with pytest.raises(errors.Refused, match="header"):
        unpacked(pax([record(key, b"a")], b"g"))


def test_global_header_about_nothing():
    assert list(unpacked(pax([record(b"comment", b"a" * 40)], b"g"))) == ["name"]


def test_old_kinds_of_sparse_maps():
    with pytest.raises(errors.Refused, match="sparse"):
        unpacked(pax([record(b"GNU.sparse.map", b"0,5"), record(b"GNU.sparse.size", b"5")]))


def gnu_sparse(runs, size, stored):
    slots = b"".join(b"%011o\0%011o\0" % run for run in runs).ljust(96, b"\0")
    header = resummed(block(size=stored), 156, b"S")
    return resummed(header, 386, slots + b"\0" + b"%011o\0" % size) + bytes(stored + -stored % 512) + END


def pax_sparse(text, size, stored):
    records = [record(b"GNU.sparse.major", b"1"), record(b"GNU.sparse.minor", b"0")]
    records += [record(b"GNU.sparse.name", b"s"), record(b"GNU.sparse.realsize", b"%d" % size)]
    data = text + bytes(-len(text) % 512) + bytes(stored)
    return pax(records, then=block(size=len(data)) + data + bytes(-len(data) % 512))


@pytest.mark.parametrize(
    ("runs", "size"),
    [
        ([(0, 10), (5, 10)], 100),
        ([(50, 10), (0, 10)], 100),
        ([(0, 10), (95, 10)], 100),
        ([(0, 10)], 100),
        ([(0, 30)], 100),
        ([(0, 7 << 30)], 100),
    ],
)
def test_sparse_map_that_contradicts(runs, size):
    with pytest.raises(errors.Corrupt):
        unpacked(gnu_sparse(runs, size, 20))
    text = b"%d\n" % len(runs) + b"".join(b"%d\n%d\n" % run for run in runs)
    with pytest.raises(errors.Corrupt):
        unpacked(pax_sparse(text, size, 20))


@pytest.mark.parametrize(
    "text", [b"", b"x\n", b"1\n2", b"2\n0\n10\n", b"-1\n", b"1" * 600 + b"\n", b"1\n0\n" + b"9" * 30]
)
def test_malformed_pax_map(text):
    with pytest.raises(errors.Corrupt):
        unpacked(pax_sparse(text, 100, 20))


def test_a_pax_map_of_one_endless_line_ends():
    """It is not gathered: 64 MiB of it would take minutes, and a stream has no end."""
    started = time.monotonic()
    with pytest.raises(errors.Corrupt):
        unpacked(pax_sparse(b"1" * (64 << 20), 100, 20), 1 << 20)
    assert time.monotonic() - started < 20


def test_good_maps_of_both_kinds():
    runs = [(0, 10), (50, 10), (100, 0)]
    found = unpacked(gnu_sparse(runs, 100, 20))["name"]
    assert (found[0].size, found[1]) == (100, {0: bytes(10), 50: bytes(10), 100: b""})
    text = b"3\n0\n10\n50\n10\n100\n0\n"
    assert unpacked(pax_sparse(text, 100, 20))["s"] == (
        found[0].__class__(("s",), "file", 0o644, 0, 100, "", found[0].map),
        found[1],
    )


def test_too_many_runs():
    with pytest.raises(errors.Refused, match="runs"):
        unpacked(pax_sparse(b"%d\n" % (tar_sparse.MAX_RUNS + 1), 100, 20))


@hypothesis.given(data=st.data())
@hypothesis.settings(
    deadline=None, max_examples=300, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
def test_mutations_give_errors_of_ours_only(disks, data):
    good = gnu_sparse([(0, 10), (50, 10)], 100, 20)[:-1024] + pax_sparse(b"1\n5\n20\n", 100, 20)[:-1024]
    bad = bytearray(good + packed(member("a" * 200, NOISE[:600]), dialect=tarfile.PAX_FORMAT))
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, len(bad) - 1))
        value = data.draw(st.binary(min_size=1, max_size=9))
        bad[at : at + len(value)] = value
        start = at // 512 * 512
        if data.draw(st.booleans()) and len(bad) >= start + 512:
            header = bytes(bad[start : start + 512])
            with contextlib.suppress(struct.error):
                bad[start : start + 512] = resummed(header, 0, header[:1])
    started = time.monotonic()
    with contextlib.suppress(errors.Error):
        unpacked(bytes(bad))
    assert time.monotonic() - started < 30


@hypothesis.given(st.binary(min_size=1, max_size=12))
def test_numbers(field):
    with contextlib.suppress(errors.Corrupt):
        assert isinstance(tar.number(field), int)
