"""A journal is used only if it is complete, ours, and for the same source."""

from __future__ import annotations

import base64
import dataclasses
import errno
import os
import random
import struct
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.scratch import digests, journal

MiB = 1 << 20
TOTAL = 64 * MiB
ZEROS = memoryview(bytes(digests.UNIT))


@dataclasses.dataclass(frozen=True)
class Location:
    path: str
    offset: int = 0
    withheld: int = 0
    is_apart: bool = False


@pytest.fixture
def location(tmp_path: Path) -> Location:
    path = tmp_path / "notes"
    path.write_bytes(b"\xff" * (4096 + 2 * journal.SLOT))
    return Location(str(path), offset=4096)


def noise(start: int, end: int) -> tuple[int, memoryview]:
    """Return the arguments of ``wrote`` for some bytes."""
    return start, memoryview(random.Random(start).randbytes(end - start))


def wrote(opened: journal.Journal, offset: int, data: memoryview) -> None:
    """Add bytes as after a write."""
    opened.wrote(offset, data, opened.digest(offset, data))


def no_sync() -> None:
    """Sync nothing."""


def failing(_fd: int) -> None:
    """Fail as a sync to broken storage does."""
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def loaded(location: Location) -> journal.Journal:
    return journal.Journal(location, "etag", TOTAL)


def save(location: Location, *done: tuple[int, int], identity: str = "etag") -> journal.Journal:
    opened = journal.Journal(location, identity, TOTAL)
    for start, end in done:
        wrote(opened, *noise(start, end))
    opened.save(no_sync)
    return opened


def test_saved_ranges_are_loaded(location: Location) -> None:
    save(location, (0, MiB), (3 * MiB, 4 * MiB))
    again = loaded(location)
    assert again.covered == 2 * MiB
    assert again.missing(0, TOTAL) == [(MiB, 3 * MiB), (4 * MiB, TOTAL)]
    save(location, (MiB, 3 * MiB))
    assert loaded(location).missing(0, TOTAL) == [(4 * MiB, TOTAL)]


@pytest.mark.parametrize(("identity", "total"), [("other", TOTAL), ("etag", TOTAL + 1), ("", TOTAL)])
def test_another_identity_or_size_starts_over(location: Location, identity: str, total: int) -> None:
    save(location, (0, MiB))
    assert journal.Journal(location, identity, total).covered == 0


def test_new_journal_is_empty(location: Location, tmp_path: Path) -> None:
    assert loaded(location).covered == 0
    assert journal.Journal(Location(str(tmp_path / "missing")), "etag", TOTAL).covered == 0
    assert journal.Journal(Location(str(tmp_path)), "etag", TOTAL).covered == 0


def test_journal_without_location_remembers_nothing() -> None:
    opened = journal.Journal(None, "etag", TOTAL)
    wrote(opened, *noise(0, MiB))
    opened.save(no_sync)
    assert opened.missing(0, 2 * MiB) == [(0, 2 * MiB)]


def test_withheld_start_is_never_done(location: Location) -> None:
    opened = journal.Journal(dataclasses.replace(location, withheld=MiB), "etag", TOTAL)
    wrote(opened, *noise(0, 2 * MiB))
    assert opened.missing(0, 2 * MiB) == [(0, MiB)]


def test_data_is_synced_before_the_journal(location: Location) -> None:
    opened = loaded(location)
    wrote(opened, *noise(0, MiB))

    def flush() -> None:
        assert loaded(location).covered == 0
        wrote(opened, *noise(MiB, 2 * MiB))  # by another thread, after the sync has started

    opened.save(flush)
    assert loaded(location).covered == MiB


def test_failed_sync_saves_nothing(location: Location) -> None:
    opened = loaded(location)
    wrote(opened, *noise(0, MiB))

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        opened.save(fail)
    assert loaded(location).covered == 0


def test_sync_of_the_journal_that_fails_is_an_error_of_the_disk(
    location: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in one file: what was written to the disk may be lost, and the next sync may succeed."""
    monkeypatch.setattr(os, "fdatasync", failing)
    with pytest.raises(errors.TargetError, match="notes: sync: input/output error"):
        save(location, (0, MiB))


def test_sync_that_fails_disables_a_journal_in_its_own_file(
    location: Location, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", failing)
        opened = save(dataclasses.replace(location, is_apart=True), (0, MiB))
    assert "journal disabled" in caplog.text
    before = Path(location.path).read_bytes()
    wrote(opened, *noise(MiB, 2 * MiB))
    opened.save(no_sync)
    assert Path(location.path).read_bytes() == before


def test_checkpoint_saves_after_its_interval(location: Location) -> None:
    for seconds, saved in ((3600, 0), (0, MiB)):
        opened = journal.Journal(location, "etag", TOTAL, seconds=seconds)
        wrote(opened, *noise(0, MiB))
        opened.checkpoint(no_sync)
        assert loaded(location).covered == saved


class Clock:
    """A clock that the test moves; ``sync`` takes time, and is recorded."""

    def __init__(self, sync: float = 0.0) -> None:
        self.now = 100.0
        self.saves: list[float] = []
        self._sync = sync

    def __call__(self) -> float:
        return self.now

    def sync(self) -> None:
        self.now += self._sync
        self.saves.append(self.now)


@pytest.mark.parametrize(("sync", "interval"), [(0.0, 1.0), (0.1, 2.0), (5.0, 10.0)])
def test_interval_follows_the_cost_of_a_sync(location: Location, sync: float, interval: float) -> None:
    clock = Clock(sync)
    opened = journal.Journal(location, "etag", TOTAL, seconds=10, clock=clock)
    while clock.now < 140:
        opened.checkpoint(clock.sync)
        clock.now += 0.25
    assert clock.saves[0] == 101.0 + sync
    assert clock.saves[2] - clock.saves[1] == pytest.approx(interval + sync, abs=0.25)


def test_many_bytes_are_saved_before_the_interval(location: Location) -> None:
    clock = Clock(0.5)
    opened = journal.Journal(location, "etag", TOTAL, seconds=10, clock=clock)
    opened.save(clock.sync)
    offset, data = noise(0, MiB)
    tags = opened.digest(offset, data)
    for _ in range(journal.MOST_UNSAVED // MiB):
        clock.now += 6 / 64
        opened.checkpoint(clock.sync)
        assert len(clock.saves) == 1
        opened.wrote(offset, data, tags)
    opened.checkpoint(clock.sync)
    assert len(clock.saves) == 2


def test_first_save_comes_with_many_bytes(location: Location) -> None:
    """A fast link would lose all that it has brought in the shortest interval."""
    clock = Clock()
    opened = journal.Journal(location, "etag", TOTAL, clock=clock)
    offset, data = noise(0, MiB)
    tags = opened.digest(offset, data)
    for _ in range(journal.MOST_UNSAVED // MiB):
        opened.checkpoint(pytest.fail)
        opened.wrote(offset, data, tags)
    opened.checkpoint(no_sync)
    assert loaded(location).covered == MiB


def test_erased_ranges_are_not_loaded(location: Location) -> None:
    """In none of both slots: one may be torn."""
    save(location, (0, MiB))
    opened = save(location, (2 * MiB, 3 * MiB))
    opened.erase()
    assert not opened.covered
    for slot in range(2):
        with Path(location.path).open("r+b") as file:
            before = file.read()
            file.seek(location.offset + slot * journal.SLOT)
            file.write(bytes(4096))
        assert not loaded(location).covered
        Path(location.path).write_bytes(before)


def test_journal_that_cannot_be_erased_is_an_error(
    location: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = save(location, (0, MiB))
    monkeypatch.setattr(os, "pwrite", lambda *_: failing(0))
    with pytest.raises(errors.TargetError, match="cannot be erased"):
        opened.erase()


def test_torn_write_keeps_the_older_state(location: Location) -> None:
    opened = save(location, (0, MiB))
    before = Path(location.path).read_bytes()
    wrote(opened, *noise(2 * MiB, 3 * MiB))
    opened.save(no_sync)
    after = Path(location.path).read_bytes()
    changed = [at for at, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    covered = []
    for torn in (*range(changed[0], changed[0] + 300, 7), changed[-1] + 1):
        Path(location.path).write_bytes(after[:torn] + before[torn:])
        covered.append(loaded(location).covered)
    assert set(covered) == {MiB, 2 * MiB}
    assert covered == sorted(covered)


def test_flipped_bit_is_detected(location: Location) -> None:
    save(location, (0, MiB))
    content = bytearray(Path(location.path).read_bytes())
    text = slice(location.offset + journal.SLOT, location.offset + journal.SLOT + 250)
    chance = random.Random(1)
    for _ in range(100):
        at = chance.randrange(text.start, text.stop)
        damaged = bytearray(content)
        damaged[at] ^= 1 << chance.randrange(8)
        Path(location.path).write_bytes(damaged)
        found = loaded(location)
        assert found.covered in (0, MiB)
        assert found.missing(MiB, TOTAL) == [(MiB, TOTAL)]


def test_what_is_tentative_stays_so_until_it_is_forgotten(location: Location) -> None:
    opened = journal.Journal(location, "etag", TOTAL)
    opened.tentative = True
    wrote(opened, *noise(0, MiB))
    opened.save(no_sync)
    again = loaded(location)
    assert (again.covered, again.tentative) == (MiB, True)
    again.save(no_sync)
    assert loaded(location).tentative
    again.forget()
    assert not again.tentative
    again.save(no_sync)
    assert not loaded(location).tentative


@pytest.mark.parametrize(
    "slot",
    [
        b"",
        b"\n",
        b"cdi-worker journal 3 0 2\n{}",
        b"cdi-worker journal 6\n{}\n-\n",
        b"cdi-worker journal 6\n{}\nAA==\n",
        b"cdi-worker journal 6\n{}\n" + base64.b64encode(bytes(64)) + b"\n",
    ],
)
def test_what_is_no_slot_is_ignored(location: Location, slot: bytes) -> None:
    Path(location.path).write_bytes(bytes(location.offset) + slot)
    assert loaded(location).covered == 0


def test_journal_cannot_be_forged_without_the_identity(location: Location) -> None:
    """A later user of the device can read a slot, but not change it."""
    save(location, (0, MiB))
    ours, more = (base64.b64encode(struct.pack(">QQ", 0, size)) for size in (MiB, 2 * MiB))
    before = Path(location.path).read_bytes()
    assert ours in before
    Path(location.path).write_bytes(before.replace(ours, more))
    assert loaded(location).covered == 0


def test_digests_are_encrypted(location: Location) -> None:
    """Who knows the tags of many units finds some of them that can be replaced by zeros."""
    finished = save(location, (0, MiB))._finished
    _, packed = finished.dump()
    first, second = (base64.b64decode(finished.seal(packed, b"")) for _ in range(2))
    assert first != second
    assert not any(packed[at : at + 8] in first for at in range(8, len(packed), 16))


def test_journal_of_a_huge_disk_fits(location: Location) -> None:
    """What does not fit is forgotten."""
    many = journal.Journal(location, "etag", 1 << 45)
    many.zeroed([(0, 1 << 40)])
    for index in range(20_000):
        wrote(many, (1 << 43) + index * (128 << 10), memoryview(b"x" * (64 << 10)))
    many.save(no_sync)
    again = journal.Journal(location, "etag", 1 << 45)
    assert 1 << 40 <= again.covered < many.covered
    assert again.missing(0, 1 << 40) == []


def test_range_of_partial_units_is_not_saved(location: Location) -> None:
    opened = save(location, (1000, 200_000))
    assert opened.missing(0, TOTAL) == [(0, 1000), (200_000, TOTAL)]
    again = loaded(location)
    assert again.missing(0, TOTAL) == [(0, 65536), (3 * 65536, TOTAL)]
    wrote(opened, *noise(0, 1000))
    opened.save(no_sync)
    assert loaded(location).missing(0, TOTAL) == [(3 * 65536, TOTAL)]


def test_link_is_not_followed(location: Location, tmp_path: Path) -> None:
    save(location, (0, MiB))
    link = tmp_path / "link"
    link.symlink_to(location.path)
    planted = dataclasses.replace(location, path=str(link))
    assert journal.Journal(planted, "etag", TOTAL).covered == 0


def test_forgotten_range_is_missing(location: Location) -> None:
    opened = save(location, (0, MiB))
    opened.forget()
    assert opened.missing(0, TOTAL) == [(0, TOTAL)]


def test_missing_journal_file_is_ignored(location: Location) -> None:
    opened = loaded(location)
    Path(location.path).unlink()
    wrote(opened, *noise(0, MiB))
    opened.save(no_sync)
    opened.save(no_sync)
    assert opened.covered == MiB
    assert not Path(location.path).exists()


def test_journal_does_not_look_bootable(location: Location) -> None:
    save(location, *((start, start + MiB) for start in range(0, TOTAL, 2 * MiB)))
    written = Path(location.path).read_bytes()[location.offset : location.offset + 2 * journal.SLOT]
    assert written.replace(b"\xff", b"").isascii()


@pytest.mark.parametrize("total", [4 * digests.UNIT, 4 * digests.UNIT - 512])
def test_discarded_range_is_missing_and_not_saved(location: Location, total: int) -> None:
    """Also at the end of a disk whose last unit is short."""
    opened = journal.Journal(location, "etag", total)
    wrote(opened, *noise(0, total))
    opened.discard(total - 4096, total)
    assert opened.missing(0, total) == [(3 * digests.UNIT, total)]
    opened.save(no_sync)
    again = journal.Journal(location, "etag", total)
    assert again.missing(0, total) == [(3 * digests.UNIT, total)]


@pytest.mark.parametrize("total", [TOTAL, (6 << 40) + 3 * MiB])
def test_what_follows_a_gap_is_removed(location: Location, total: int) -> None:
    last = total - MiB
    opened = journal.Journal(location, "source", total)
    wrote(opened, *noise(0, MiB))
    # Without a gap, nothing is removed that shares a digest with what is missing.
    assert opened.cut_at_gap(0) == MiB
    assert opened.covered == MiB
    wrote(opened, *noise(last, total))
    assert opened.cut_at_gap(0) == (MiB if total == TOTAL else 0)
    assert not opened.covered - opened.cut_at_gap(0)
    opened.zeroed([(0, total)])
    assert opened.cut_at_gap(0) == total
    assert opened.covered == total


def test_sample_has_the_data_of_a_disk_that_is_mostly_zeros(location: Location) -> None:
    """Its granules are 128 MiB long, and do not tell where in them the data is."""
    total, unit = 1 << 40, digests.UNIT
    starts = sorted(random.sample(range(2 * MiB, total - 2 * MiB, unit), digests.SAMPLE))
    opened = journal.Journal(location, "etag", total)
    for start in starts:
        wrote(opened, *noise(start, start + unit))
    edges = [0, *(edge for start in starts for edge in (start, start + unit)), total]
    opened.zeroed(zip(edges[::2], edges[1::2], strict=True))
    opened.save(no_sync)
    sample = journal.Journal(location, "etag", total).sample()
    missing = sample.missing(0, total)
    for start in starts:
        assert any(first <= start and start + unit <= end for first, end in missing)
    assert sum(end - start for start, end in missing) <= 2 * MiB + 2 * digests.SAMPLE * unit


def test_places_are_chosen_from_all_data(location: Location) -> None:
    count, size = 40 * digests.SAMPLE, digests.UNIT
    opened = journal.Journal(location, "etag", count * size)
    for number in range(count):
        # Every second unit is zeros.
        data = noise(number * size, (number + 1) * size) if number % 2 else (number * size, ZEROS)
        wrote(opened, *data)
        if number == count // 2:
            opened.save(no_sync)
            opened = journal.Journal(location, "etag", count * size)
    places = [start for _, start in opened._finished.sample]
    assert len(set(places)) == digests.SAMPLE
    assert all(start // size % 2 for start in places)
    assert min(places) < count // 4 * size < count // 4 * 3 * size < max(places)


def test_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "disk.img.part")
    with pytest.raises(OSError, match="seek"):
        journal.is_at_end_of(str(tmp_path / "disk.img.part"))
