"""A block device as target: opened exclusively, never created or removed, its head written last."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import os
import random
import threading
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.images import kernel, targets
from cdi_worker.images.targets import block as block_module
from tests.support import devices, oracle, processes

MiB = 1 << 20


def test_head_is_written_last(block: Path) -> None:
    with targets.open(block, 4 * MiB) as disk:
        assert disk.withheld == MiB
        assert without_record(block) == bytes(MiB) + devices.DIRT * 31 * MiB
        disk.write(0, memoryview(b"x" * 4 * MiB))
        disk.flush()
        assert without_record(block)[: 4 * MiB] == bytes(MiB) + b"x" * 3 * MiB
        disk.commit()
    assert block.read_bytes() == b"x" * 4 * MiB + b"\xff" * 28 * MiB


def without_record(device: Path) -> bytes:
    """Return the content of a device, with zeros for the record of the run in its first sector."""
    content = device.read_bytes()
    assert content.startswith(oracle.RECORD)
    return bytes(512) + content[512:]


def test_preallocation_writes_every_byte(tmp_path: Path) -> None:
    backing = tmp_path / "sparse"
    with backing.open("wb") as file:
        file.truncate(16 * MiB)
    with (
        devices.attached(backing) as device,
        targets.open(device, 16 * MiB, targets.TargetOptions(preallocate=True)) as disk,
    ):
        disk.zero(0, 16 * MiB)
        disk.commit()
    assert backing.stat().st_blocks * 512 >= 16 * MiB


def test_zeroing_frees_storage(tmp_path: Path) -> None:
    backing = devices.fill(tmp_path / "full", 16 * MiB)
    with devices.attached(backing) as device, targets.open(device, 16 * MiB) as disk:
        disk.zero(0, 16 * MiB)
        disk.commit()
    assert backing.stat().st_blocks * 512 <= 2 * MiB


class CancelAfter:
    """A cancel that is set after being checked a number of times."""

    def __init__(self, checks: int) -> None:
        self.checks = checks

    def is_set(self) -> bool:
        self.checks -= 1
        return self.checks < 0


@pytest.mark.parametrize("preallocate", [True, False])
def test_cancel_interrupts_long_zeroing(tmp_path: Path, preallocate: bool) -> None:
    size = 96 * MiB
    backing = devices.fill(tmp_path / "full", size)
    with devices.attached(backing) as device:
        options = targets.TargetOptions(preallocate=preallocate, cancel=CancelAfter(2))
        with targets.open(device, size, options) as disk, pytest.raises(errors.Cancelled):
            disk.zero(0, size)
        # The second step may be twice as long as the first.
        assert device.read_bytes()[64 * MiB :] == devices.DIRT * (size - 64 * MiB)
        oracle.unusable(device)


def test_record_stays_until_the_disk_is_complete(block: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is killed between two writes leaves the old disk, the new one, or its record."""
    old, new = (random.Random(seed).randbytes(4 * MiB) for seed in (1, 2))
    devices.restore(block, old)
    heads: list[bytes] = []
    put = block_module.BlockStorage._put

    def observed(self: block_module.BlockStorage, offset: int, data: memoryview) -> None:
        put(self, offset, data)
        os.fsync(self.fd)
        heads.append(block.read_bytes()[:MiB])

    monkeypatch.setattr(block_module.BlockStorage, "_put", observed)
    with targets.open(block, 4 * MiB) as disk:
        disk.write(0, memoryview(new))
        disk.commit()
    assert len(heads) > 4
    assert [head for head in heads if not head.startswith(oracle.RECORD)] == [new[:MiB]]


@pytest.mark.parametrize(("block", "at_first"), [(512, True), (4096, False)], indirect=["block"])
def test_abandoned_target_does_not_read_the_source_again(block: Path, at_first: bool) -> None:
    """It may be closed or cancelled by then, and the target must be closed all the same."""
    reads: list[int] = []

    def sectors() -> list[bytes]:
        reads.append(1)
        if at_first or len(reads) > 1:
            raise errors.Cancelled
        return [b""]

    before = processes.descriptors()
    with (
        contextlib.suppress(errors.Cancelled),
        targets.open(block, MiB, targets.TargetOptions(sectors=sectors)),
    ):
        assert not at_first
    assert reads == [1]
    assert processes.descriptors() == before
    assert not any(without_record(block)[:MiB])


@pytest.mark.parametrize(
    ("block", "size", "is_known", "end"),
    [
        (512, 1000, True, 1024),
        (4096, 1000, True, 1024),
        # The old head is zeroed at the start: how much of it the image needs is not known then.
        (512, 1000, False, MiB),
        (4096, 1000, False, MiB),
        (512, MiB + 100, False, MiB + 512),
        (4096, MiB + 511, False, MiB + 512),
        (512, 2 * MiB + 1, False, 2 * MiB + 512),
    ],
    indirect=["block"],
)
def test_rest_of_the_last_sector_is_zeroed_and_no_more(
    block: Path, size: int, is_known: bool, end: int
) -> None:
    with targets.open(block, size if is_known else None) as disk:
        disk.write(0, memoryview(b"x" * size))
        disk.commit(32 * MiB)
    assert block.read_bytes() == (b"x" * size).ljust(end, b"\0").ljust(32 * MiB, devices.DIRT)


@pytest.mark.parametrize(
    ("size", "direct"), [(512, False), (3 * 512, True), (MiB + 512, False), (3 * MiB + 5 * 512, True)]
)
def test_device_of_any_size_is_written_to_the_last_sector(tmp_path: Path, size: int, direct: bool) -> None:
    content = os.urandom(size)
    with devices.loop(tmp_path, size) as device:
        with targets.open(device, size, targets.TargetOptions(direct=direct)) as disk:
            disk.write(0, memoryview(content))
            disk.commit()
        assert device.read_bytes() == content
        with targets.open(device, None) as disk:
            disk.zero(0, size)
            disk.commit()
        assert device.read_bytes() == bytes(size)


def test_stream_of_unknown_size_ends_with_the_device(tmp_path: Path) -> None:
    with devices.loop(tmp_path, 4 * MiB) as device:
        with targets.open(device, None) as disk:
            disk.zero(3 * MiB, MiB)
            for call in (
                lambda: disk.write(4 * MiB - 1, memoryview(b"xx")),
                lambda: disk.zero(3 * MiB, MiB + 1),
            ):
                with pytest.raises(errors.TooLarge):
                    call()
        oracle.unusable(device)


@pytest.mark.parametrize("block", [512], indirect=True)
def test_too_small_device_is_refused(block: Path) -> None:
    with pytest.raises(errors.TooLarge, match="larger than the reported available storage 33554432"):
        targets.open(block, 32 * MiB + 1)
    assert block.read_bytes()[:MiB] == b"\xff" * MiB


def test_mounted_device_is_refused(tmp_path: Path) -> None:
    with devices.filesystem("ext4", tmp_path) as point:
        device = next(
            line.split()[0] for line in Path("/proc/mounts").read_text().splitlines() if str(point) in line
        )
        with pytest.raises(errors.TargetError, match="busy"):
            targets.open(device, MiB)


def test_device_node_is_never_removed(tmp_path: Path) -> None:
    with devices.loop(tmp_path, 4 * MiB) as device:
        node = tmp_path / "node"
        os.mknod(node, device.stat().st_mode, device.stat().st_rdev)
        with targets.open(node, 4 * MiB) as disk:
            disk.write(0, memoryview(b"x"))
        assert node.is_block_device()
        node.unlink()


def write_to(device: devices.Failing, when: str, options: targets.TargetOptions) -> None:
    data = memoryview(os.urandom(8 * MiB))
    with targets.open(device.path, 16 * MiB, options) as disk:
        if when == "before":
            device.fail()
        disk.write(2 * MiB, data[: 4 * MiB + 100])
        if when == "between":
            device.fail()
            disk.write(7 * MiB, data[:MiB])
            sync_by_another_process(device.path)
            device.mend()
        if when == "at commit":
            disk.flush()
            disk.write(0, data[:MiB])
            device.fail()
        try:
            disk.commit()
        finally:
            device.mend()


def sync_by_another_process(path: Path) -> None:
    """Consume the write error for descriptors opened later, not for those already open."""
    with path.open("rb") as other, contextlib.suppress(OSError):
        os.fsync(other.fileno())


@pytest.mark.parametrize(
    ("when", "direct"),
    [("before", False), ("before", True), ("between", False), ("at commit", False), ("at commit", True)],
)
def test_lost_write_is_an_error(tmp_path: Path, when: str, direct: bool) -> None:
    with devices.failing(tmp_path, 16 * MiB) as device:
        with pytest.raises(errors.TargetError, match="input/output error"):
            write_to(device, when, targets.TargetOptions(direct=direct))
        device.mend()
        oracle.unusable(device.path)


@pytest.mark.parametrize(
    ("block", "unreadable", "expected"),
    [
        (512, range(1), [(0, 4096), (4096, 0)]),
        (4096, range(1), [(0, 4096), (4096, 0)]),
        (512, range(1, 2), [(0, 0)]),
        (4096, range(256), [(page * 4096, 4096) for page in range(256)]),
    ],
    indirect=["block"],
)
def test_old_disk_that_cannot_be_read_is_disabled_first(
    block: Path, monkeypatch: pytest.MonkeyPatch, unreadable: range, expected: list[tuple[int, int]]
) -> None:
    """A power cut may tear the write of the head: the sector that makes a disk usable is zeroed before.

    Length 0: one sector.
    """
    read, write, sync = os.pread, os.pwrite, os.fsync
    calls: list[tuple[int, int] | str] = []

    def pread(fd: int, length: int, offset: int) -> bytes:
        if any(offset < (page + 1) * 4096 and page * 4096 < offset + length for page in unreadable):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(fd, length, offset)

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        calls.append((offset, len(data)))
        return write(fd, data, offset)

    def fsync(fd: int) -> None:
        calls.append("sync")
        sync(fd)

    monkeypatch.setattr(os, "pread", pread)
    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(os, "fsync", fsync)
    with targets.open(block, 4 * MiB):
        before = calls[: calls.index((0, MiB))]
    with block.open("rb") as device:
        sector = kernel.sector_size(device.fileno())
    writes = [(offset, length or sector) for offset, length in expected]
    # Before the first one, what an earlier run may have left in the page cache alone.
    assert before == ["sync", *(step for each in writes for step in (each, "sync"))]


@pytest.mark.parametrize("block", [512], indirect=True)
def test_head_that_another_run_has_overwritten_is_not_reported_as_written(
    block: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, size = os.fsync, 4 * MiB

    def fsync(fd: int) -> None:
        sync(fd)
        if os.pread(fd, 4, 0) == b"mine":
            os.pwrite(fd, b"their", 0)

    with targets.open(block, size) as disk:
        disk.write(0, memoryview(b"mine" * MiB))
        monkeypatch.setattr(os, "fsync", fsync)
        with pytest.raises(errors.TargetLost, match="another run has written to its beginning"):
            disk.commit()
    assert block.read_bytes()[:5] == b"their"


def test_failure_is_remembered(tmp_path: Path) -> None:
    with devices.failing(tmp_path, 16 * MiB) as device:
        with targets.open(device.path, 16 * MiB) as disk:
            device.fail()
            with contextlib.suppress(errors.TargetError):
                disk.write(2 * MiB, memoryview(b"x" * MiB))
            with pytest.raises(errors.TargetError):
                disk.flush()
            device.mend()
            for call in (
                disk.flush,
                disk.commit,
                lambda: disk.write(0, memoryview(b"x")),
                lambda: disk.zero(0, 1),
            ):
                with pytest.raises(errors.TargetError, match="input/output error"):
                    call()
        oracle.unusable(device.path)


@pytest.mark.parametrize("block", [512], indirect=True)
def test_flush_waits_for_zeroing_in_another_thread(block: Path) -> None:
    """Otherwise a journal would claim a range that is not zeroed after a kill."""
    started, go = threading.Event(), threading.Event()

    def slow(fd: int, offset: int, length: int) -> None:
        started.set()
        go.wait(processes.PATIENCE)
        kernel.punch_hole(fd, offset, length)

    with targets.open(block, 32 * MiB) as disk:
        disk.storage.zero_by((slow,), 4096)
        for start in range(2 * MiB, 6 * MiB, MiB // 4):
            disk.zero(start, 4096)  # as many runs as may grow side by side
        zeroing_thread = threading.Thread(target=disk.zero, args=(8 * MiB, 4096))
        zeroing_thread.start()
        started.wait(processes.PATIENCE)
        flushing = threading.Thread(target=disk.flush)
        started.clear()
        flushing.start()
        assert not started.wait(0.2), "the flush went past the run that is under way"
        go.set()
        flushing.join()
        zeroing_thread.join()


@pytest.mark.parametrize("block", [512], indirect=True)
def test_refresh_is_not_lost_to_a_thread_of_its_own(block: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread makes the first change, while another looks whether others have written."""
    begun = threading.Event()
    require = block_module.BlockStorage.require_unchanged
    options = targets.TargetOptions(mode="update", begun=lambda _: begun.set())
    with targets.open(block, 32 * MiB, options) as disk:
        changing = threading.Thread(target=disk.write, args=(2 * MiB, memoryview(b"x" * MiB)))

        def slow(storage: block_module.BlockStorage) -> None:
            if threading.current_thread() is threading.main_thread():
                changing.start()
                begun.wait(0.2)
            require(storage)

        monkeypatch.setattr(block_module.BlockStorage, "require_unchanged", slow)
        disk.flush()
        changing.join()
        assert begun.is_set()
        disk.commit()


def mounted(device: Path, point: Path) -> contextlib.AbstractContextManager[object]:
    point.mkdir()
    processes.run("mkfs.ext4", "-q", "-F", device)
    processes.run("mount", device, point)
    undo = contextlib.ExitStack()
    undo.callback(processes.run, "umount", point)
    return undo


@pytest.mark.parametrize("direct", [False, True])
def test_file_on_a_failing_device_is_an_error(tmp_path: Path, direct: bool) -> None:
    with devices.failing(tmp_path, 64 * MiB) as device, mounted(device.path, tmp_path / "mounted"):
        path = tmp_path / "mounted" / "disk.img"
        with targets.open(path, 8 * MiB, targets.TargetOptions(direct=direct)) as disk:
            device.fail()
            with pytest.raises(errors.TargetError, match=r"input/output error|read-only"):
                write_and_commit(disk, os.urandom(8 * MiB))
        device.mend()
        oracle.unusable(path)


def write_and_commit(disk: targets.Target, content: bytes) -> None:
    disk.write(0, memoryview(content))
    disk.commit()


@pytest.mark.parametrize(("sector", "seed"), [(512, 0), (512, 1), (4096, 2), (4096, 3)])
def test_threads_that_share_sectors_lose_nothing(tmp_path: Path, sector: int, seed: int) -> None:
    """Data and holes of any length, out of order: their ends share sectors and pages of the cache."""
    dice = random.Random(seed)
    size = 6 * MiB
    expected = bytearray(size)
    pieces = []
    start = 0
    while start < size:
        end = min(size, start + 512 * dice.choice([1, 1, 2, 3, 5, 7, 9, 40]))
        if dice.random() < 0.6:
            expected[start:end] = dice.randbytes(end - start)
        pieces.append((start, end))
        start = end
    blocks = [pieces[at : at + 48] for at in range(0, len(pieces), 48)]
    shuffled = [piece for block in blocks for piece in dice.sample(block, len(block))]
    with devices.loop(tmp_path, size + MiB, sector=sector) as device:
        options = targets.TargetOptions(direct=bool(seed % 2))
        with targets.open(device, size, options) as disk:

            def put(piece: tuple[int, int]) -> None:
                data = memoryview(expected)[slice(*piece)]
                if any(data):
                    disk.write(piece[0], data)
                else:
                    disk.zero(piece[0], len(data))

            with concurrent.futures.ThreadPoolExecutor(6) as pool:
                list(pool.map(put, shuffled))
            disk.commit()
        (tmp_path / "expected").write_bytes(expected)
        oracle.same(device, tmp_path / "expected", beyond=devices.DIRT)


@pytest.mark.parametrize(("sector", "of"), [(512, 512), (512, 4096), (4096, 512)])
def test_partition_table_of_other_sectors_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, sector: int, of: int
) -> None:
    with devices.loop(tmp_path, 8 * MiB, sector=of) as source:
        processes.run("sh", "-c", f"printf 'label: gpt\n,,L\n' | sfdisk --quiet --no-reread {source}")
        image = source.read_bytes()
    with devices.loop(tmp_path, 8 * MiB, sector=sector) as device:
        for mode in ("new", "update"):
            caplog.clear()
            with targets.open(device, len(image), targets.TargetOptions(mode=mode)) as disk:
                if mode == "new":
                    disk.write(0, memoryview(image))
                disk.commit()
            message = (
                f"{device} has sectors of {sector} bytes, the partition table is for {of}: the disk does "
                f"not boot from it, except in a virtual machine that sees sectors of {of} bytes"
            )
            assert [each.getMessage() for each in caplog.records] == [message] * (of != sector)
