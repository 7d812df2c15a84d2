"""A disk served by a real nbdkit is read by ranges and extents; a lost server is handled."""

from __future__ import annotations

import contextlib
import gc
import random
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("nbd")

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.sources import base, extents
from cdi_worker.sources.nbd import client as nbd
from cdi_worker.sources.nbd import handshake, locations, writer
from cdi_worker.sources.vmware import nbdkit
from tests.support import nbd_targets, processes

MiB, GiB = 1 << 20, 1 << 30


@pytest.fixture(autouse=True)
def _needs() -> None:
    processes.need("nbdkit")


def connected(socket: str, name: str = "disk", cancel: cancelling.Cancel = cancelling.NEVER) -> nbd.Client:
    """Return a client of the server at a unix socket."""
    return nbd.Client(handshake.Server(name, locations.Address(socket=socket)), cancel)


def read(client: nbd.Client, offset: int, length: int) -> bytes:
    into = bytearray(length)
    done = 0
    while done < length:
        done += client.read_range(offset + done, memoryview(into)[done:])
    return bytes(into)


def listed(extents: Iterable[base.Extent]) -> list[tuple[int, int, bool]]:
    return [(extent.offset, extent.length, extent.zero) for extent in extents]


@pytest.fixture
def content(tmp_path: Path) -> tuple[Path, bytes]:
    data = bytearray(random.Random(11).randbytes(9 * MiB + 512))
    data[2 * MiB : 5 * MiB] = bytes(3 * MiB)
    path = tmp_path / "disk"
    with path.open("wb") as file:
        file.write(data[: 2 * MiB])
        file.seek(5 * MiB)
        file.write(data[5 * MiB :])
    return path, bytes(data)


def test_many_threads_read_at_once(content: tuple[Path, bytes]) -> None:
    path, data = content
    wrong: list[int] = []

    def work(seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(50):
            offset = dice.randrange(len(data))
            length = min(dice.choice((1, 512, 70_000, 2 * MiB)), len(data) - offset)
            if read(client, offset, length) != data[offset : offset + length]:
                wrong.append(offset)

    with nbdkit.serve(nbdkit.Plugin("file", {"file": str(path)})) as socket:
        client = connected(socket, "disk")
        assert client.open() == len(data)
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        client.close()
    assert not wrong
    # The times of these reads decide how many connections an import opens.
    assert client.pace.within(1.0)


def test_requests_keep_nothing_of_their_buffers(tmp_path: Path) -> None:
    """Each would keep a MiB, or some hundred bytes of a shared one: libnbd's ``Buffer`` does."""
    memory = bytearray(MiB)
    with nbd_targets.running("nbdkit memory", tmp_path, MiB, dirty=False) as served:
        device = writer.connect(locations.Nbd(""), cancelling.NEVER, served.url)
        before = sys.getrefcount(memory)
        for number in range(20):
            device.write(number * 512, memoryview(memory)[512:1024])
        client = connected(str(tmp_path / "socket"))
        for _ in range(20):
            client.read_range(0, memoryview(memory)[512:1024])
        client.close()
        device.close()
    gc.collect()
    assert sys.getrefcount(memory) == before


@contextlib.contextmanager
def filtered(folder: Path, name: str, *parameters: str) -> Iterator[str]:
    """Serve a disk in memory behind a filter of nbdkit; yield the path of the socket."""
    path = folder / "socket"
    argv = ["nbdkit", "--foreground", f"--unix={path}", f"--filter={name}", "memory", *parameters]
    with nbd_targets.serving([*argv], folder):
        yield str(path)


def test_reads_overlap_on_one_connection(tmp_path: Path) -> None:
    with filtered(tmp_path, "delay", "size=8M", "delay-read=300ms") as socket:
        client = connected(socket, "disk")
        threads = [threading.Thread(target=read, args=(client, number, 1)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(1)
            assert not thread.is_alive()
        client.close()


def test_extents_beyond_32_bits_are_read(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    with path.open("wb") as file:
        file.truncate(20 * GiB)
        file.seek(10 * GiB)
        file.write(b"x" * MiB)
    with nbdkit.serve(nbdkit.Plugin("file", {"file": str(path)})) as socket:
        client = connected(socket, "disk")
        assert listed(extents.coarse(client.extents())) == [
            (0, 10 * GiB, True),
            (10 * GiB, MiB, False),
            (10 * GiB + MiB, 10 * GiB - MiB, True),
        ]
        assert read(client, 10 * GiB - 1, 2) == b"\0x"
        client.close()


def test_long_run_of_data_is_reported_in_parts() -> None:
    with nbdkit.serve(nbdkit.Plugin("pattern", {"size": "5G"})) as socket:
        client = connected(socket, "disk")
        lengths = [extent.length for extent in client.extents()]
        assert sum(lengths) == 5 * GiB
        assert max(lengths) <= GiB
        client.close()


def test_extents_of_a_range_are_read(content: tuple[Path, bytes]) -> None:
    path, _data = content
    with nbdkit.serve(nbdkit.Plugin("file", {"file": str(path)})) as socket:
        client = connected(socket, "disk")
        assert listed(client.extents([(MiB, 3 * MiB), (4 * MiB, 4 * MiB + 512), (6 * MiB, 7 * MiB)])) == [
            (MiB, MiB, False),
            (2 * MiB, MiB, True),
            (4 * MiB, 512, True),
            (6 * MiB, MiB, False),
        ]
        assert listed(client.extents([])) == []
        client.close()


def test_a_cancel_ends_reads_and_later_ones_connect_anew(tmp_path: Path) -> None:
    before = processes.descriptors()
    with filtered(tmp_path, "delay", "size=1M", "delay-read=60") as socket:
        reads = cancelling.Reads(cancelling.Cancel())
        client = connected(socket, "disk", reads)
        for _ in range(2):
            began = time.monotonic()
            with reads.scope() as scope:
                threading.Timer(0.3, scope.set).start()
                with pytest.raises(errors.Cancelled):
                    read(client, 0, 512)
                assert time.monotonic() - began < processes.PATIENCE
        client.close()
    processes.wait_for(lambda: processes.descriptors() <= before, "all is closed")


def test_connection_of_an_ended_attempt_is_not_awaited(tmp_path: Path) -> None:
    """Also if the scope of the attempt has ended before the waiting thread looks at it."""
    path = str(tmp_path / "silent")
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as silent:
        silent.bind(path)
        silent.listen()
        reads = cancelling.Reads(cancelling.Cancel())
        server = handshake.Server("disk", locations.Address(socket=path))
        # What setting a scope does to its callbacks; the scope has ended when they return.
        threading.Timer(0.3, reads._wake).start()
        with pytest.raises(errors.Cancelled):
            handshake.connect(server, reads, 3)


def test_server_survives_a_client_that_leaves_during_reads(tmp_path: Path) -> None:
    """Two nbdkit threads that could not reply both failed an assertion, which ended nbdkit and VDDK."""
    began = threading.Barrier(9)

    def work() -> None:
        began.wait()
        with pytest.raises(errors.Cancelled):
            client.read_range(0, memoryview(bytearray(512)))

    with filtered(tmp_path, "delay", "size=1M", "delay-read=2") as socket:
        reads = cancelling.Reads(cancelling.Cancel())
        client = connected(socket, "disk", reads)
        for _ in range(3):
            assert client.open() == MiB
            threads = [threading.Thread(target=work) for _ in range(8)]
            for thread in threads:
                thread.start()
            began.wait()
            # Until all wait for the server.
            time.sleep(0.3)
            with reads.scope() as scope:
                scope.set()
                for thread in threads:
                    thread.join()
        assert read(client, 0, 512) == bytes(512)
        client.close()


def test_connection_that_failed_is_closed() -> None:
    """Otherwise nbdkit waits for its client, and is killed: VDDK does not end its session with the host."""
    plugin = nbdkit.Plugin("eval", {"open": "echo EIO not now >&2; exit 1", "get_size": "echo 1M"})
    with nbdkit.serve(plugin) as socket:
        client = connected(socket)
        with pytest.raises(errors.SourceError) as caught:
            client.open()
        began = time.monotonic()
    # The exception, which refers to the connection, still exists.
    assert "no export" in str(caught.value)
    assert time.monotonic() - began < 4, "killed after 5 s"


def test_closed_client_opens_no_connection() -> None:
    with nbdkit.serve(nbdkit.Plugin("memory", {"size": "1M"})) as socket:
        client = connected(socket, "disk")
        client.close()
        with pytest.raises(errors.Transient, match="disk: closed"):
            read(client, 0, 512)


def test_lost_server_is_reported() -> None:
    with nbdkit.serve(nbdkit.Plugin("memory", {"size": "1M"})) as socket:
        client = connected(socket, "disk")
    with pytest.raises(errors.Transient):
        read(client, 0, 512)
    with pytest.raises(errors.Transient, match="disk: connect: no such file"):
        read(client, 0, 512)
    client.close()
