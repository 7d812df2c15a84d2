"""Raw disks that come in order are delivered to a target, and nothing continues after a failure."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from cdi_worker import errors
from cdi_worker.images import targets
from cdi_worker.images.disks import base, raw
from cdi_worker.images.engine import ahead, cancelling
from cdi_worker.images.sinks import delivery
from cdi_worker.importer import reading
from tests.support import devices, oracle, pairs, processes

MiB = 1 << 20
target = devices.targets("file", "block512", "block4096", size=16 * MiB)


class Bytes:
    """A reader of ``content`` in pieces of different sizes, which may fail at the end."""

    def __init__(self, content: bytes, failure: BaseException | None = None) -> None:
        self.content = memoryview(content)
        self.failure = failure
        self.chance = random.Random(len(content))

    def readinto(self, into: memoryview, /) -> int:
        count = min(len(into), len(self.content), self.chance.choice([1, 4096, MiB, 3 * MiB]))
        if count == 0 and self.failure:
            raise self.failure
        into[:count] = self.content[:count]
        self.content = self.content[count:]
        return count


class Endless:
    def readinto(self, into: memoryview, /) -> int:
        into[0] = 1
        return len(into)


def deliver(disk: base.Disk, target: targets.Target, limit: int) -> int:
    return disk.deliver(delivery.DeliverySink(target, limit), base.EVERYTHING, base.DeliveryMeter())


def stream(reader: object, cancel: cancelling.Cancel | None = None) -> base.Disk:
    opened = contextlib.nullcontext(reader)
    return raw.StreamDisk(lambda _: opened, cancel or cancelling.Cancel(), footer=False)


def disk_like(size: int) -> bytes:
    chance = random.Random(size)
    content = bytearray(size)
    offset = 0
    while offset < size:
        length = min(size - offset, chance.choice([512, 4096, 65536, 100_000, MiB]))
        if chance.random() < 0.5:
            content[offset : offset + length] = chance.randbytes(length)
        offset += length
    return bytes(content)


#: With each size at which something ends, each kind of target.
SIZES = (0, 1, 511, 512, 513, MiB, ahead.CHUNK - 1, ahead.CHUNK, ahead.CHUNK + 1, 9 * MiB + 77)


@pytest.mark.parametrize(
    ("size", "target"), pairs.dealt(SIZES, ["file", "block512", "block4096"]), indirect=["target"]
)
def test_copy_is_that_of_qemu_img(tmp_path: Path, target: Path, size: int) -> None:
    source, expected = tmp_path / "source", tmp_path / "expected"
    source.write_bytes(disk_like(size))
    processes.run("qemu-img", "convert", "-f", "raw", "-O", "raw", source, expected)
    with targets.open(target, None) as disk:
        assert deliver(stream(Bytes(source.read_bytes())), disk, 16 * MiB) == size
        disk.commit()
    oracle.same(target, expected, beyond=None)
    assert target.is_block_device() or target.stat().st_size == expected.stat().st_size


def copy_to(path: Path, reader: object, limit: int, cancel: cancelling.Cancel | None = None) -> int:
    with targets.open(path, None) as disk:
        return deliver(stream(reader, cancel), disk, limit)


def runs(*each: base.Run) -> base.Disk:
    opened = contextlib.nullcontext(iter(each))
    return raw.RunsDisk(lambda _: opened, cancelling.Cancel())


def test_copy_up_to_the_limit_is_allowed(tmp_path: Path) -> None:
    assert copy_to(tmp_path / "disk.img", Bytes(disk_like(5 * MiB)), 5 * MiB) == 5 * MiB
    with pytest.raises(errors.TooLarge, match="larger than the reported available storage 5242880"):
        copy_to(tmp_path / "disk.img", Bytes(disk_like(5 * MiB + 1)), 5 * MiB)


def test_runs_are_written_in_order(tmp_path: Path) -> None:
    data = disk_like(MiB)
    with targets.open(tmp_path / "disk.img", None) as disk:
        each = 8 * MiB, memoryview(data), memoryview(b"x" * 512), 3 * MiB
        size = deliver(runs(*each), disk, 12 * MiB + 512)
        disk.commit()
    assert size == 12 * MiB + 512
    assert (tmp_path / "disk.img").read_bytes() == bytes(8 * MiB) + data + b"x" * 512 + bytes(3 * MiB)
    assert (tmp_path / "disk.img").stat().st_blocks * 512 < 2 * MiB


@pytest.mark.parametrize("last", [1 << 62, memoryview(b"x" * 512)], ids=["hole", "data"])
def test_run_beyond_the_limit_is_not_written(tmp_path: Path, last: int | memoryview) -> None:
    with devices.loop(tmp_path, 2 * MiB) as device:
        with targets.open(device, None) as disk, pytest.raises(errors.TooLarge):
            deliver(runs(MiB, last), disk, MiB + 511)
        assert device.read_bytes()[MiB:] == devices.DIRT * MiB


def test_endless_stream_ends_at_the_limit(tmp_path: Path) -> None:
    with pytest.raises(errors.TooLarge):
        copy_to(tmp_path / "disk.img", Endless(), 10 * MiB)
    assert os.listdir(tmp_path) == []


def test_error_of_the_reader_is_raised(tmp_path: Path) -> None:
    failure = errors.Truncated(format="gz", reason="for a test")
    before = set(threading.enumerate())
    with pytest.raises(errors.Truncated) as raised:
        copy_to(tmp_path / "disk.img", Bytes(disk_like(9 * MiB), failure), 16 * MiB)
    assert raised.value is failure
    assert set(threading.enumerate()) <= before


def test_rest_of_a_stream_is_read_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "SHORTEST_LIMIT", 3 * MiB)

    def drain(count: int, size: int | None = None) -> None:
        facts = types.SimpleNamespace(size=size)
        survey = types.SimpleNamespace(available=0, compressions=())
        attempt: Any = types.SimpleNamespace(facts=facts, survey=survey, scope=cancelling.NEVER)
        reading.drain(attempt, Bytes(bytes(count)))

    drain(3 * MiB)
    drain(3 * MiB + 1, size=4 * MiB)
    with pytest.raises(errors.Refused, match="more than 3145728 bytes follow the end of the image"):
        drain(3 * MiB + 1)
