"""The disk in a layer: what counts as one, what hides it, and hostile tars."""

from __future__ import annotations

import contextlib
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdi_worker import errors
from cdi_worker.formats.tar import walk
from cdi_worker.sources.registry import layer
from tests.support import containers, members, processes, reading, tar_parts
from tests.support.containers import Entry

DATA = bytes(range(256)) * 400
DIRECTORY, LINK, HARD_LINK = tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE


def opened(data: bytes, hidden: layer.Hidden | None = None, step: int = 10_000) -> layer.Layer:
    plain = layer.plain(reading.ShortReads(data, step), data)
    return layer.Layer(plain, hidden or layer.Hidden(), "layer")


def read_all(data: bytes) -> None:
    """Read a layer as an import does."""
    found = opened(data)
    if found.find():
        reading.read_all(found)
        found.finish()


def read_without_disk(*entries: Entry, hidden: layer.Hidden | None = None) -> layer.Hidden:
    """Read a layer that must have no disk; return what it hides."""
    found = opened(containers.tar(entries), hidden)
    assert not found.find()
    return found.hides()


@pytest.mark.parametrize(
    ("compression", "step"), [("", 1), ("", 512), ("+gzip", 511), ("+zstd", 511), ("+zstd", 1 << 20)]
)
def test_disk_is_found(compression: str, step: int) -> None:
    blob = containers.layer(
        Entry("etc/", kind=DIRECTORY),
        Entry("etc/a", b"x" * 3000),
        *containers.disk(DATA),
        compression=compression,
    )
    found = opened(blob.data, step=step)
    assert found.find()
    assert (found.path, found.size) == ("/disk/disk.img", len(DATA))
    assert reading.read_all(found) == DATA
    found.finish()


@pytest.mark.parametrize(("kind", "extra"), [("zst", members.skippable(99)), ("gz", members.END)])
def test_layer_of_many_members_is_one(kind: str, extra: bytes) -> None:
    """Bytes after the last member, and a cut one, are refused."""
    parts = members.split(kind, containers.tar([*containers.disk(DATA), Entry("etc/a", DATA)]), 20_000)
    parts.insert(len(parts) // 2, extra)
    packed = b"".join(parts)
    found = opened(packed, step=1 << 20)
    assert found.find()
    assert reading.read_all(found) == DATA
    found.finish()
    for damaged in (packed + b"junk", packed[:-1]):
        with pytest.raises(errors.ImageError):
            read_all(damaged)


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, walk.BUFFER, walk.BUFFER + 1])
def test_disk_of_any_size_is_read(size: int) -> None:
    found = opened(containers.tar(containers.disk(b"x" * size)))
    assert found.find()
    assert reading.read_all(found, 1 << 20) == b"x" * size
    found.finish()


@pytest.mark.parametrize("name", ["disk/a", "./disk/a", "/disk/a", "disk//a", "disk/./a", "x/../disk/a"])
def test_disk_of_any_name_is_found(name: str) -> None:
    found = opened(containers.tar([Entry(name, b"1")]))
    assert found.find()
    assert found.path == "/disk/a"


@pytest.mark.parametrize(
    "entry",
    [Entry("disks/a", b"1"), Entry("a/disk/b", b"1"), Entry("disk/", kind=DIRECTORY), Entry("a", b"1")],
)
def test_file_elsewhere_is_not_a_disk(entry: Entry) -> None:
    assert read_without_disk(entry) == layer.Hidden()


@pytest.mark.parametrize(
    ("entries", "rule", "named"),
    [
        ([Entry("disk/a", kind=LINK, link="/etc/shadow")], "link", "/disk/a"),
        ([Entry("x", b"1"), Entry("disk/a", kind=HARD_LINK, link="x")], "link", "/disk/a"),
        ([Entry("disk", kind=LINK, link="etc")], "link", "/disk is"),
        ([Entry("disk/sub/", kind=DIRECTORY)], "directory", "/disk/sub"),
        ([Entry("disk/sub/a", b"1")], "directory", "/disk/sub/a"),
        ([Entry("disk", b"1")], "directory", "/disk"),
        ([Entry("disk/a", kind=tarfile.FIFOTYPE)], "file type", "/disk/a"),
        ([Entry("disk/a", kind=tarfile.CHRTYPE)], "file type", "/disk/a"),
    ],
)
def test_invalid_disk_is_refused(entries: list[Entry], rule: str, named: str) -> None:
    with pytest.raises(errors.Refused, match=rule) as caught:
        opened(containers.tar(entries)).find()
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "rest", [[Entry("disk/b", b"2")], [Entry("x", DATA), Entry("disk/b", b"2"), Entry("y")]]
)
def test_second_file_in_the_layer_is_refused(rest: list[Entry]) -> None:
    found = opened(containers.tar([Entry("disk/a", DATA), *rest]))
    assert found.find()
    assert reading.read_all(found) == DATA
    with pytest.raises(errors.Refused, match="two files in /disk, expected one: /disk/a, /disk/b"):
        found.finish()


@pytest.mark.parametrize(
    "late",
    [Entry("disk/sub/", kind=DIRECTORY), Entry("disk/b", kind=LINK, link="a"), Entry("disk/a", b"other")],
)
def test_invalid_entry_after_the_disk_is_refused(late: Entry) -> None:
    found = opened(containers.tar([Entry("disk/a", DATA), late]))
    assert found.find()
    with pytest.raises(errors.Refused):
        found.finish()


def test_whiteout_hides_lower_layers() -> None:
    hidden = read_without_disk(Entry("disk/.wh.a"), Entry("disk/.wh.b"), Entry("disk/.wh..wh.plnk"))
    assert hidden.names >= {"a", "b"}
    assert not hidden.everything
    assert read_without_disk(
        Entry("disk/a", b"1"), Entry("disk/b/", kind=DIRECTORY), Entry("disk/b/c", b"1"), hidden=hidden
    )
    found = opened(containers.tar([Entry("disk/a", b"1"), Entry("disk/c", b"2")]), hidden)
    assert found.find()
    assert found.path == "/disk/c"
    found.finish()


@pytest.mark.parametrize("name", [".wh..wh..opq", ".wh.disk", "disk/.wh..wh..opq"])
def test_whiteout_of_the_folder_hides_everything(name: str) -> None:
    assert read_without_disk(Entry(name)).everything


def test_opaque_layer_keeps_its_own_file() -> None:
    found = opened(containers.tar([Entry("disk/.wh..wh..opq"), *containers.disk(DATA)]))
    assert found.find()
    found.finish()


def test_file_with_its_own_whiteout_is_refused() -> None:
    found = opened(containers.tar([Entry("disk/a", DATA), Entry("disk/.wh.a")]))
    assert found.find()
    with pytest.raises(errors.Refused, match="both added and removed"):
        found.finish()


# -- broken and hostile tars ----------------------------------------------------------------------


@pytest.mark.parametrize("cut", [100, 600, 1024, 1500, 1024 + len(DATA) // 2])
def test_truncated_layer_is_refused(cut: int) -> None:
    """A tar cut between two entries is valid: only the digest shows the cut."""
    with pytest.raises(errors.Corrupt):
        read_all(containers.tar(containers.disk(DATA))[:cut])


def test_memory_of_names_is_bounded() -> None:
    """A megabyte of names costs a hostile layer next to nothing, and /disk must not have many files."""
    many = [Entry(f"disk/{number}", b"1") for number in range(50)]
    found = opened(containers.tar(many))
    assert found.find()
    with pytest.raises(errors.Refused, match="two files in /disk, expected one: /disk/0, /disk/1"):
        found.finish()
    with pytest.raises(errors.Refused, match="name") as caught:
        opened(containers.tar([Entry("disk/" + "n" * 100_000, b"1")])).find()
    assert len(str(caught.value)) < 300
    with pytest.raises(errors.Refused, match="whiteout"):
        opened(containers.tar([Entry("disk/.wh." + "n" * 100_000)])).find()
    with pytest.raises(errors.Refused, match="whiteout"):
        opened(containers.tar([Entry(f"disk/.wh.{number}") for number in range(1001)])).find()
    hidden = layer.Hidden(frozenset(str(number) for number in range(990)))
    with pytest.raises(errors.Refused, match="whiteout"):
        opened(containers.tar([Entry(f"disk/.wh.x{number}") for number in range(20)]), hidden).find()


def test_chain_of_long_names_is_refused() -> None:
    block = bytearray(containers.tar([Entry("x" * 120)], tarfile.GNU_FORMAT)[:1024])
    with pytest.raises((errors.Refused, errors.Corrupt)):
        opened(bytes(block) * 3000).find()


def sparse_disk(folder: Path, extents: int) -> bytes:
    """Write a sparse disk, and a sparse file before it; return its content."""
    for name, size in (("etc/log", 3 << 20), ("disk/disk.img", 9 << 20)):
        (folder / name).parent.mkdir(exist_ok=True)
        with (folder / name).open("wb") as file:
            for number in range(extents):
                file.seek((size // extents * number) // 4096 * 4096 + 4096)
                file.write(b"%d" % number)
            file.truncate(size)
    return (folder / "disk/disk.img").read_bytes()


@pytest.mark.parametrize(
    ("dialect", "compression", "extents", "step"),
    [
        ("gnu", "", 100, 1000),
        ("gnu", "+gzip", 1, 1 << 20),
        ("0.0", "+zstd", 4, 1000),
        ("0.0", "", 0, 1 << 20),
        ("0.1", "+gzip", 0, 1000),
        ("0.1", "+zstd", 100, 1 << 20),
        ("1.0", "", 4, 1000),
        ("1.0", "+gzip", 100, 1 << 20),
        ("1.0", "+zstd", 1, 1000),
    ],
)
def test_sparse_disk_is_read(tmp_path: Path, dialect: str, compression: str, extents: int, step: int) -> None:
    """With holes at its beginning and its end."""
    expected = sparse_disk(tmp_path, extents)
    data = containers.COMPRESS[compression](tar_parts.sparse(tmp_path, dialect, "etc", "disk"))
    found = opened(data, step=step)
    assert found.find()
    assert (found.path, found.size) == ("/disk/disk.img", len(expected))
    assert reading.read_all(found, step) == expected
    found.finish()


@pytest.mark.parametrize("dialect", tar_parts.DIALECTS)
def test_damaged_sparse_disk_is_an_error(tmp_path: Path, dialect: str) -> None:
    sparse_disk(tmp_path, 100)
    data = tar_parts.sparse(tmp_path, dialect, "disk")
    for length in (1500, 3000, 10_000, len(data) // 2):
        with pytest.raises((errors.Truncated, errors.Corrupt)):
            read_all(data[:length])
    (tmp_path / "disk/other").write_bytes((tmp_path / "disk/disk.img").read_bytes())
    processes.run("fallocate", "--dig-holes", tmp_path / "disk/other")
    with pytest.raises(errors.Refused, match="two files in /disk"):
        read_all(tar_parts.sparse(tmp_path, dialect, "disk"))


@settings(max_examples=200)
@given(st.binary(max_size=3000), st.integers(0, 2000))
def test_noise_in_a_tar_raises_only_our_errors(noise: bytes, at: int) -> None:
    data = bytearray(containers.tar([Entry("a", b"1" * 700), *containers.disk(DATA[:5000])]))
    data[at : at + len(noise)] = noise
    with contextlib.suppress(errors.Error):
        read_all(bytes(data))
