"""Local files, block devices and pipes as sources."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.sources import base
from cdi_worker.sources.local import file, locations
from tests.support import devices, oracle, processes, vmdk_stream, worker

MIB = 1 << 20
ADVICE = "check the program that writes to it, or wait longer (--stall-timeout)"


def opened(
    path: Path, cancel: cancelling.Cancel | None = None
) -> contextlib.AbstractContextManager[base.Image]:
    return base.open_image(file.source(base.Location(str(path)), cancel or cancelling.Cancel()))


def import_request(path: Path, target: Path) -> cdi_worker.Request:
    return cdi_worker.Request(
        existing="replace", source="local", location=cdi_worker.Location(str(path)), target=str(target)
    )


def test_device_has_no_identity(tmp_path: Path) -> None:
    """The metadata of a device does not show a change of its content, so an interrupted copy starts over."""
    with devices.loop(tmp_path, MIB) as device, opened(device) as image:
        assert image.facts.size == MIB
        assert image.facts.identity is None


def test_file_changed_while_read_is_refused(tmp_path: Path) -> None:
    path = devices.fill(tmp_path / "disk", MIB)
    with opened(path) as image:
        image.verify()
        os.utime(path, ns=(0, 0))
        with pytest.raises(errors.SourceChanged):
            image.verify()


def test_pipe_is_imported(tmp_path: Path) -> None:
    data = os.urandom(MIB + 7)
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_bytes(data))
    writer.start()
    cdi_worker.run(import_request(tmp_path / "pipe", tmp_path / "disk.img"))
    writer.join()
    assert (tmp_path / "disk.img").read_bytes()[: len(data)] == data


def test_pipe_that_must_be_read_twice_is_refused(tmp_path: Path) -> None:
    """A VMDK whose last marker is unknown cannot be placed from a stream."""
    image = bytearray(vmdk_stream.streamed(os.urandom(MIB)))
    image[-512:] = (0).to_bytes(8, "little") + bytes(4) + (9).to_bytes(4, "little") + bytes(496)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "scratch").mkdir()
    writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_bytes(image))
    writer.start()
    request = import_request(tmp_path / "pipe", tmp_path / "disk.img")
    with pytest.raises(errors.Unsupported, match="convert it first"):
        cdi_worker.run(dataclasses.replace(request, scratch=str(tmp_path / "scratch")))
    writer.join()


@contextlib.contextmanager
def falling_silent(pipe: Path, sent: int | None) -> Iterator[None]:
    """Make a pipe whose writer sends so many bytes, and stays; None: there is no writer."""
    os.mkfifo(pipe)
    end = threading.Event()

    def write() -> None:
        with pipe.open("wb", buffering=0) as stream:
            stream.write(os.urandom(sent or 0))
            end.wait(2 * processes.PATIENCE)

    if sent is not None:
        threading.Thread(target=write, daemon=True).start()
    try:
        yield
    finally:
        end.set()


SENT = pytest.mark.parametrize("sent", [None, 0, MIB], ids=["no writer", "silent", "falls silent"])


@SENT
def test_cancel_ends_waiting_for_a_pipe(tmp_path: Path, sent: int | None) -> None:
    cancel = threading.Event()
    threading.Timer(0.3, cancel.set).start()
    started = time.monotonic()
    with falling_silent(tmp_path / "pipe", sent), pytest.raises(errors.Cancelled):
        cdi_worker.run(import_request(tmp_path / "pipe", tmp_path / "disk.img"), cancel=cancel)
    assert time.monotonic() - started < processes.PATIENCE


@SENT
def test_pipe_that_stays_silent_is_given_up(tmp_path: Path, sent: int | None) -> None:
    pipe = tmp_path / "pipe"
    with falling_silent(pipe, sent):
        done = worker.call("import", "--stall-timeout", "1", pipe, tmp_path / "disk.img")
    assert done.status == errors.TransferFailed.status
    at = f"transfer failed at byte {sent}: " if sent else ""
    assert f"{pipe}: {at}no data for 1 s; {ADVICE}" in done.error_message
    oracle.unusable(tmp_path / "disk.img")


def test_silent_standard_input_is_given_up(tmp_path: Path) -> None:
    """It is left in blocking mode, which other programs share."""
    reading, writing = os.pipe()
    try:
        done = subprocess.run(
            [*worker.COMMAND, "import", "-", tmp_path / "disk.img"],
            env={**worker.ENVIRONMENT, "CDI_WORKER_STALL_TIMEOUT": "1"},
            stdin=reading,
            capture_output=True,
            text=True,
            check=False,
            timeout=processes.PATIENCE,
        )
    finally:
        os.close(reading)
        os.close(writing)
    assert done.returncode == errors.TransferFailed.status
    assert f"standard input: no data for 1 s; {ADVICE}" in done.stderr


@contextlib.contextmanager
def trickling(pipe: Path) -> Iterator[None]:
    """Write a byte to a pipe as often as a reader has taken the one before, and a little later."""
    os.mkfifo(pipe)
    end = threading.Event()

    def write() -> None:
        with contextlib.suppress(BrokenPipeError), pipe.open("wb", buffering=0) as stream:
            while not end.wait(0.02):
                stream.write(b"x")

    threading.Thread(target=write, daemon=True).start()
    try:
        yield
    finally:
        end.set()


def test_pipe_that_trickles_is_given_up(tmp_path: Path) -> None:
    request = dataclasses.replace(
        import_request(tmp_path / "pipe", tmp_path / "disk.img"),
        location=cdi_worker.Location(str(tmp_path / "pipe"), cdi_worker.Access(patience=1.0)),
    )
    with (
        trickling(tmp_path / "pipe"),
        pytest.raises(
            errors.Unreachable,
            match=r"only \d+ bytes in 1 s, less than 1.0 KiB per second; .*accept less \(min_speed\)",
        ),
    ):
        cdi_worker.run(request)


def test_pipe_that_trickles_is_read_without_a_floor(tmp_path: Path) -> None:
    access = base.Access(patience=1.0, min_speed=0)
    with trickling(tmp_path / "pipe"):
        made = file.LocalSource(str(tmp_path / "pipe"), cancelling.Cancel(), access)
        made._fd = made._open()
        part = memoryview(bytearray(1))
        assert [made._read_next(at, part) for at in range(75)] == [1] * 75
        made.close()


def test_path_with_zero_byte_is_refused() -> None:
    with pytest.raises(errors.RequestError, match="NUL byte"):
        file.source(base.Location("file:///tmp/%00x"), cancelling.Cancel())


def test_pipe_of_an_ended_attempt_is_not_read_on(tmp_path: Path) -> None:
    """Also if the scope of the attempt has ended before the waiting thread looks at it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reads = cancelling.Reads(cancelling.Cancel())
    location = base.Location(str(pipe), base.Access(patience=3))
    # What setting a scope does to its callbacks; the scope has ended when they return.
    threading.Timer(0.3, reads._wake).start()
    with pytest.raises(errors.Cancelled), base.open_image(file.source(location, reads)):
        pass


def test_file_with_content_and_no_size_is_refused(tmp_path: Path) -> None:
    """A file of procfs was a disk of 0 bytes, and a success."""
    with pytest.raises(errors.Unreachable, match="has content, but its size is 0"):
        cdi_worker.run(import_request(Path("/proc/self/environ"), tmp_path / "disk.img"))
    assert not [*tmp_path.iterdir()]


def test_scheme_may_be_in_capitals(tmp_path: Path) -> None:
    assert locations.path_of(f"FILE://{tmp_path}") == str(tmp_path)


@pytest.mark.parametrize("fault", ["data", "hole", "both", "cut", "backwards", "nowhere"])
def test_what_the_file_system_does_not_tell_is_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    """Real file systems that fail here are broken disks, and FUSE with any answer."""
    size = 8 << 20
    path = tmp_path / "disk"
    with path.open("wb") as sparse:
        sparse.truncate(size)
        os.pwrite(sparse.fileno(), b"x" * 4096, 4 << 20)
    seek = os.lseek

    def failing(fd: int, position: int, whence: int) -> int:
        if (whence, fault) in {(os.SEEK_DATA, "data"), (os.SEEK_HOLE, "hole")} or (
            fault == "both" and whence in {os.SEEK_DATA, os.SEEK_HOLE}
        ):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if whence == os.SEEK_HOLE and fault == "cut":
            raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))
        if whence == os.SEEK_HOLE and fault in {"backwards", "nowhere"}:
            return max(0, position - 512 * (fault == "backwards"))
        return seek(fd, position, whence)

    monkeypatch.setattr(os, "lseek", failing)
    with opened(path) as image:
        assert image.source.extents is not None
        found = list(itertools.islice(image.source.extents(), 100))
    assert sum(each.length for each in found) == size
    assert [each.offset for each in found[1:]] == [each.offset + each.length for each in found[:-1]]
    assert any(each.offset <= 4 << 20 < each.offset + each.length and not each.zero for each in found)
    assert "extents" in caplog.text
