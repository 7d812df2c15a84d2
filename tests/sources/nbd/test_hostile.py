"""NBD servers that lie, stall, or break off."""

from __future__ import annotations

import errno
import itertools
import os
import socketserver
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nbd")

from cdi_worker import errors
from cdi_worker.images.engine import cancelling, fetch
from cdi_worker.importer import execute, request
from cdi_worker.importer.result import Result
from cdi_worker.sources import base, extents
from cdi_worker.sources.nbd import client, connection, handshake, locations, source
from tests.support import nbd_servers, oracle, processes

MIB = 1 << 20
#: A disk whose reply may last a quarter of a second (``connection.SLOWEST``).
SMALL = 16 << 10


def import_(disk: nbd_servers.Disk, directory: Path, patience: float = 180.0) -> Result:
    with nbd_servers.serve(directory / "socket", disk) as socket:
        access = base.Access(patience=patience)
        wanted = request.Request(
            source="nbd",
            location=locations.Nbd(f"nbd+unix:///?socket={socket}", access),
            target=str(directory / "disk.img"),
            connect_patience=1.0,
            fetch=fetch.FetchOptions(no_progress=min(patience, 5.0)),
        )
        return execute.run(wanted)


def listed(disk: nbd_servers.Disk, directory: Path) -> list[tuple[int, int, bool]]:
    with nbd_servers.serve(directory / "socket", disk) as socket:
        server = handshake.Server("disk", locations.Address(socket=socket))
        made = client.Client(server, cancelling.NEVER, client.Limits(patience=1.0))
        try:
            return [(each.offset, each.length, each.zero) for each in made.extents()]
        finally:
            made.close()


@pytest.mark.parametrize("size", [1 << 62, (1 << 63) - 1, (1 << 64) - 1])
def test_absurd_size_is_refused_before_anything_is_written(tmp_path: Path, size: int) -> None:
    with pytest.raises((errors.Refused, errors.Unreachable), match=r"virtual size is|impossible size"):
        import_(nbd_servers.Disk(sizes=(size,)), tmp_path)
    oracle.unusable(tmp_path / "disk.img")


def test_empty_export_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.Error, match=r"0 bytes|empty|too short|smaller"):
        import_(nbd_servers.Disk(sizes=(0,)), tmp_path)
    oracle.unusable(tmp_path / "disk.img")


def test_size_that_changes_with_a_new_connection_is_noticed(tmp_path: Path) -> None:
    disk = nbd_servers.Disk(sizes=(8 * MIB, 9 * MIB), cut=2)
    with pytest.raises(errors.SourceChanged, match=f"size was {8 * MIB}, now {9 * MIB}"):
        import_(disk, tmp_path)
    oracle.unusable(tmp_path / "disk.img")


def test_connections_that_break_within_replies(tmp_path: Path) -> None:
    disk = nbd_servers.Disk(sizes=(16 * MIB,), cut=3)
    assert import_(disk, tmp_path).size == 16 * MIB
    assert (tmp_path / "disk.img").read_bytes() == b"A" * 16 * MIB
    assert disk.connections > 1


def test_server_that_always_breaks_off_is_given_up(tmp_path: Path) -> None:
    with pytest.raises(errors.SourceError):
        import_(nbd_servers.Disk(cut=0), tmp_path, patience=1.0)
    oracle.unusable(tmp_path / "disk.img")


def test_silent_connection_is_replaced(tmp_path: Path) -> None:
    """Each brings some bytes before it falls silent for as long as the source may."""
    disk = nbd_servers.Disk(sizes=(8 * MIB,), silent=2)
    assert import_(disk, tmp_path, patience=1.0).size == 8 * MIB
    assert (tmp_path / "disk.img").read_bytes() == b"A" * 8 * MIB
    assert disk.connections > 1


@pytest.mark.parametrize("silent", [0, 1])
def test_server_that_falls_silent_is_given_up(tmp_path: Path, silent: int) -> None:
    began = time.monotonic()
    with pytest.raises(errors.SourceError, match="no answer within 1 s"):
        import_(nbd_servers.Disk(sizes=(8 * MIB,), silent=silent), tmp_path, patience=0.6)
    assert time.monotonic() - began < processes.PATIENCE
    oracle.unusable(tmp_path / "disk.img")


@pytest.mark.parametrize("after", [0, 2, 3])
def test_replies_that_are_not_nbd_fail_after_two_tries(tmp_path: Path, after: int) -> None:
    """The first read, the list of extents or a later read; they are no outage."""
    disk = nbd_servers.Disk(sizes=(8 * MIB,), malformed=after)
    began = time.monotonic()
    with pytest.raises(errors.SourceError, match=r"the reply is malformed \(invalid .*reply magic.*\)$"):
        import_(disk, tmp_path)
    assert time.monotonic() - began < 3
    assert disk.connections <= 4
    oracle.unusable(tmp_path / "disk.img")


def test_replies_with_missing_parts_are_not_data(tmp_path: Path) -> None:
    with pytest.raises(errors.SourceError, match="a part of it is missing"):
        import_(nbd_servers.Disk(part=2), tmp_path, patience=1.0)
    oracle.unusable(tmp_path / "disk.img")


def halves(*parts: tuple[int, bool]) -> nbd_servers.Disk:
    """Return a disk whose reads are answered with these halves, as data or a hole."""

    def chunks(length: int) -> list[nbd_servers.Chunk]:
        half = length // 2
        return [(number * half, half, is_data) for number, is_data in parts]

    return nbd_servers.Disk(sizes=(8 * MIB,), chunks=chunks)


def test_chunks_in_any_order_are_the_disk(tmp_path: Path) -> None:
    assert import_(halves((1, True), (0, True)), tmp_path).size == 8 * MIB
    assert (tmp_path / "disk.img").read_bytes() == b"A" * 8 * MIB


@pytest.mark.parametrize(("number", "second"), [(0, True), (0, False), (1, True), (1, False)])
def test_half_of_a_read_that_is_sent_twice_is_refused(tmp_path: Path, number: int, second: bool) -> None:
    """As many bytes as requested, but the other half of the buffer is memory of the process."""
    with pytest.raises(errors.SourceError, match=r"more than was requested|twice"):
        import_(halves((number, True), (number, second)), tmp_path, patience=1.0)
    oracle.unusable(tmp_path / "disk.img")


@pytest.mark.parametrize("overlap", [1, 512])
def test_chunks_that_overlap_are_refused(tmp_path: Path, overlap: int) -> None:
    def chunks(length: int) -> list[nbd_servers.Chunk]:
        half = length // 2
        return [(0, half, True), (half - overlap, half, True)]

    with pytest.raises(errors.SourceError, match=r"more than was requested|twice"):
        import_(nbd_servers.Disk(chunks=chunks), tmp_path, patience=1.0)
    oracle.unusable(tmp_path / "disk.img")


def listed_or_refused(disk: nbd_servers.Disk, folder: Path) -> list[tuple[int, int, bool]] | None:
    """Return the extents; None if the reply is refused."""
    try:
        return listed(disk, folder)
    except errors.SourceError:
        return None


@pytest.mark.parametrize("more", [[], [(0xFFFFFFFF, 3), (512, 0)]])
def test_extents_beyond_the_request_change_nothing(tmp_path: Path, more: nbd_servers.Extents) -> None:
    """Later versions of libnbd than 1.14 refuse such a reply."""

    def status(_offset: int, length: int) -> nbd_servers.Extents:
        return [(length // 2, 3), (0xFFFFFFFF, 0), *more]

    found = listed_or_refused(nbd_servers.Disk(sizes=(8 * MIB,), status=status), tmp_path)
    assert found in ([(0, 4 * MIB, True), (4 * MIB, 4 * MIB, False)], None)


@pytest.mark.parametrize("entries", [[], [(0, 0)]])
def test_extents_without_length_are_an_error(tmp_path: Path, entries: nbd_servers.Extents) -> None:
    disk = nbd_servers.Disk(status=lambda _offset, _length: entries)
    with pytest.raises(errors.SourceError):
        listed(disk, tmp_path)


def test_extent_without_length_among_others_hides_none(tmp_path: Path) -> None:
    """With libnbd 1.14 it is an error. Later versions leave it out."""
    entries = [(4096, 0), (0, 2), (4096, 0)]
    found = listed_or_refused(nbd_servers.Disk(status=lambda _offset, _length: entries), tmp_path)
    assert not any(hole for _, _, hole in found or [])


def test_more_extents_than_a_server_may_return_are_an_error(tmp_path: Path) -> None:
    many = [(512, 0), (512, 2)] * (connection.MOST_EXTENTS // 2 + 1)
    disk = nbd_servers.Disk(sizes=(1 << 40,), status=lambda _offset, _length: many)
    with pytest.raises(errors.SourceError, match="more than was requested"):
        listed(disk, tmp_path)


def test_endless_list_of_short_extents_ends(tmp_path: Path) -> None:
    """512 bytes for each request of an exabyte would take for ever; the rest counts as data."""

    def status(offset: int, _length: int) -> nbd_servers.Extents:
        return [(512, offset // 512 % 2 * 2)]

    disk = nbd_servers.Disk(sizes=(1 << 60,), status=status)
    found = listed(disk, tmp_path)
    assert disk.requests < client.MOST_REQUESTS + 10
    assert found[-1] == (found[-2][0] + 512, (1 << 60) - found[-2][0] - 512, False)


def test_changed_areas_beyond_memory_become_coarse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other sector has changed: each area of such a list was an object of 130 bytes.

    So many as fit in memory take 15 s of CPU to list.
    """
    most = extents.MOST >> 6
    monkeypatch.setattr(extents.Kept.__init__, "__defaults__", ((), most))
    size = (most + 100) * 1024
    alternating = [(512, 0), (512, 1)] * (connection.MOST_EXTENTS // 2)

    def dirty(_offset: int, length: int) -> nbd_servers.Extents:
        return alternating[: -(-length // 512)]

    disk = nbd_servers.Disk(sizes=(size,), dirty=dirty)
    with nbd_servers.serve(tmp_path / "socket", disk) as socket:
        url = f"nbd+unix:///?socket={socket}"
        location = locations.Nbd(url, previous=nbd_servers.BITMAP, current="now")
        with base.open_image(source.NbdSource(location, cancelling.Cancel())) as image:
            found = list(image.source.extents())
    assert [extent.offset for extent in found[1:]] == [extent.offset + extent.length for extent in found[:-1]]
    assert (found[0].offset, found[-1].offset + found[-1].length) == (512, size)
    assert len(found) < 10


@pytest.mark.parametrize(
    "what", ["empty", "faults", "errors", "data", "holes", "void", "status", "contexts", "exports"]
)
def test_endless_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """It arrives faster than it is read, so that no call of libnbd would ever return."""
    # It fills a core until it is noticed.
    monkeypatch.setattr(connection, "_NOTICE", 0.2)
    began = time.monotonic()
    with pytest.raises(errors.SourceError):
        import_(nbd_servers.Disk(sizes=(SMALL,), endless=what), tmp_path, patience=0.4)
    assert time.monotonic() - began < processes.PATIENCE
    oracle.unusable(tmp_path / "disk.img")


@pytest.mark.parametrize("what", ["empty", "faults", "errors", "void", "bytes"])
def test_answer_that_trickles_without_end_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Each of its chunks arrives in time, and together they bring too little. The first read is held, too."""
    monkeypatch.setattr(connection, "_NOTICE", 0.2)
    began = time.monotonic()
    with pytest.raises(errors.SourceError):
        import_(nbd_servers.Disk(sizes=(SMALL,), endless=what, pause=0.05), tmp_path, patience=0.4)
    assert time.monotonic() - began < processes.PATIENCE
    oracle.unusable(tmp_path / "disk.img")


# -- errors that are no answer -------------------------------------------------------------------


GIB = 1 << 30
HOLE = 3


def holes(refusing: Callable[[int], int], **more: Any) -> nbd_servers.Disk:
    """Return a disk of 64 GiB without data, which does not list its extents everywhere."""
    return nbd_servers.Disk(
        sizes=(64 * GIB,), status=lambda _offset, length: [(length, HOLE)], refusing=refusing, **more
    )


@pytest.mark.parametrize(("error", "tries"), [(errno.EIO, 3), (errno.EINVAL, 1)])
def test_part_whose_extents_are_not_listed_is_data(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: int, tries: int
) -> None:
    disk = holes(lambda offset: error if 62 * GIB <= offset < 63 * GIB else 0)
    found = listed(disk, tmp_path)
    assert [(start, length) for start, length, zero in found if not zero] == [(62 * GIB, GIB)]
    assert sum(length for _, length, _ in found) == 64 * GIB
    assert disk.requests == 63 + tries
    (warning,) = [each for each in caplog.records if each.levelname == "WARNING"]
    assert "no extents" in warning.getMessage()
    assert os.strerror(error).lower() in warning.getMessage()


@pytest.mark.parametrize("error", [errno.EIO, errno.EINVAL])
def test_server_that_never_lists_extents_is_not_asked_for_all(tmp_path: Path, error: int) -> None:
    disk = holes(lambda _: error)
    found = listed(disk, tmp_path)
    assert sum(length for _, length, _ in found) == 64 * GIB
    assert not any(zero for _, _, zero in found)
    assert disk.requests < 20


def test_list_that_fails_once_is_asked_for_again(tmp_path: Path) -> None:
    answers = itertools.chain([errno.EIO, errno.EIO], itertools.repeat(0))
    assert all(zero for _, _, zero in listed(holes(lambda _: next(answers)), tmp_path))


def test_silence_about_extents_makes_them_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All reads are served, and block status never is."""
    released = threading.Event()

    def silent(_: int) -> int:
        released.wait(60)
        return 0

    disk = nbd_servers.Disk(sizes=(8 * MIB,), refusing=silent)
    try:
        assert import_(disk, tmp_path, patience=1.0).size == 8 * MIB
    finally:
        released.set()
    assert (tmp_path / "disk.img").read_bytes() == b"A" * 8 * MIB
    assert "no extents" in caplog.text


@pytest.mark.parametrize("error", [errno.EIO, errno.EINVAL])
def test_unknown_changes_are_an_error(tmp_path: Path, error: int) -> None:
    """An unknown list of changes must not mean that nothing has changed."""
    disk = holes(lambda offset: error if offset else 0, dirty=lambda _offset, length: [(length, 0)])
    with nbd_servers.serve(tmp_path / "socket", disk) as socket:
        url = f"nbd+unix:///?socket={socket}"
        access = base.Access(patience=1.0)
        location = locations.Nbd(url, access, previous=nbd_servers.BITMAP, current="now")
        with (
            base.open_image(source.NbdSource(location, cancelling.Cancel())) as image,
            pytest.raises(errors.SourceError, match="listing the extents at byte"),
        ):
            list(image.source.extents())


@pytest.mark.parametrize(("first", "error"), [(True, errno.EINVAL), (False, errno.EPERM)])
def test_read_that_the_server_refuses_is_not_repeated(tmp_path: Path, error: int, first: bool) -> None:
    disk = nbd_servers.Disk(sizes=(8 * MIB,))
    answers = itertools.chain([0] if not first else [], itertools.repeat(error))
    disk.reading = lambda: next(answers)
    began = time.monotonic()
    with pytest.raises(errors.SourceError, match=f"reading at byte .*{os.strerror(error).lower()}"):
        import_(disk, tmp_path)
    assert time.monotonic() - began < 3
    assert disk.requests < 20
    oracle.unusable(tmp_path / "disk.img")


def test_server_of_another_protocol_is_named(tmp_path: Path) -> None:
    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.wfile.write(b"220 mail.example.org ESMTP; this is not the protocol\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        location = locations.Nbd(f"nbd://127.0.0.1:{server.server_address[1]}/")
        wanted = request.Request(
            source="nbd", location=location, target=str(tmp_path / "disk.img"), connect_patience=1.0
        )
        try:
            with pytest.raises(errors.Unreachable, match="not an NBD server"):
                execute.run(wanted)
        finally:
            server.shutdown()
