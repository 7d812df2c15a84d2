"""A silent server delays neither a cancel nor an error of the storage."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gzip
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from tests.support import devices, members, misbehave, processes, worker

MIB = 1 << 20
NOISE = random.Random(7).randbytes(16 * MIB)
#: Seconds until the end: less than the shortest timeout, that of a connect.
SOON = processes.PATIENCE


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < seconds


@pytest.fixture(params=["accepts no connection", "answers no handshake", "answers no request"])
def silent(request: pytest.FixtureRequest) -> Iterator[str]:
    """Yield the address of a server that never responds."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listening, contextlib.ExitStack() as stack:
        if request.param == "accepts no connection":
            # The kernel drops connection requests while its queue is full.
            for _ in range(2):
                filling = stack.enter_context(socket.socket())
                filling.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    filling.connect(listening.getsockname())
        scheme = "https" if request.param == "answers no handshake" else "http"
        yield f"{scheme}://127.0.0.1:{listening.getsockname()[1]}/disk"


def request(url: str, target: Path, *, direct: bool = False) -> cdi_worker.Request:
    return cdi_worker.Request(
        existing="replace",
        source="http",
        location=cdi_worker.Location(url),
        target=str(target),
        direct=direct,
    )


def test_cancel_before_the_first_response_ends_the_import(silent: str, tmp_path: Path) -> None:
    cancel = threading.Event()
    threading.Timer(0.5, cancel.set).start()
    with within(SOON), pytest.raises(errors.Cancelled):
        cdi_worker.run(request(silent, tmp_path / "disk.img"), cancel=cancel)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("silent", ["answers no handshake"], indirect=True)
def test_sigterm_before_the_first_response_ends_the_worker(silent: str, tmp_path: Path) -> None:
    with worker.started("-v=1", "import", silent, tmp_path / "disk.img") as process:
        assert process.stderr is not None
        assert "request source=" in process.stderr.readline()
        # Nothing shows that it waits for the response by now.
        time.sleep(0.5)
        with within(SOON):
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == errors.Cancelled.status


def test_cancel_before_a_later_response_ends_the_import(server: misbehave.Server, tmp_path: Path) -> None:
    page = misbehave.Page(NOISE, cut=MIB)
    url = server.serve("/disk", (page, 1), misbehave.Page(silent=True))
    cancel = threading.Event()
    threading.Timer(0.5, cancel.set).start()
    with within(SOON), pytest.raises(errors.Cancelled):
        cdi_worker.run(request(url, tmp_path / "disk.img"), cancel=cancel)


@pytest.fixture(scope="session")
def qcow2(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("qcow2")
    (folder / "raw").write_bytes(NOISE)
    processes.run("qemu-img", "convert", "-f", "raw", "-O", "qcow2", folder / "raw", folder / "qcow2")
    return (folder / "qcow2").read_bytes()


@functools.cache
def packed(image: bytes, form: str) -> bytes:
    if form == "xz":
        return members.xz(image)
    return gzip.compress(image, 1) if form else image


@pytest.mark.parametrize(("form", "ranges"), [("raw", True), ("qcow2", False), ("raw.xz", True)])
def test_failing_write_is_reported_at_once(
    server: misbehave.Server, tmp_path: Path, qcow2: bytes, form: str, ranges: bool
) -> None:
    body = packed(qcow2 if form.startswith("qcow2") else NOISE, form.partition(".")[2])
    url = server.serve("/disk", misbehave.Page(body, ranges=ranges, stall_at=len(body) * 3 // 4))
    # Writes to these are errors.
    options = [f"protect={4 * MIB}-{8 * MIB - 1}"]
    with (
        devices.nbdkit_device(tmp_path, 32 * MIB, ["protect"], options) as device,
        within(SOON),
        pytest.raises(errors.TargetError, match="write"),
    ):
        cdi_worker.run(request(url, device, direct=True))


def test_failure_does_not_set_the_callers_cancel(server: misbehave.Server, tmp_path: Path) -> None:
    body = packed(NOISE, "gz")
    url = server.serve("/disk", misbehave.Page(body, stall_at=len(body) * 3 // 4))
    cancel = cancelling.Cancel()
    options = [f"protect={4 * MIB}-{8 * MIB - 1}"]
    with (
        devices.nbdkit_device(tmp_path, 32 * MIB, ["protect"], options) as device,
        pytest.raises(errors.TargetError, match="write"),
    ):
        cdi_worker.run(request(url, device, direct=True), cancel=cancel)
    assert not cancel.is_set()


@pytest.mark.parametrize("ranges", [True, False], ids=["by ranges", "in order"])
def test_server_that_trickles_is_given_up(server: misbehave.Server, tmp_path: Path, ranges: bool) -> None:
    """Each byte arrives in time, and the disk would never be complete."""
    whole = misbehave.Page(NOISE, ranges=ranges, cut=4 * MIB)
    turns = 2 if ranges else 1
    url = server.serve("/disk", (whole, turns), misbehave.Page(NOISE, ranges=ranges, drip=(1, 0.05)))
    done = worker.call("import", "--stall-timeout", "1", url, tmp_path / "disk.img")
    assert done.status == errors.TransferFailed.status
    # A range keeps the bytes that came, and its next request fails.
    assert ("no data for" if ranges else "--min-speed") in done.error_message


def test_stuck_connection_is_replaced(server: misbehave.Server, tmp_path: Path) -> None:
    """Its time-out is as long as the stall timeout, and all others have ended by then."""
    good = misbehave.Page(NOISE)
    url = server.serve("/disk", (good, 1), (dataclasses.replace(good, stall=0), 1), good)
    done = worker.call("import", "--stall-timeout", "2", url, tmp_path / "disk.img")
    assert done.status == 0, done.errors
    assert (tmp_path / "disk.img").read_bytes() == NOISE


def test_message_of_a_pod_names_no_option_of_the_terminal(server: misbehave.Server, pod: worker.Pod) -> None:
    whole = misbehave.Page(NOISE, ranges=False, cut=4 * MIB)
    url = server.serve("/disk", (whole, 1), misbehave.Page(NOISE, ranges=False, drip=(1, 0.05)))
    assert pod.call(IMPORTER_ENDPOINT=url, CDI_WORKER_STALL_TIMEOUT="1").status == 1
    assert "less than 1.0 KiB per second" in pod.message
    assert "--" not in pod.message


def test_slow_server_is_read_without_a_floor(server: misbehave.Server, tmp_path: Path) -> None:
    url = server.serve("/disk", misbehave.Page(NOISE[:512], drip=(32, 0.1)))
    arguments = ("import", "--stall-timeout", "1", url, tmp_path / "disk.img")
    assert worker.call(*arguments).status != 0
    done = worker.call(*arguments, env={"CDI_WORKER_MIN_SPEED": "0"})
    assert done.status == 0, done.errors
    assert (tmp_path / "disk.img").read_bytes() == NOISE[:512]


def test_slow_storage_is_not_the_sources_fault(server: misbehave.Server, tmp_path: Path) -> None:
    """A write lasts longer than the source may be silent, and its connections break meanwhile."""
    data = NOISE[: 2 * MIB]
    page = misbehave.Page(data, ranges=False)
    url = server.serve("/disk", (dataclasses.replace(page, cut=MIB + MIB // 2), 1), page)
    with devices.nbdkit_device(tmp_path, 2 * MIB, ["delay"], ["wdelay=1500ms"]) as device:
        made = dataclasses.replace(
            request(url, device, direct=True),
            location=cdi_worker.Location(url, cdi_worker.Access(patience=1.0)),
            fetch=cdi_worker.FetchOptions(no_progress=1.0, connections=1),
        )
        cdi_worker.run(made)
        assert device.read_bytes() == data
