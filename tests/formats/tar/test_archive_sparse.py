"""Sparse files in archives: valid and contradictory maps."""

from __future__ import annotations

import time

import pytest

from cdi_worker import errors
from cdi_worker.formats.tar import sparse
from tests.support import processes, tar_parts


@pytest.mark.parametrize("dialect", ["gnu", "posix"])
def test_sparse_file_with_many_extents_is_read(tmp_path, dialect):
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
        entry, pieces = tar_parts.unpacked(path.read_bytes(), step)["sparse"]
        assert entry.size == 400 << 20
        assert {offset: data.rstrip(b"\0") for offset, data in pieces.items() if data} == {
            index << 20: b"%d" % index for index in range(300)
        }


def test_pax_sparse_format_0_is_refused():
    with pytest.raises(errors.Refused, match="sparse"):
        tar_parts.unpacked(
            tar_parts.pax(
                [tar_parts.record(b"GNU.sparse.map", b"0,5"), tar_parts.record(b"GNU.sparse.size", b"5")]
            )
        )


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
    """The line is not collected: 64 MiB of it would take minutes, and a stream may be endless."""
    started = time.monotonic()
    with pytest.raises(errors.Corrupt):
        tar_parts.unpacked(tar_parts.pax_sparse(b"1" * (64 << 20), 100, 20), 1 << 20)
    assert time.monotonic() - started < 20


def test_gnu_and_pax_maps_are_read():
    extents = [(0, 10), (50, 10), (100, 0)]
    found = tar_parts.unpacked(tar_parts.gnu_sparse(extents, 100, 20))["name"]
    assert (found[0].size, found[1]) == (100, {0: bytes(10), 50: bytes(10), 100: b""})
    text = b"3\n0\n10\n50\n10\n100\n0\n"
    assert tar_parts.unpacked(tar_parts.pax_sparse(text, 100, 20))["s"] == (
        found[0].__class__(("s",), "file", 0o644, 0, 100, "", found[0].map),
        found[1],
    )


def test_too_many_extents_are_refused():
    with pytest.raises(errors.Refused, match="extents"):
        tar_parts.unpacked(tar_parts.pax_sparse(b"%d\n" % (sparse.MAX_EXTENTS + 1), 100, 20))
