"""Clones whose receiver is killed: the next one says what it has, and the same source sends the rest."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import math
import random
import signal
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdi_worker.images.targets import block
from cdi_worker.scratch import journal
from tests.support import clones, devices, oracle, processes, upload_relay, uploads

MIB = uploads.MIB
receiver = clones.receiver
SIZE = 20 * MIB
HOLE = 2 * MIB
#: Bytes per second of a slow target.
SPEED = 4 * MIB
#: Bytes that are sent before the source is held back, and bytes of the disk that are then certainly written,
#: because only a record is on its way.
SENT = 12 * MIB
STORED = SENT + HOLE - 2 * MIB
#: What a saved journal lists at least: what is written in the first second of a clone.
LISTED = 6 * MIB


@pytest.fixture
def speed() -> int:
    """Return the bytes per second of the target; 0: no limit."""
    return 0


@pytest.fixture
def target(request: pytest.FixtureRequest, tmp_path: Path, speed: int) -> Iterator[Path]:
    """Yield a device, or a file; with a ``speed`` on one."""
    with contextlib.ExitStack() as stack:
        if not speed:
            yield stack.enter_context(devices.target(request.param, tmp_path, SIZE))
            return
        room = 2 * SIZE if request.param == "file" else SIZE
        device = stack.enter_context(devices.slow(tmp_path, room, bytes_per_second=speed))
        if request.param == "block":
            yield device
            return
        mounted = stack.enter_context(devices.mounted("ext4", device, tmp_path / "mounted"))
        yield mounted / "disk.img"


def noise(path: Path, seed: int, size: int = SIZE) -> Path:
    """Write a disk of noise with a hole, as qemu-img reads it."""
    data = bytearray(random.Random(seed).randbytes(size))
    data[4 * MIB : 4 * MIB + HOLE] = bytes(HOLE)
    path.write_bytes(data)
    return path


def noted(target: Path) -> int:
    """Return how many bytes the newest journal on a target lists."""
    is_block = target.is_block_device()
    path = target if is_block else target.with_name(f"{target.name}.part")
    most = 0
    with contextlib.suppress(FileNotFoundError), path.open("rb") as stream:
        for number in range(2):
            stream.seek((block.JOURNAL_OFFSET if is_block else SIZE) + number * journal.SLOT)
            head, *lines = stream.read(journal.SLOT).split(b"\n", 2)
            if not head.startswith(b"cdi-worker journal"):
                continue
            with contextlib.suppress(ValueError):
                done = base64.b64decode(json.loads(lines[0])["done"])
                most = max(most, sum(end - start for start, end in struct.iter_unpack(">QQ", done)))
    return most


@dataclasses.dataclass
class Pair:
    """Two receivers, one after the other at the same address, and the volume of the source."""

    first: uploads.Server
    second: uploads.Server
    relay: upload_relay.Relay
    volume: Path
    target: Path
    receiver: clones.Receiver
    log: Path

    def source(self) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
        url = f"https://localhost:{self.relay.port}{uploads.SYNC}"
        env = clones.environment(self.first, "block", self.volume, UPLOAD_URL=url)
        return clones.start_source(env, self.log.with_name("message"))

    @contextlib.contextmanager
    def interrupted(self, number: int = signal.SIGKILL) -> Iterator[subprocess.Popen[bytes]]:
        """Yield the source after a signal has ended the first receiver, which has stored a part of the disk.

        SIGKILL is sent when a journal is saved, SIGTERM when all is written that was sent.
        """
        self.relay.hold(SENT)
        with contextlib.ExitStack() as stack:
            pod = stack.enter_context(clones.target(self.first, self.receiver.paths, self.log))
            sending = stack.enter_context(self.source())
            if number == signal.SIGKILL:
                self.relay.until(lambda: noted(self.target) > LISTED)
            else:
                self.relay.until(lambda: processes.written(pod) >= SENT - MIB)
            pod.send_signal(number)
            pod.wait(60)
            self.relay.allow(math.inf)
            stack.callback(sending.kill)
            yield sending


@pytest.fixture
def pair(receiver: clones.Receiver, target: Path, tmp_path: Path) -> Iterator[Pair]:
    first, second = receiver.replaced({"DESTINATION": str(target)})
    volume = noise(tmp_path / "source.img", 4)
    with upload_relay.Relay(first.port) as relay:
        yield Pair(first, second, relay, volume, target, receiver, tmp_path / "log")


@pytest.mark.parametrize(
    ("target", "number"), [("file", signal.SIGTERM), ("block", signal.SIGKILL)], indirect=["target"]
)
def test_the_next_receiver_keeps_what_the_killed_one_has_stored(
    pair: Pair, target: Path, number: int
) -> None:
    """SIGTERM is what a pod gets that is evicted: it stores what it has received."""
    with pair.interrupted(number) as sending:
        kept = noted(target)
        withheld = block.HEAD if target.is_block_device() else 0
        assert kept >= (LISTED if number == signal.SIGKILL else STORED - withheld)
        oracle.unusable(target)
        with pair.second:
            assert sending.wait(180) == 0
            assert pair.second.result().message == clones.DONE
            assert pair.second.received < SIZE - kept + MIB
    oracle.same(target, pair.volume)


@pytest.mark.parametrize("target", ["file"], indirect=True)
def test_another_run_of_the_source_starts_over(pair: Pair, target: Path) -> None:
    """Nothing says that the volume still holds what was sent earlier. Here it does not."""
    with pair.interrupted() as sending:
        sending.kill()
    noise(pair.volume, 5)
    with pair.second:
        with pair.source() as again:
            assert again.wait(180) == 0
        assert pair.second.received > SIZE - 3 * MIB
    oracle.same(target, pair.volume)


@pytest.mark.parametrize("target", ["block"], indirect=True)
def test_what_storage_has_lost_is_sent_again(pair: Pair, target: Path) -> None:
    with pair.interrupted() as sending:
        with target.open("r+b") as stream:
            stream.seek(2 * MIB + 700)
            stream.write(b"damaged")
        with pair.second:
            assert sending.wait(180) == 0
    oracle.same(target, pair.volume)


@pytest.mark.parametrize("target", ["file"], indirect=True)
@pytest.mark.parametrize("speed", [SPEED])
def test_another_upload_does_not_wait_for_what_it_replaces_to_be_read_back(pair: Pair) -> None:
    with pair.interrupted() as sending, pair.second:
        pair.second.wait_until_busy()
        sending.kill()
        replaced = pair.second.running_upload
        create = {**uploads.TUS, "Upload-Length": "1"}
        assert pair.second.ask("POST", uploads.RESUMABLE, b"", create).status == 201
        assert replaced is not None
        assert replaced.kept.result(0) == (0, 0), "it was read back to its end"


@pytest.mark.parametrize("target", ["block"], indirect=True)
@pytest.mark.parametrize("speed", [2 * SPEED])
def test_reading_back_may_take_longer_than_a_client_may_be_silent(
    pair: Pair, target: Path, speed: int
) -> None:
    with pair.interrupted() as sending, pair.second.with_short_timeouts(noted(target) / speed / 2):
        assert sending.wait(180) == 0
    oracle.same(target, pair.volume)
