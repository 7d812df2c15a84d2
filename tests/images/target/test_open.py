"""What both kinds of target promise, and what is told of them before."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.images import directio, target
from tests.support import devices, oracle, processes

MiB = 1 << 20
SIZE = 8 * MiB
KINDS = ["block512", "block4096", "ext4", "tmpfs", "xfs", "btrfs"]


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Give a path for a disk: a device filled with 0xFF, or a name in a new file system."""
    if request.param.startswith("block"):
        with devices.loop(tmp_path, SIZE + 2 * MiB, sector=int(request.param[5:])) as device:
            yield device
    else:
        with devices.filesystem(request.param, tmp_path) as point:
            yield point / "disk.img"


def scattered(size: int, seed: int) -> tuple[bytes, list[tuple[int, int, bool]]]:
    """Make a disk of unaligned pieces of data and zeros, and the pieces in any order."""
    chance = random.Random(seed)
    content = bytearray(size)
    pieces = []
    offset = 0
    while offset < size:
        end = min(size, offset + chance.choice([1, 511, 512, 4096, 65536, 300_001, MiB, 2 * MiB]))
        zero = chance.random() < 0.5
        if not zero:
            content[offset:end] = chance.randbytes(end - offset)
        pieces.append((offset, end, zero))
        offset = end
    chance.shuffle(pieces)
    return bytes(content), pieces


def put(disk: target.Target, content: bytes, pieces: list[tuple[int, int, bool]]) -> None:
    for start, end, zero in pieces:
        if zero:
            disk.zero(start, end - start)
        else:
            disk.write(start, memoryview(content)[start:end])


@pytest.mark.parametrize("preallocate", [False, True], ids=["sparse", "preallocated"])
@pytest.mark.parametrize("direct", [False, True], ids=["cached", "direct"])
@pytest.mark.parametrize("size", [SIZE, SIZE - 700, 1000])
def test_pieces_in_any_order_by_several_threads(
    place: Path, tmp_path: Path, size: int, direct: bool, preallocate: bool
) -> None:
    content, pieces = scattered(size, seed=size)
    expected = tmp_path / "expected"
    expected.write_bytes(content + bytes(-size % 512))
    options = target.Options(preallocate=preallocate, direct=direct)
    with target.open(place, size, options) as disk:
        crew = [threading.Thread(target=put, args=(disk, content, pieces[n::4])) for n in range(4)]
        for thread in crew:
            thread.start()
        for thread in crew:
            thread.join()
        disk.commit()
    oracle.same(place, expected, beyond=devices.beyond(place))
    if preallocate and not place.is_block_device():
        assert place.stat().st_blocks * 512 >= size


@pytest.mark.parametrize("mode", ["new", "resume"])
def test_zero_is_zero_on_whatever_was_there(place: Path, tmp_path: Path, mode: str) -> None:
    if not place.is_block_device():
        devices.fill(Path(f"{place}.part"), SIZE)
    with target.open(place, SIZE, target.Options(mode=mode)) as disk:
        disk.zero(0, 3 * MiB)
        disk.write(3 * MiB, memoryview(b"data" * 1024))
        disk.zero(3 * MiB + 4096, SIZE - 3 * MiB - 4096)
        disk.commit()
    expected = tmp_path / "expected"
    expected.write_bytes(bytes(3 * MiB) + b"data" * 1024 + bytes(SIZE - 3 * MiB - 4096))
    oracle.same(place, expected, beyond=devices.beyond(place))


def test_nothing_usable_without_a_commit(place: Path) -> None:
    with target.open(place, SIZE) as disk:
        disk.write(0, memoryview(os.urandom(SIZE)))
        disk.flush()
        oracle.unusable(place)
    oracle.unusable(place)
    if not place.is_block_device():
        assert os.listdir(place.parent) in ([], ["lost+found"])


def test_what_is_kept_can_be_gone_on_with(place: Path, tmp_path: Path) -> None:
    content = os.urandom(SIZE)
    with target.open(place, SIZE) as disk:
        disk.write(2 * MiB, memoryview(content)[2 * MiB : 5 * MiB])
        disk.flush()
        disk.keep()
    oracle.unusable(place)
    with target.open(place, SIZE, target.Options(mode="resume")) as disk:
        assert disk.resumed
        assert disk.withheld <= 2 * MiB
        disk.write(5 * MiB, memoryview(content)[5 * MiB :])
        disk.write(0, memoryview(content)[: 2 * MiB])
        disk.commit()
    expected = tmp_path / "expected"
    expected.write_bytes(content)
    oracle.same(place, expected, beyond=devices.beyond(place))


def test_an_update_changes_parts_of_a_disk(place: Path, tmp_path: Path) -> None:
    content = bytearray(os.urandom(SIZE))
    with target.open(place, SIZE) as disk:
        disk.write(0, memoryview(content))
        disk.commit()
    with target.open(place, None, target.Options(mode="update")) as disk:
        disk.write(500, memoryview(b"new"))
        disk.zero(2 * MiB, MiB)
        disk.commit()
    content[500:503] = b"new"
    content[2 * MiB : 3 * MiB] = bytes(MiB)
    expected = tmp_path / "expected"
    expected.write_bytes(content)
    oracle.same(place, expected, beyond=devices.beyond(place))


def test_nothing_goes_beyond_the_size(place: Path) -> None:
    with target.open(place, SIZE) as disk:
        for call in (lambda: disk.write(SIZE - 1, memoryview(b"xx")), lambda: disk.zero(SIZE, 1)):
            with pytest.raises(errors.TooLarge):
                call()


def test_a_size_known_only_at_the_end(place: Path, tmp_path: Path) -> None:
    with target.open(place, None) as disk:
        disk.write(0, memoryview(b"x" * 3000))
        disk.zero(3000, 2 * MiB)
        disk.commit()
    expected = tmp_path / "expected"
    expected.write_bytes(b"x" * 3000 + bytes(2 * MiB) + bytes(-3000 % 512))
    end = b"\0" if not place.is_block_device() else devices.DIRT
    oracle.same(place, expected, beyond=end)


def test_no_more_than_the_window_stays_in_memory(tmp_path: Path) -> None:
    """A buffered write of 256 MiB leaves few dirty pages behind."""
    data = directio.Buffer(4 * MiB).view
    data[:] = os.urandom(len(data))
    # Debian 13 has /tmp in memory.
    with (
        devices.filesystem("ext4", tmp_path, 320 * MiB) as point,
        target.open(point / "disk.img", 256 * MiB) as disk,
    ):
        for offset in range(0, 256 * MiB, len(data)):
            disk.write(offset, data)
        assert cached(point / "disk.img.part") <= 64 * MiB


def cached(path: Path) -> int:
    """Return how many bytes of a file are in the page cache, as fincore(1) sees it."""
    out = processes.run("fincore", "--bytes", "--noheadings", "--output=RES", path).stdout
    return int(out.strip() or 0)


def test_facts_of_a_device(block: Path) -> None:
    facts = target.facts(block)
    assert (facts.kind, facts.size, facts.available) == ("block", 32 * MiB, 32 * MiB)
    assert facts.direct


@pytest.mark.parametrize("kind", ["ext4", "tmpfs"])
def test_facts_count_left_overs_as_free(tmp_path: Path, kind: str) -> None:
    with devices.filesystem(kind, tmp_path) as point:
        path = point / "disk.img"
        before = target.facts(path)
        assert (before.kind, before.size) == ("file", 0)
        devices.fill(path, 5 * MiB)
        devices.fill(Path(f"{path}.part"), 7 * MiB)
        after = target.facts(path)
        assert after.size == 5 * MiB
        assert abs(after.available - before.available) < 64 << 10
        os.link(path, point / "another name")
        assert target.facts(path).available <= before.available - 5 * MiB + (64 << 10)


def test_what_is_kept_for_root_is_not_available(tmp_path: Path) -> None:
    """Tests run as root, pods do not."""
    with devices.filesystem("ext4", tmp_path) as point:
        room = os.statvfs(point)
        assert room.f_bavail < room.f_bfree
        assert target.facts(point / "disk.img").available == room.f_bavail * room.f_frsize


def test_facts_leave_nothing_behind(tmp_path: Path) -> None:
    target.facts(tmp_path / "disk.img")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("path", ["/dev/no-such-device", "/no/such/directory/disk.img"])
def test_what_is_missing_is_not_made(path: str) -> None:
    assert target.facts(path).kind == "missing"
    with pytest.raises(errors.TargetError):
        target.open(path, SIZE)
    assert not os.path.lexists(path)
