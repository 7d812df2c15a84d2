"""Disks in backups of KubeVirt: a full copy, the changes since then, and servers that lie."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.importer import inspection, plan
from cdi_worker.sources import base
from cdi_worker.sources.kubevirt import maps, source
from tests.support import devices, kubevirt, kubevirt_stages, oracle, reading

MIB = 1 << 20
SIZE = kubevirt_stages.SIZE
DATA = random.Random(3).randbytes(4 * MIB)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[kubevirt_stages.Setup]:
    with kubevirt_stages.running(tmp_path) as made:
        yield made


target = devices.targets("file", "512", "4096", size=SIZE + MIB)
ON_A_FILE = pytest.mark.parametrize("target", ["file"], indirect=True)


@pytest.fixture
def plain(machine: kubevirt_stages.Setup) -> kubevirt.Plain:
    """A backup of a disk without holes."""
    made = kubevirt.Plain(DATA, [(0, len(DATA), 0)])
    machine.server.backups["root"] = made
    return made


def page(*extents: tuple[int, int, int, str], following: object = None) -> bytes:
    listed = [
        {"offset": offset, "length": length, "type": kind, "description": about}
        for offset, length, kind, about in extents
    ]
    return json.dumps({"extents": listed, "next_offset": following}).encode()


def answer_map(machine: kubevirt_stages.Setup, *pages: bytes) -> None:
    """Answer requests for the map by these pages; the last one answers all later requests."""
    left = list(pages)

    def trick(seen: kubevirt.Seen) -> tuple[int, bytes] | None:
        if not seen.path.endswith("/map"):
            return None
        return 200, left.pop(0) if len(left) > 1 else left[0]

    machine.server.trick = trick


def test_stages_of_a_migration_reproduce_each_checkpoint(
    machine: kubevirt_stages.Setup, target: Path
) -> None:
    first = machine.checkpoint()
    with machine.backup():
        done = cdi_worker.run(machine.request(target, current=first))
    assert (done.plan.route, done.plan.scratch) == (plan.Route.EXTENTS, False)
    oracle.same(target, machine.content(first))
    before = first
    for writes in (kubevirt_stages.FIRST, kubevirt_stages.SECOND):
        now = machine.checkpoint(*writes)
        with machine.backup(since=before):
            stage = machine.request(target, previous=before, current=now)
            for _ in range(2):  # a finished stage may be requested again, too
                done = cdi_worker.run(stage)
                assert done.plan.route is plan.Route.UPDATE
                oracle.same(target, machine.content(now))
        assert done.read < SIZE // 2
        before = now


def test_only_data_moves_and_each_connection_is_kept(machine: kubevirt_stages.Setup) -> None:
    first = machine.checkpoint()
    with machine.backup():
        cdi_worker.run(machine.request(machine.disk))
    oracle.same(machine.disk, machine.content(first))
    assert machine.server.sent("/data") < 7 * MIB
    assert len({seen.connection for seen in machine.server.seen}) <= 5


def test_data_endpoint_names_the_same_disk(machine: kubevirt_stages.Setup, plain: kubevirt.Plain) -> None:
    for end in ("map", "data"):
        where = machine.location("exports", "root", end)
        with base.open_image(source.source(where, cancelling.NEVER)) as found:
            assert (found.facts.size, found.facts.format) == (len(DATA), "raw")
            assert reading.read_range(found.source.ranges, 1_000_001, 70_000) == DATA[1_000_001:1_070_001]
            assert reading.read_through_engine(found) == DATA
            assert reading.read_all(found.source.stream(1000)) == DATA[1000:]


@pytest.mark.parametrize("digits", [1, 5000])
def test_server_with_lengths_is_read_too(
    machine: kubevirt_stages.Setup, plain: kubevirt.Plain, digits: int
) -> None:
    """Python refuses to read a number of more than 4300 digits."""
    machine.server.lengths = digits
    cdi_worker.run(machine.request(machine.disk))
    assert machine.disk.read_bytes() == DATA


@ON_A_FILE
def test_full_backup_instead_of_changes_is_copied(machine: kubevirt_stages.Setup, target: Path) -> None:
    """KubeVirt falls back to a full backup if the previous checkpoint was lost."""
    first = machine.checkpoint()
    with machine.backup():
        cdi_worker.run(machine.request(target, current=first))
    second = machine.checkpoint(*kubevirt_stages.FIRST)
    with machine.backup():
        cdi_worker.run(machine.request(target, previous=first, current=second))
    oracle.same(target, machine.content(second))


def test_incremental_backup_is_not_taken_for_a_full_one(machine: kubevirt_stages.Setup) -> None:
    first = machine.checkpoint()
    machine.checkpoint(*kubevirt_stages.FIRST)
    with machine.backup(since=first), pytest.raises(errors.SourceError, match="incremental backup; name"):
        cdi_worker.run(machine.request(machine.disk))
    oracle.unusable(machine.disk)


def test_changes_without_the_disk_are_refused(machine: kubevirt_stages.Setup) -> None:
    first = machine.checkpoint()
    second = machine.checkpoint(*kubevirt_stages.FIRST)
    with machine.backup(since=first), pytest.raises(errors.TargetError, match="run the first stage again"):
        cdi_worker.run(machine.request(machine.disk, previous=first, current=second))


def test_changes_of_another_checkpoint_are_refused(machine: kubevirt_stages.Setup) -> None:
    disk = machine.disk
    first = machine.checkpoint()
    with machine.backup():
        cdi_worker.run(machine.request(disk, current=first))
    second = machine.checkpoint(*kubevirt_stages.FIRST)
    third = machine.checkpoint(*kubevirt_stages.SECOND)
    with machine.backup(since=second), pytest.raises(errors.TargetError, match=f"is from {second}"):
        cdi_worker.run(machine.request(disk, previous=second, current=third))
    oracle.same(disk, machine.content(first))


@pytest.mark.parametrize("first", ["map", "disk.img.gz"])
def test_changes_of_another_disk_are_refused(machine: kubevirt_stages.Setup, first: str) -> None:
    """All disks of a machine have the checkpoints of its tracker."""
    disk = machine.disk
    machine.server.volumes["root"] = machine.directory / "first.raw"
    before = machine.checkpoint()
    folder = "exports" if first == "map" else "volumes"
    with machine.backup():
        cdi_worker.run(machine.request(disk, folder, "root", first, current=before))
    now = machine.checkpoint(*kubevirt_stages.FIRST)
    changed = [(0, MIB, 1), (MIB, SIZE - MIB, 0)]
    machine.server.backups["data"] = kubevirt.Plain(b"D" * SIZE, changed, kubevirt.CHANGED)
    with pytest.raises(errors.TargetError, match=f"holds the disk at checkpoint {before} of root"):
        cdi_worker.run(machine.request(disk, "exports", "data", "map", previous=before, current=now))
    oracle.same(disk, machine.content(before))
    with machine.backup(since=before):
        cdi_worker.run(machine.request(disk, previous=before, current=now))
    oracle.same(disk, machine.content(now))


def test_disk_that_has_grown_needs_a_larger_volume(machine: kubevirt_stages.Setup) -> None:
    disk = machine.disk
    disk.write_bytes(bytes(MIB))
    machine.server.backups["root"] = kubevirt.Plain(DATA, [(0, len(DATA), 0)], kubevirt.CHANGED)
    with pytest.raises(errors.TooLarge):
        cdi_worker.run(machine.request(disk, previous="a", current="b"))
    assert disk.read_bytes() == bytes(MIB)


def test_inspect_shows_what_is_copied(machine: kubevirt_stages.Setup, plain: kubevirt.Plain) -> None:
    plain.extents = [(0, MIB, 0), (MIB, 3 * MIB, 3)]
    wanted = dataclasses.replace(machine.request(Path("unused")), target="")
    found = inspection.inspect(wanted)
    assert found.details == {"form": "backup", "backup": "full", "data": MIB}
    assert found.plan is not None
    assert found.plan.virtual_size == len(DATA)


def test_many_pages_are_one_map(machine: kubevirt_stages.Setup, plain: kubevirt.Plain) -> None:
    plain.data = b"".join(bytes([number % 251]) * 4096 + bytes(260 << 10) for number in range(12))
    unit = len(plain.data) // 12
    runs = (((at, 4096, 0), (at + 4096, unit - 4096, 3)) for at in range(0, len(plain.data), unit))
    plain.extents = [run for pair in runs for run in pair]
    where = machine.location("exports", "root", "map")
    with base.open_image(source.BackupSource(where, cancelling.NEVER, page_size=5)) as found:
        listed = [(extent.offset, extent.length, 3 * extent.zero) for extent in found.source.extents()]
        assert reading.read_through_engine(found) == plain.data
        found.verify()
    assert listed == plain.extents
    # Once for the import, and once to see that the backup is still the same.
    assert len(machine.server.gets("/map")) == 10


# -- resuming and tokens ----------------------------------------------------------------------


def test_ranges_that_end_early_are_continued(machine: kubevirt_stages.Setup, plain: kubevirt.Plain) -> None:
    turns = iter(range(100))
    machine.server.shorten = lambda seen: 300_000 if next(turns) % 3 else None
    cdi_worker.run(machine.request(machine.disk))
    assert machine.disk.read_bytes() == DATA


def test_busy_tunnel_is_waited_for(machine: kubevirt_stages.Setup, plain: kubevirt.Plain) -> None:
    """The server answers 503 until the machine's pod has connected to it."""
    turns = iter(range(100))
    machine.server.trick = lambda _: (503, b"Backup source not connected") if next(turns) < 3 else None
    cdi_worker.run(machine.request(machine.disk))
    assert machine.disk.read_bytes() == DATA


def test_token_that_was_replaced_in_its_file_is_read_again(
    machine: kubevirt_stages.Setup, plain: kubevirt.Plain, tmp_path: Path
) -> None:
    token, fresh = tmp_path / "token", tmp_path / "fresh"
    token.write_text(kubevirt.TOKEN + "\n")
    fresh.write_text("another-token")

    def expire(seen: kubevirt.Seen) -> None:
        if len(machine.server.gets("/data")) < 3:
            return
        # At once, as Kubernetes replaces the files of a Secret: an empty one would be refused. Only the first
        # of several requests finds it.
        with contextlib.suppress(FileNotFoundError):
            fresh.replace(token)
            machine.server.token = "another-token"

    machine.server.trick = expire
    cdi_worker.run(machine.request(machine.disk, token="", token_file=str(token)))
    assert machine.disk.read_bytes() == DATA


def test_token_that_expires_ends_the_import(machine: kubevirt_stages.Setup, plain: kubevirt.Plain) -> None:
    def expire(seen: kubevirt.Seen) -> None:
        if len(machine.server.gets("/data")) == 3:
            machine.server.token = "another-token"

    machine.server.trick = expire
    with pytest.raises(errors.Withdrawn, match="the export refuses the token") as caught:
        cdi_worker.run(machine.request(machine.disk))
    assert kubevirt.TOKEN not in str(caught.value)
    oracle.unusable(machine.disk)


def test_token_is_sent_as_header_only(machine: kubevirt_stages.Setup, plain: kubevirt.Plain) -> None:
    where = machine.location("exports", "root", "map")
    url = f"{where.endpoint}?{kubevirt.HEADER}={kubevirt.TOKEN}"
    given = dataclasses.replace(where, endpoint=url, token="")
    assert kubevirt.TOKEN not in repr(given)
    wanted = dataclasses.replace(machine.request(machine.disk), location=given)
    cdi_worker.run(wanted)
    assert not [seen for seen in machine.server.seen if kubevirt.HEADER in seen.query]


# -- servers that lie -------------------------------------------------------------------------

END = len(DATA)
WHOLE = (0, END, 0, "data")
HOSTILE: dict[str, tuple[list[bytes], str]] = {
    "overlapping": ([page((0, MIB, 0, "data"), (MIB - 512, END - MIB + 512, 3, "hole,zero"))], "begins at"),
    "gap": ([page((0, MIB, 0, "data"), (MIB + 512, END - MIB - 512, 0, "data"))], "begins at byte"),
    "backward": ([page((0, MIB, 0, "data"), following=512)], "next begins at 512"),
    "forward": ([page((0, MIB, 0, "data"), following=2 * MIB)], "next begins at 2097152"),
    "the same page again": (
        [page((0, MIB, 0, "data"), following=MIB), page((0, MIB, 0, "data"), following=MIB)],
        "begins at byte 0",
    ),
    "a page of nothing": ([page((0, MIB, 0, "data"), following=MIB), page(following=MIB)], "next begins"),
    "empty": ([page()], "no extents"),
    "null": ([b'{"extents":null,"next_offset":null}'], "no extents"),
    "no length": ([page((0, 0, 0, "data"))], "has 0 bytes"),
    "negative": ([page((0, -512, 0, "data"))], "has -512 bytes"),
    "larger than any disk": ([page((0, 1 << 63, 0, "data"))], "has 9223372036854775808 bytes"),
    "unknown type": ([page((0, END, 8, "unknown"))], "unknown type"),
    "type of another kind": ([page((0, END, 1, "clean"))], "unknown type"),
    "both kinds": ([page((0, MIB, 0, "data"), (MIB, END - MIB, 1, "dirty"))], "turns from one kind"),
    "another kind on the next page": (
        [page((0, MIB, 0, "data"), following=MIB), page((MIB, END - MIB, 1, "dirty"))],
        "turns from one kind",
    ),
    "fractions": (
        [b'{"extents":[{"offset":0.0,"length":1,"type":0,"description":"data"}]}'],
        "not of the form",
    ),
    "not JSON": ([b"<html>"], "not of the form"),
    "no list": ([b'{"extents":7,"next_offset":null}'], "not of the form"),
    "deep": ([b"[" * 100_000], "not of the form"),
    "long numbers": ([b'{"extents":[],"next_offset":' + b"9" * 5000 + b"}"], "not of the form"),
    "enormous page": ([b" " * (maps.LARGEST_PAGE + 1)], "more than 524288 bytes"),
}


def test_map_that_cannot_be_one_is_refused(machine: kubevirt_stages.Setup, plain: kubevirt.Plain) -> None:
    for name, (pages, message) in HOSTILE.items():
        answer_map(machine, *pages)
        with pytest.raises(errors.SourceError) as caught:
            cdi_worker.run(machine.request(machine.disk))
        assert message in str(caught.value), (name, str(caught.value))
        oracle.unusable(machine.disk)
        assert not machine.server.gets("/data"), name


def test_endless_map_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maps, "MOST_PAGES", 100)
    asked = []

    def endless(at: int) -> bytes:
        asked.append(at)
        return page((at, 1, 0, "data"), following=at + 1)

    with pytest.raises(errors.SourceError, match=f"more than {maps.MOST_PAGES} pages"):
        maps.Map("disk").read(endless)
    assert len(asked) == maps.MOST_PAGES + 1


@pytest.mark.parametrize("previous", ["", "before"])
def test_backup_that_was_replaced_is_not_mixed_with_the_new_one(
    machine: kubevirt_stages.Setup, previous: str
) -> None:
    disk = machine.disk
    disk.write_bytes(bytes(len(DATA)))
    names = kubevirt.CHANGED if previous else kubevirt.ALLOCATED
    machine.server.backups["root"] = kubevirt.Plain(DATA, [(0, MIB, 1), (MIB, 3 * MIB, 0)], names)

    def replace(seen: kubevirt.Seen) -> None:
        if len(machine.server.gets("/data")) == 2:
            more = DATA if previous else DATA + bytes(512)
            runs = [(0, 2 * MIB, 1), (2 * MIB, len(more) - 2 * MIB, 0)]
            machine.server.backups["root"] = kubevirt.Plain(more, runs, names)

    machine.server.trick = replace
    with pytest.raises(errors.SourceChanged, match="changed area" if previous else "size"):
        cdi_worker.run(machine.request(disk, previous=previous, current="now"))


def faulty(machine: kubevirt_stages.Setup, data: bytes) -> None:
    def answer(seen: kubevirt.Seen) -> tuple[int, bytes] | None:
        if seen.path.endswith("/map"):
            return None
        offset, length = (int(seen.query[name]) for name in ("offset", "length"))
        return 200, data[offset:] if not length else data[: offset + length][offset:]

    machine.server.trick = answer


def test_server_that_ignores_the_length_is_read_in_order(
    machine: kubevirt_stages.Setup, plain: kubevirt.Plain
) -> None:
    def answer(seen: kubevirt.Seen) -> tuple[int, bytes] | None:
        return None if seen.path.endswith("/map") else (200, DATA[int(seen.query["offset"]) :])

    machine.server.trick = answer
    cdi_worker.run(machine.request(machine.disk))
    assert machine.disk.read_bytes() == DATA


def test_chunks_beyond_the_length_are_noticed(machine: kubevirt_stages.Setup, plain: kubevirt.Plain) -> None:
    """A body in chunks has no length by which it could be refused."""

    class Long(kubevirt.Plain):
        def read(self, offset: int, length: int) -> bytes:
            return super().read(offset, length + 7)

    machine.server.backups["root"] = Long(DATA, [(0, END, 0)])
    where = machine.location("exports", "root", "map")
    with pytest.raises(errors.NoRanges, match="longer than"):
        source.source(where, cancelling.NEVER).open(base.Opening())


def test_data_shorter_than_the_map_never_makes_a_disk(
    machine: kubevirt_stages.Setup, plain: kubevirt.Plain
) -> None:
    faulty(machine, DATA[: 3 * MIB])
    wanted = dataclasses.replace(
        machine.request(machine.disk), fetch=cdi_worker.FetchOptions(chunk=MIB, no_progress=0.5)
    )
    with pytest.raises(errors.SourceError):
        cdi_worker.run(wanted)
    oracle.unusable(machine.disk)


def test_ranges_from_other_places_never_become_changes(machine: kubevirt_stages.Setup) -> None:
    """The server ignores the offset. Without ranges changes cannot be read at all."""
    disk = machine.disk
    disk.write_bytes(bytes(len(DATA)))
    machine.server.backups["root"] = kubevirt.Plain(DATA, [(0, MIB, 0), (MIB, 3 * MIB, 1)], kubevirt.CHANGED)

    def answer(seen: kubevirt.Seen) -> tuple[int, bytes] | None:
        return None if seen.path.endswith("/map") else (200, DATA[: int(seen.query["length"])])

    machine.server.trick = answer
    with pytest.raises(errors.Error, match="ranges"):
        cdi_worker.run(machine.request(disk, previous="before", current="now"))


def test_interrupted_reads_return_no_wrong_bytes(
    machine: kubevirt_stages.Setup, plain: kubevirt.Plain
) -> None:
    reads = cancelling.Reads(cancelling.Cancel())
    where = machine.location("exports", "root", "map")
    with base.open_image(source.BackupSource(where, reads)) as found:
        reading.check_interrupted_reads(found.source.ranges, reads, DATA)
