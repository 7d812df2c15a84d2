"""Clones whose receiver is killed: the next one says what it has, and the same source sends the rest."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdi_worker.images.targets import block
from cdi_worker.importer import contract
from cdi_worker.scratch import journal
from tests.support import clones, devices, oracle, processes, uploads

MIB = uploads.MIB
SIZE = 40 * MIB
SPEED = 8 * MIB


# Not on a device: there the machine's load decides whether the journal is saved within so short a clone.
@pytest.fixture(params=["file"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Yield a slow target: a device, or a file on one."""
    with contextlib.ExitStack() as stack:
        room = 2 * SIZE if request.param == "file" else SIZE
        device = stack.enter_context(devices.slow(tmp_path, room, bytes_per_second=SPEED))
        if request.param == "block":
            yield device
            return
        mounted = stack.enter_context(devices.mounted("ext4", device, tmp_path / "mounted"))
        yield mounted / "disk.img"


def noise(path: Path, seed: int, size: int = SIZE) -> Path:
    """Write a disk of noise with a hole, as qemu-img reads it."""
    data = bytearray(random.Random(seed).randbytes(size))
    data[4 * MIB : 6 * MIB] = bytes(2 * MIB)
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
            head, _, body = stream.read(journal.SLOT).partition(b"\n")
            if not head.startswith(b"cdi-worker journal"):
                continue
            with contextlib.suppress(ValueError):
                record = json.loads(body[: int(head.rpartition(b" ")[2])])
                most = max(most, sum(end - start for start, end in record["granules"] + record["units"]))
    return most


def written(process: subprocess.Popen[bytes]) -> int:
    """Return how many bytes a process has written, also into the page cache."""
    counts = Path(f"/proc/{process.pid}/io").read_text()
    return int(counts.partition("\nwrite_bytes: ")[2].split()[0])


@dataclasses.dataclass
class Pair:
    """Two receivers, one after the other at the same address, and the volume of the source."""

    first: uploads.Server
    second: uploads.Server
    volume: Path
    log: Path

    def source(self) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
        env = clones.environment(self.first, "block", self.volume)
        return clones.start_source(env, self.log.with_name("message"))


@pytest.fixture
def pair(certificates: uploads.Certificates, paths: contract.Paths, target: Path, tmp_path: Path) -> Pair:
    env = {"DESTINATION": str(target)}
    first = uploads.Server(certificates, env, paths)
    second = uploads.Server(certificates, {**env, "LISTEN_PORT": str(first.port)}, paths)
    second.port = first.port
    return Pair(first, second, noise(tmp_path / "source.img", 4), tmp_path / "log")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_next_receiver_keeps_what_the_killed_one_has_stored(
    pair: Pair, paths: contract.Paths, target: Path, number: int
) -> None:
    """SIGTERM is what a pod gets that is evicted: it stores what it has received."""
    with contextlib.ExitStack() as stack:
        pod = stack.enter_context(clones.target(pair.first, paths, pair.log))
        sending = stack.enter_context(pair.source())
        is_killed = number == signal.SIGKILL
        there = functools.partial(noted, target) if is_killed else functools.partial(written, pod)
        processes.wait_for(lambda: there() > 3 * MIB, "a good part of the disk")
        pod.send_signal(number)
        pod.wait(60)
        kept = noted(target)
        assert kept > MIB
        oracle.unusable(target)
        with pair.second:
            assert sending.wait(180) == 0
            assert pair.second.result().message == clones.DONE
            assert pair.second.received < SIZE - kept + 3 * MIB
    oracle.same(target, pair.volume)


def test_another_run_of_the_source_starts_over(pair: Pair, paths: contract.Paths, target: Path) -> None:
    """Nothing says that the volume still holds what was sent earlier. Here it does not."""
    with contextlib.ExitStack() as stack:
        pod = stack.enter_context(clones.target(pair.first, paths, pair.log))
        with pair.source() as sending:
            processes.wait_for(lambda: noted(target) > 3 * MIB, "a good part of the disk")
            pod.kill()
            sending.kill()
        noise(pair.volume, 5)
        stack.enter_context(pair.second)
        with pair.source() as again:
            assert again.wait(180) == 0
        assert pair.second.received > SIZE - 3 * MIB
    oracle.same(target, pair.volume)


def test_what_storage_has_lost_is_sent_again(pair: Pair, paths: contract.Paths, target: Path) -> None:
    with contextlib.ExitStack() as stack:
        pod = stack.enter_context(clones.target(pair.first, paths, pair.log))
        sending = stack.enter_context(pair.source())
        processes.wait_for(lambda: noted(target) > 3 * MIB, "a good part of the disk")
        pod.kill()
        pod.wait(60)
        path = target if target.is_block_device() else target.with_name("disk.img.part")
        with path.open("r+b") as stream:
            stream.seek(2 * MIB + 700)
            stream.write(b"damaged")
        with pair.second:
            assert sending.wait(180) == 0
    oracle.same(target, pair.volume)


def test_another_upload_does_not_wait_for_what_it_replaces_to_be_read_back(
    pair: Pair, paths: contract.Paths, target: Path
) -> None:
    with contextlib.ExitStack() as stack:
        pod = stack.enter_context(clones.target(pair.first, paths, pair.log))
        sending = stack.enter_context(pair.source())
        processes.wait_for(lambda: noted(target) > SIZE // 2, "half of the disk", 60)
        pod.kill()
        pod.wait(60)
        with pair.second:
            pair.second.wait_until_busy()
            sending.kill()
            replaced = pair.second.running_upload
            create = {**uploads.TUS, "Upload-Length": "1"}
            assert pair.second.ask("POST", uploads.RESUMABLE, b"", create).status == 201
            assert replaced is not None
            assert replaced.kept.result(0) == (0, 0), "it was read back to its end"


def test_reading_back_may_take_longer_than_a_client_may_be_silent(
    pair: Pair, paths: contract.Paths, target: Path
) -> None:
    with contextlib.ExitStack() as stack:
        pod = stack.enter_context(clones.target(pair.first, paths, pair.log))
        sending = stack.enter_context(pair.source())
        processes.wait_for(lambda: noted(target) > SIZE // 2, "half of the disk", 60)
        kept = noted(target)
        pod.kill()
        pod.wait(60)
        with pair.second.with_short_timeouts(kept / SPEED / 2):
            assert sending.wait(180) == 0
    oracle.same(target, pair.volume)
