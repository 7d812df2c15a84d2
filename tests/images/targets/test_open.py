"""The common behaviour of both kinds of target, and the facts about them."""

from __future__ import annotations

import os
import random
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.images import directio, targets
from tests.support import devices, oracle, pairs

MiB = 1 << 20
SIZE = 8 * MiB
#: Where targets differ, and file systems that zero and preallocate in their own ways.
KINDS = ["block512", "block4096", "ext4", "tmpfs"]
ALL_KINDS = [*KINDS, "xfs", "btrfs"]


@pytest.fixture(params=KINDS)
def disk_path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Yield the path of a disk: a device filled with 0xFF, or a new name in an empty file system."""
    if request.param.startswith("block"):
        with devices.loop(tmp_path, SIZE + 2 * MiB, sector=int(request.param[5:])) as device:
            yield device
    else:
        with devices.filesystem(request.param, tmp_path) as point:
            yield point / "disk.img"


def check(path: Path, content: bytes) -> None:
    """Compare a disk, and look at what follows it."""
    with tempfile.NamedTemporaryFile() as expected:
        Path(expected.name).write_bytes(content)
        oracle.same(path, Path(expected.name), beyond=devices.beyond(path))


def scattered(size: int, seed: int) -> tuple[bytes, list[tuple[int, int, bool]]]:
    """Return a disk of unaligned pieces of data and zeros, and the pieces in random order."""
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


def write_pieces(disk: targets.Target, content: bytes, pieces: list[tuple[int, int, bool]]) -> None:
    for start, end, zero in pieces:
        if zero:
            disk.zero(start, end - start)
        else:
            disk.write(start, memoryview(content)[start:end])


@pytest.mark.parametrize(
    ("disk_path", "size", "direct", "preallocate"),
    pairs.covering(ALL_KINDS, [SIZE, SIZE - 700, 1000], [False, True], [False, True]),
    indirect=["disk_path"],
)
def test_several_threads_write_pieces_in_any_order(
    disk_path: Path, size: int, direct: bool, preallocate: bool
) -> None:
    content, pieces = scattered(size, seed=size)
    options = targets.TargetOptions(preallocate=preallocate, direct=direct)
    with targets.open(disk_path, size, options) as disk:
        threads = [
            threading.Thread(target=write_pieces, args=(disk, content, pieces[n::4])) for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        disk.commit()
    check(disk_path, content + bytes(-size % 512))
    if preallocate and not disk_path.is_block_device():
        assert disk_path.stat().st_blocks * 512 >= size


@pytest.mark.parametrize(
    ("disk_path", "resume"),
    [*pairs.dealt(ALL_KINDS, [False, True]), ("block512", True), ("ext4", True)],
    indirect=["disk_path"],
)
def test_zeros_read_back_on_a_dirty_target(disk_path: Path, *, resume: bool) -> None:
    if not disk_path.is_block_device():
        devices.fill(Path(f"{disk_path}.part"), SIZE)
    with targets.open(disk_path, SIZE, targets.TargetOptions(resume=resume)) as disk:
        disk.zero(0, 3 * MiB)
        disk.write(3 * MiB, memoryview(b"data" * 1024))
        disk.zero(3 * MiB + 4096, SIZE - 3 * MiB - 4096)
        disk.commit()
    check(disk_path, bytes(3 * MiB) + b"data" * 1024 + bytes(SIZE - 3 * MiB - 4096))


def test_target_is_unusable_without_commit(disk_path: Path) -> None:
    with targets.open(disk_path, SIZE) as disk:
        disk.write(0, memoryview(os.urandom(SIZE)))
        disk.flush()
        oracle.unusable(disk_path)
    oracle.unusable(disk_path)
    if not disk_path.is_block_device():
        assert os.listdir(disk_path.parent) in ([], ["lost+found"])


def test_kept_target_can_be_resumed(disk_path: Path) -> None:
    content = os.urandom(SIZE)
    with targets.open(disk_path, SIZE) as disk:
        disk.write(2 * MiB, memoryview(content)[2 * MiB : 5 * MiB])
        disk.flush()
        disk.keep()
    oracle.unusable(disk_path)
    with targets.open(disk_path, SIZE, targets.TargetOptions(resume=True)) as disk:
        assert disk.resumed
        assert disk.withheld <= 2 * MiB
        disk.write(5 * MiB, memoryview(content)[5 * MiB :])
        disk.write(0, memoryview(content)[: 2 * MiB])
        disk.commit()
    check(disk_path, content)


def test_update_changes_parts_of_a_disk(disk_path: Path) -> None:
    content = bytearray(os.urandom(SIZE))
    with targets.open(disk_path, SIZE) as disk:
        disk.write(0, memoryview(content))
        disk.commit()
    with targets.open(disk_path, None, targets.TargetOptions(mode="delta")) as disk:
        disk.write(500, memoryview(b"new"))
        disk.zero(2 * MiB, MiB)
        disk.commit()
    content[500:503] = b"new"
    content[2 * MiB : 3 * MiB] = bytes(MiB)
    check(disk_path, content)


@pytest.mark.parametrize("disk_path", ["block512", "ext4"], indirect=True)
def test_write_beyond_the_size_is_refused(disk_path: Path) -> None:
    with targets.open(disk_path, SIZE) as disk:
        for call in (lambda: disk.write(SIZE - 1, memoryview(b"xx")), lambda: disk.zero(SIZE, 1)):
            with pytest.raises(errors.TooLarge):
                call()


def test_size_may_be_known_only_at_the_end(disk_path: Path) -> None:
    with targets.open(disk_path, None) as disk:
        disk.write(0, memoryview(b"x" * 3000))
        disk.zero(3000, 2 * MiB)
        disk.commit()
    check(disk_path, b"x" * 3000 + bytes(2 * MiB) + bytes(-3000 % 512))


def test_dirty_pages_are_bounded(tmp_path: Path) -> None:
    """A cached write of 256 MiB leaves few dirty pages behind."""
    data = directio.Buffer(4 * MiB).view
    data[:] = os.urandom(len(data))
    # Debian 13 has /tmp in memory.
    with (
        devices.filesystem("ext4", tmp_path, 320 * MiB) as point,
        targets.open(point / "disk.img", 256 * MiB) as disk,
    ):
        for offset in range(0, 256 * MiB, len(data)):
            disk.write(offset, data)
        assert devices.cached(point / "disk.img.part") <= 64 * MiB


@pytest.mark.parametrize("block", [4096], indirect=True)
def test_facts_describe_a_device(block: Path) -> None:
    facts = targets.facts(block)
    assert (facts.kind, facts.size, facts.available) == ("block", 32 * MiB, 32 * MiB)
    assert facts.direct


@pytest.mark.parametrize("kind", ["ext4", "tmpfs"])
def test_facts_count_leftovers_as_free(tmp_path: Path, kind: str) -> None:
    with devices.filesystem(kind, tmp_path) as point:
        path = point / "disk.img"
        before = targets.facts(path)
        assert (before.kind, before.size) == ("file", 0)
        devices.fill(path, 5 * MiB)
        devices.fill(Path(f"{path}.part"), 7 * MiB)
        after = targets.facts(path, removed=True)
        assert after.size == 5 * MiB
        assert abs(after.available - before.available) < 64 << 10
        kept = targets.facts(path)
        assert abs(kept.available + 5 * MiB - before.available) < 64 << 10
        os.link(path, point / "another name")
        assert targets.facts(path, removed=True).available <= before.available - 5 * MiB + (64 << 10)


def test_space_reserved_for_root_is_not_available(tmp_path: Path) -> None:
    """Tests run as root, pods do not."""
    with devices.filesystem("ext4", tmp_path) as point:
        file_system = os.statvfs(point)
        assert file_system.f_bavail < file_system.f_bfree
        assert targets.facts(point / "disk.img").available == file_system.f_bavail * file_system.f_frsize


def test_facts_create_no_file(tmp_path: Path) -> None:
    targets.facts(tmp_path / "disk.img")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("path", ["/dev/no-such-device", "/no/such/directory/disk.img"])
def test_missing_path_is_not_created(path: str) -> None:
    assert targets.facts(path).kind == "missing"
    with pytest.raises(errors.TargetError):
        targets.open(path, SIZE)
    assert not os.path.lexists(path)
