"""Sparse files in archives: valid and contradictory maps."""

from __future__ import annotations

import itertools
import time

import pytest

from cdi_worker import errors
from cdi_worker.formats.tar import sparse
from tests.support import pairs, processes, tar_parts

DIALECTS = tar_parts.DIALECTS


@pytest.mark.parametrize("dialect", DIALECTS)
def test_sparse_file_with_many_extents_is_read(tmp_path, dialect):
    with (tmp_path / "sparse").open("wb") as file:
        for index in range(300):
            file.seek(index << 20)
            file.write(b"%d" % index)
        file.truncate(400 << 20)
    path = tmp_path / "archive.tar"
    folder = f"--directory={tmp_path}"
    processes.run("tar", "-c", "--sparse", *DIALECTS[dialect], f"--file={path}", folder, "sparse")
    for step in (100, 1 << 20):
        entry, pieces = tar_parts.unpacked(path.read_bytes(), step)["sparse"]
        assert entry.size == 400 << 20
        assert {offset: data.rstrip(b"\0") for offset, data in pieces.items() if data} == {
            index << 20: b"%d" % index for index in range(300)
        }


@pytest.mark.parametrize(("dialect", "size"), pairs.dealt(DIALECTS, [0, 1, 70_000, 5 << 30]))
def test_file_that_is_all_hole_is_read(tmp_path, dialect, size):
    name = "n" * 150
    with (tmp_path / name).open("wb") as file:
        file.truncate(size)
    path = tmp_path / "archive.tar"
    folder = f"--directory={tmp_path}"
    processes.run("tar", "-c", "--sparse", *DIALECTS[dialect], f"--file={path}", folder, name)
    entry, pieces = tar_parts.unpacked(path.read_bytes(), limit=5 << 30)[name]
    assert entry.size == size
    assert not b"".join(pieces.values()).strip(b"\0")


def sparse_0(version, *extents, size=100, stored=20, count=None):
    """Return an archive with a sparse file in pax format 0.0 or 0.1; ``version`` is 0 or 1."""
    records = [tar_parts.record(b"GNU.sparse.size", b"%d" % size)]
    records += [tar_parts.record(b"GNU.sparse.numblocks", b"%d" % (len(extents) if count is None else count))]
    if version:
        text = b",".join(b"%d,%d" % extent for extent in extents)
        records.append(tar_parts.record(b"GNU.sparse.map", text))
    else:
        for offset, length in extents:
            records.append(tar_parts.record(b"GNU.sparse.offset", b"%d" % offset))
            records.append(tar_parts.record(b"GNU.sparse.numbytes", b"%d" % length))
    data = tar_parts.block(size=stored) + bytes(stored + -stored % 512)
    return tar_parts.pax(records, then=data)


@pytest.mark.parametrize("version", [0, 1])
def test_map_in_an_extended_header_is_read(version):
    entry, pieces = tar_parts.unpacked(sparse_0(version, (0, 10), (50, 10)))["name"]
    assert (entry.size, pieces) == (100, {0: bytes(10), 50: bytes(10)})
    for bad in (sparse_0(version, (0, 20), count=2), sparse_0(version, (0, 10)), sparse_0(version, (95, 20))):
        with pytest.raises(errors.Corrupt):
            tar_parts.unpacked(bad)


@pytest.mark.parametrize(
    "records",
    [
        [(b"map", b"0"), (b"numblocks", b"0")],
        [(b"map", b"0,"), (b"numblocks", b"1")],
        [(b"map", b"0,-1"), (b"numblocks", b"1")],
        [(b"map", b"0,20,"), (b"numblocks", b"1")],
        [(b"map", b"0,20")],
        [(b"numbytes", b"20"), (b"offset", b"0"), (b"numblocks", b"1")],
        [(b"offset", b"0"), (b"offset", b"20"), (b"numblocks", b"1")],
        [(b"offset", b"0"), (b"numblocks", b"1")],
        [(b"offset", b"9" * 25), (b"numbytes", b"20"), (b"numblocks", b"1")],
        # Numbers for Python, but not in a map.
        [(b"map", b"0, 20"), (b"numblocks", b"1")],
        [(b"map", b"0,2_0"), (b"numblocks", b"1")],
        [(b"map", b"0,+20"), (b"numblocks", b"1")],
        [],
    ],
)
def test_malformed_map_in_an_extended_header_is_corrupt(records):
    def archive(*records):
        parts = [tar_parts.record(b"GNU.sparse." + key, value) for key, value in ((b"size", b"20"), *records)]
        return tar_parts.pax(parts, then=tar_parts.block(size=20) + bytes(512))

    assert tar_parts.unpacked(archive((b"map", b"0,20"), (b"numblocks", b"1")))
    with pytest.raises(errors.Corrupt):
        tar_parts.unpacked(archive(*records))


def test_unknown_pax_sparse_format_is_refused():
    records = [tar_parts.record(b"GNU.sparse.major", b"2"), tar_parts.record(b"GNU.sparse.size", b"5")]
    with pytest.raises(errors.Refused, match="sparse"):
        tar_parts.unpacked(tar_parts.pax(records))


@pytest.mark.parametrize(
    ("extents", "size"),
    [
        ([(0, 10), (5, 10)], 100),
        ([(50, 10), (0, 10)], 100),
        ([(0, 10), (95, 10)], 100),
        ([(0, 10)], 100),
        ([(0, 30)], 100),
        ([(0, 7 << 30)], 100),
    ],
)
def test_contradictory_sparse_map_is_corrupt(extents, size):
    with pytest.raises(errors.Corrupt):
        tar_parts.unpacked(tar_parts.gnu_sparse(extents, size, 20))
    text = b"%d\n" % len(extents) + b"".join(b"%d\n%d\n" % extent for extent in extents)
    with pytest.raises(errors.Corrupt):
        tar_parts.unpacked(tar_parts.pax_sparse(text, size, 20))


@pytest.mark.parametrize(
    "text", [b"", b"x\n", b"1\n2", b"2\n0\n10\n", b"-1\n", b"1" * 600 + b"\n", b"1\n0\n" + b"9" * 30]
)
def test_malformed_pax_map_is_corrupt(text):
    with pytest.raises(errors.Corrupt):
        tar_parts.unpacked(tar_parts.pax_sparse(text, 100, 20))


def test_endless_line_in_pax_map_is_corrupt():
    """The line is not collected: of these 16 MiB that would take minutes, and a stream may be endless."""
    started = time.process_time()
    with pytest.raises(errors.Corrupt):
        tar_parts.unpacked(tar_parts.pax_sparse(b"1" * (16 << 20), 100, 20), 1 << 20)
    assert time.process_time() - started < 20


def test_gnu_and_pax_maps_are_read():
    extents = [(0, 10), (50, 10), (100, 0)]
    found = tar_parts.unpacked(tar_parts.gnu_sparse(extents, 100, 20))["name"]
    assert (found[0].size, found[1]) == (100, {0: bytes(10), 50: bytes(10), 100: b""})
    text = b"3\n0\n10\n50\n10\n100\n0\n"
    assert tar_parts.unpacked(tar_parts.pax_sparse(text, 100, 20))["s"] == (
        found[0].__class__(("s",), "file", 0o644, 0, 100, found[0].map),
        found[1],
    )


def test_too_many_extents_are_refused():
    with pytest.raises(errors.Refused, match="extents"):
        tar_parts.unpacked(tar_parts.pax_sparse(b"%d\n" % (sparse.MAX_EXTENTS + 1), 100, 20))


def test_endless_map_without_extents_is_refused():
    header = tar_parts.resummed(tar_parts.block(), 482, b"\1")
    blocks = itertools.repeat(bytes(504) + b"\1" + bytes(7), 1 << 20)
    with pytest.raises(errors.Refused, match="extents"):
        sparse.gnu(header, lambda _: next(blocks))
