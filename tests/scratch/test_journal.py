"""A journal is believed only when it is whole, ours and of the same bytes."""

from __future__ import annotations

import dataclasses
import hashlib
import random
import threading
import zlib
from pathlib import Path

import pytest

from cdi_worker.scratch import journal

MiB = 1 << 20
TOTAL = 64 * MiB


@dataclasses.dataclass(frozen=True)
class Place:
    path: str
    offset: int = 0
    withheld: int = 0


@pytest.fixture
def place(tmp_path: Path) -> Place:
    path = tmp_path / "notes"
    path.write_bytes(b"\xff" * (4096 + 2 * journal.SLOT))
    return Place(str(path), offset=4096)


def nothing() -> None:
    """Stand for a sync of data that has nothing to do."""


def saved(place: Place, *done: tuple[int, int], identity: str = "etag") -> journal.Journal:
    kept = journal.Journal.open(place, identity, TOTAL)
    for start, end in done:
        kept.done(start, end)
    kept.save(nothing)
    return kept


def test_what_was_saved_comes_back(place: Place) -> None:
    saved(place, (0, MiB), (3 * MiB, 4 * MiB))
    again = journal.Journal.open(place, "etag", TOTAL)
    assert again.covered == 2 * MiB
    assert again.missing(0, TOTAL) == [(MiB, 3 * MiB), (4 * MiB, TOTAL)]
    saved(place, (MiB, 3 * MiB))
    assert journal.Journal.open(place, "etag", TOTAL).missing(0, TOTAL) == [(4 * MiB, TOTAL)]


@pytest.mark.parametrize(("identity", "total"), [("other", TOTAL), ("etag", TOTAL + 1), ("", TOTAL)])
def test_another_identity_or_size_starts_over(place: Place, identity: str, total: int) -> None:
    saved(place, (0, MiB))
    assert journal.Journal.open(place, identity, total).covered == 0


def test_it_begins_with_nothing(place: Place, tmp_path: Path) -> None:
    assert journal.Journal.open(place, "etag", TOTAL).covered == 0
    assert journal.Journal.open(Place(str(tmp_path / "missing")), "etag", TOTAL).covered == 0
    assert journal.Journal.open(Place(str(tmp_path)), "etag", TOTAL).covered == 0


def test_without_a_place_nothing_is_remembered() -> None:
    kept = journal.Journal.open(None, "etag", TOTAL)
    kept.done(0, MiB)
    kept.save(nothing)
    assert kept.missing(0, 2 * MiB) == [(MiB, 2 * MiB)]


def test_what_is_withheld_is_never_done(place: Place) -> None:
    kept = journal.Journal.open(dataclasses.replace(place, withheld=MiB), "etag", TOTAL)
    kept.done(0, 2 * MiB)
    assert kept.missing(0, 2 * MiB) == [(0, MiB)]


def test_data_is_synced_before_it_is_claimed(place: Place) -> None:
    kept = journal.Journal.open(place, "etag", TOTAL)
    kept.done(0, MiB)

    def flush() -> None:
        assert journal.Journal.open(place, "etag", TOTAL).covered == 0
        kept.done(MiB, 2 * MiB)  # by another thread, after the sync has begun

    kept.save(flush)
    assert journal.Journal.open(place, "etag", TOTAL).covered == MiB


def test_a_failed_sync_claims_nothing(place: Place) -> None:
    kept = journal.Journal.open(place, "etag", TOTAL)
    kept.done(0, MiB)

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        kept.save(fail)
    assert journal.Journal.open(place, "etag", TOTAL).covered == 0


def test_a_checkpoint_saves_when_it_is_time(place: Place) -> None:
    kept = journal.Journal.open(place, "etag", TOTAL, seconds=3600)
    kept.done(0, MiB)
    kept.checkpoint(nothing)
    assert journal.Journal.open(place, "etag", TOTAL).covered == 0
    kept = journal.Journal.open(place, "etag", TOTAL, seconds=0)
    kept.done(0, MiB)
    kept.checkpoint(nothing)
    assert journal.Journal.open(place, "etag", TOTAL).covered == MiB


def test_a_torn_write_leaves_the_older_state(place: Place) -> None:
    kept = saved(place, (0, MiB))
    before = Path(place.path).read_bytes()
    kept.done(2 * MiB, 3 * MiB)
    kept.save(nothing)
    after = Path(place.path).read_bytes()
    changed = [at for at, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    seen = []
    for torn in (*range(changed[0], changed[0] + 300), changed[-1] + 1):
        Path(place.path).write_bytes(after[:torn] + before[torn:])
        seen.append(journal.Journal.open(place, "etag", TOTAL).covered)
    assert set(seen) == {MiB, 2 * MiB}
    assert seen == sorted(seen)


def test_any_flipped_bit_is_noticed(place: Place) -> None:
    saved(place, (0, MiB))
    content = bytearray(Path(place.path).read_bytes())
    text = slice(place.offset + journal.SLOT, place.offset + journal.SLOT + 250)
    chance = random.Random(1)
    for _ in range(300):
        at = chance.randrange(text.start, text.stop)
        damaged = bytearray(content)
        damaged[at] ^= 1 << chance.randrange(8)
        Path(place.path).write_bytes(damaged)
        found = journal.Journal.open(place, "etag", TOTAL)
        assert found.covered in (0, MiB)
        assert found.missing(MiB, TOTAL) == [(MiB, TOTAL)]


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b"{}",
        b"[" * 5000,
        b'{"identity":"%s","total":%d,"sequence":1,"done":[[5,4]]}',
        b'{"identity":"%s","total":%d,"sequence":1,"done":[[0,99999999999]]}',
        b'{"identity":"%s","total":%d,"sequence":1,"done":[[0]]}',
        b'{"identity":"%s","total":%d,"sequence":1,"done":7}',
    ],
)
def test_nonsense_with_a_right_checksum_is_ignored(place: Place, body: bytes) -> None:
    if b"%s" in body:
        body %= (hashlib.sha256(b"etag").hexdigest().encode(), TOTAL)
    slot = b"cdi-worker journal 1 %08x %06d\n%s" % (zlib.crc32(body), len(body), body)
    Path(place.path).write_bytes(bytes(place.offset) + slot)
    assert journal.Journal.open(place, "etag", TOTAL).covered == 0


def test_too_many_ranges_forget_the_shortest(place: Place) -> None:
    many = journal.Journal.open(place, "etag", 1 << 50)
    for start in range(0, 60_000_000, 1000):
        many.done((1 << 49) + start, (1 << 49) + start + 500)
    many.done(0, MiB)
    many.save(nothing)
    again = journal.Journal.open(place, "etag", 1 << 50)
    assert 0 < again.covered < many.covered
    assert again.missing(0, MiB) == []


def test_a_link_is_not_followed(place: Place, tmp_path: Path) -> None:
    saved(place, (0, MiB))
    link = tmp_path / "link"
    link.symlink_to(place.path)
    planted = dataclasses.replace(place, path=str(link))
    assert journal.Journal.open(planted, "etag", TOTAL).covered == 0


def test_what_is_forgotten_is_to_do_again(place: Place) -> None:
    kept = saved(place, (0, MiB))
    kept.forget()
    assert kept.missing(0, TOTAL) == [(0, TOTAL)]


def test_no_journal_is_no_failure(place: Place) -> None:
    kept = journal.Journal.open(place, "etag", TOTAL)
    Path(place.path).unlink()
    kept.done(0, MiB)
    kept.save(nothing)
    kept.save(nothing)
    assert kept.covered == MiB
    assert not Path(place.path).exists()


def test_it_looks_like_nothing_that_boots(place: Place) -> None:
    saved(place, *((start, start + MiB) for start in range(0, TOTAL, 2 * MiB)))
    written = Path(place.path).read_bytes()[place.offset : place.offset + 2 * journal.SLOT]
    assert written.replace(b"\xff", b"").isascii()


def test_several_threads(place: Place) -> None:
    kept = journal.Journal.open(place, "etag", TOTAL, seconds=0)

    def work(first: int) -> None:
        for start in range(first * MiB, TOTAL, 4 * MiB):
            kept.done(start, start + MiB)
            kept.checkpoint(nothing)

    crew = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    kept.save(nothing)
    assert journal.Journal.open(place, "etag", TOTAL).missing(0, TOTAL) == []


def test_memory_is_bounded() -> None:
    """Of a disk stored in no order the longest ranges are remembered."""
    notes = journal.Journal(None, "", 1 << 40)
    for number in range(journal.MOST + 1):
        notes.done(number * 100, number * 100 + 1 + number % 2)
    assert notes.covered >= journal.MOST // 2 * 2
    assert notes.missing(100, 102) == []
    assert notes.missing(0, 1) == [(0, 1)]
