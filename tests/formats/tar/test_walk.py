"""Walk through a tar archive: the entries that tarfile reads, and no false end."""

from __future__ import annotations

import io
import pathlib
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdi_worker import errors
from cdi_worker.formats import readers
from cdi_worker.formats.tar import headers, sparse
from cdi_worker.formats.tar import walk as tar_walk
from tests.support import containers, tar_parts
from tests.support import disks as disks_module
from tests.support.containers import Entry


def walk(data: bytes) -> list[tuple[str, bytes, str, bytes]]:
    walker = tar_walk.Walk(readers.BytesReader(data))
    found = []
    while entry := walker.next():
        content = bytearray(entry.size)
        done = 0
        while done < entry.size and (count := walker.readinto(memoryview(content)[done:])):
            done += count
        found.append((entry.name, entry.type, entry.link, bytes(content)))
    walker.drain()
    return found


NAMES = st.text(
    st.characters(blacklist_categories=("Cs",), blacklist_characters="\0\n"), min_size=1, max_size=300
)
ENTRIES = st.builds(
    Entry,
    NAMES.map(lambda name: name.strip("/") or "x"),
    st.binary(max_size=2000),
    st.sampled_from([tarfile.REGTYPE, tarfile.AREGTYPE]),
) | st.builds(
    lambda name, kind, link: Entry(name.strip("/") or "x", b"", kind, link),
    NAMES,
    st.sampled_from([tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE]),
    NAMES,
)


@given(st.lists(ENTRIES, max_size=6), st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
@settings(deadline=None)
def test_walk_yields_the_entries_of_tarfile(entries: list[Entry], form: int) -> None:
    data = containers.tar(entries, form)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        expected = [
            (
                member.name,
                headers.FILE if member.isreg() else member.type,
                member.linkname if member.issym() or member.islnk() else "",
                archive.extractfile(member).read() if member.isreg() else b"",
            )
            for member in archive
        ]
    entries_found = [
        (name.rstrip("/"), kind, link if kind in {headers.SYMLINK, headers.HARD_LINK} else "", content)
        for name, kind, link, content in walk(data)
    ]
    assert entries_found == [(name.rstrip("/"), *rest) for name, *rest in expected]


def test_sparse_files_are_marked(disks: disks_module.Disks) -> None:
    """Sparse files with GNU tar's own maps, in the header and after it, and with pax maps."""
    found = {name: kind for name, kind, *_ in walk(disks.tar().read_bytes())}
    assert found["./sparse"] == headers.SPARSE
    assert found["./deep/text"] in {headers.FILE, headers.HARD_LINK}


def test_continued_sparse_map_is_skipped() -> None:
    header = bytearray(tarfile.TarInfo("a").tobuf(tarfile.GNU_FORMAT))
    header[156:157] = headers.SPARSE
    header[482] = 1
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    more = bytes(504) + b"\1" + bytes(7)
    data = bytes(header) + more + bytes(512) + containers.tar([Entry("b")])
    assert [name for name, *_ in walk(data)] == ["a", "b"]


class Endless:
    """A header, then the same block without end."""

    def __init__(self, header: bytes, block: bytes) -> None:
        self.count = 0
        self._data = header
        self._block = block

    def readinto(self, into: memoryview, /) -> int:
        data = (self._data or self._block * 512)[: len(into)]
        into[: len(data)] = data
        self._data = self._data[len(data) :]
        self.count += len(data)
        assert self.count < 1 << 30, "the map was read without end"
        return len(data)

    def close(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize("slot", [b"", b"%011o\0%011o\0" % (0, 0)])
def test_endless_sparse_map_is_refused(monkeypatch: pytest.MonkeyPatch, slot: bytes) -> None:
    monkeypatch.setattr(sparse, "MAX_EXTENTS", 50_000)
    header = tar_parts.resummed(tar_parts.resummed(tar_parts.block(), 156, headers.SPARSE), 482, b"\1")
    endless = Endless(header, (slot * 21).ljust(504, b"\0") + b"\1" + bytes(7))
    with pytest.raises(errors.Refused, match="more than 50000 extents"):
        tar_walk.Walk(endless).next()


@pytest.mark.parametrize("end", [b"", bytes(512), bytes(1024), bytes(1024) + b"what follows"])
def test_archive_may_end_without_zero_blocks(end: bytes) -> None:
    data = containers.tar([Entry("a", b"1")])[:1024]
    assert [name for name, *_ in walk(data + end)] == ["a"]


@pytest.mark.parametrize("cut", [1, 100, 511, 513, 1023])
def test_cut_archive_is_truncated(cut: int) -> None:
    with pytest.raises(errors.Truncated):
        walk(containers.tar([Entry("a", b"1")])[:cut])


@pytest.mark.parametrize("size", [b"x", b"-1", b"", b"9" * 20, b"9223372036854775808"])
def test_malformed_size_is_corrupt(size: bytes) -> None:
    info = tarfile.TarInfo("a")
    info.pax_headers = {"size": size.decode()}
    with pytest.raises(errors.Corrupt):
        walk(info.tobuf(tarfile.PAX_FORMAT) + bytes(1024))


def test_global_headers_are_ignored() -> None:
    """As in Go; Python's tarfile gives the name to every entry."""
    out = io.BytesIO()
    with tarfile.open(
        fileobj=out, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"path": "disk/x"}
    ) as archive:
        archive.addfile(tarfile.TarInfo("a"))
    assert [name for name, *_ in walk(out.getvalue())] == ["a"]


@pytest.mark.slow
def test_endless_extension_headers_are_refused() -> None:
    empty = tar_parts.resummed(tar_parts.block(), 156, headers.GLOBAL)
    with pytest.raises(errors.Refused, match="extension headers of more than"):
        tar_walk.Walk(Endless(b"", empty)).next()


@pytest.mark.parametrize("end", [b"", bytes(1024)])
def test_end_after_a_long_name_is_corrupt(end: bytes) -> None:
    name = tar_parts.resummed(tar_parts.block(size=5), 156, headers.LONG_NAME) + b"name".ljust(512, b"\0")
    with pytest.raises(errors.Corrupt, match="ends between the headers"):
        walk(name + end)


@pytest.mark.parametrize("seekable", [True, False])
def test_cut_data_has_no_end(tmp_path: pathlib.Path, seekable: bool) -> None:
    """A caller that reads one entry, and nothing after it, must not take the cut for its end."""
    path = tmp_path / "cut.tar"
    path.write_bytes(containers.tar([Entry("disk.img", b"data")])[:514])
    with path.open("rb") as file:
        walker = tar_walk.Walk(file if seekable else readers.BytesReader(path.read_bytes()))
        assert walker.next()
        into = memoryview(bytearray(4))
        assert walker.readinto(into) == 2
        with pytest.raises(errors.Truncated):
            walker.readinto(into[2:])


def test_long_number_is_quoted_in_part() -> None:
    """A header has up to 16 MiB: masking a message with all of it took ten seconds."""
    data = tar_parts.pax([tar_parts.record(b"size", b"\xff" * 100_000)])
    with pytest.raises(errors.Corrupt, match="expected a number") as caught:
        tar_walk.Walk(readers.BytesReader(data)).next()
    assert len(str(caught.value)) < 200
