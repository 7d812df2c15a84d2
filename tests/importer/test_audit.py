"""``import --verify``: a finished disk is read back, and is what was received."""

from __future__ import annotations

import gzip
import hashlib
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cdi_worker
from cdi_worker import errors
from cdi_worker.images import readback, volume
from cdi_worker.scratch import journal
from tests.support import devices, disks, misbehave, pairs, processes, worker

MIB = 1 << 20
#: Neither a multiple of a unit of digests, nor of a granule.
SIZE = 11 * MIB + 3 * 512
DATA = random.Random(8).randbytes(5 * MIB) + bytes(4 * MIB) + random.Random(9).randbytes(2 * MIB + 3 * 512)


class Doing(cdi_worker.NullProgress):
    """Does something with a disk when it is complete, before it is read back."""

    def __init__(self, path: Path, what: Callable[[Path], object]) -> None:
        self.path, self.what = path, what

    def phase(self, name: str, _total: int | None) -> None:
        if name == "readback":
            self.what(self.path)


def damaging(path: Path, offset: int) -> Doing:
    """Change a byte of the disk."""

    def change(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 1]))

    return Doing(path, change)


def request(url: str, target: Path, **options: Any) -> cdi_worker.Request:
    values = {"existing": "replace", "read_back": True, **options}
    location = cdi_worker.Location(url, access=cdi_worker.Access(patience=2.0))
    return cdi_worker.Request(source="http", location=location, target=str(target), **values)


def served(server: misbehave.Server, form: str, tmp_path: Path) -> str:
    """Serve the disk in a form: of FORMATS, ``raw.gz``, or raw as a ``stream``; return its URL."""
    if form in {"raw", "stream"}:
        return server.serve("/disk", misbehave.Page(DATA, ranges=form == "raw"))
    if form == "raw.gz":
        return server.serve("/disk", misbehave.Page(gzip.compress(DATA, 1)))
    raw, image = tmp_path / "raw", tmp_path / f"image.{form}"
    raw.write_bytes(DATA)
    disks.convert(raw, image, disks.FORMATS[form])
    return server.serve("/disk", misbehave.Page(image.read_bytes()))


@pytest.mark.parametrize(
    ("form", "kind"),
    pairs.dealt(("raw", "stream", "raw.gz", "qcow2", "vmdk-stream", "qcow2-zlib"), ("file", "block")),
)
def test_whole_disk_is_compared_with_what_was_received(
    server: misbehave.Server, tmp_path: Path, form: str, kind: str
) -> None:
    url = served(server, form, tmp_path)
    with devices.target(kind, tmp_path, 16 * MIB) as target:
        done = cdi_worker.run(request(url, target))
        assert (done.confirmed, done.sha256) == (SIZE, hashlib.sha256(DATA).hexdigest())
        for offset in (0, MIB - 1, 7 * MIB, SIZE - 1):
            with pytest.raises(errors.TargetError, match=r"read back: .* bytes differ from those received"):
                cdi_worker.run(request(url, target), damaging(target, offset))


@pytest.mark.parametrize("target", [None, "raw", "qcow2"], ids=["device", "raw", "qcow2"])
def test_hole_or_end_where_data_was_received_is_found(
    server: misbehave.Server, tmp_path: Path, target: str | None
) -> None:
    """Holes are not read back: their place is compared."""
    url = served(server, "raw", tmp_path)

    def punch(path: Path) -> None:
        qemu = ["qemu-io", "-f", target or "raw", "-c", "discard 2M 1M", path]
        processes.run(*qemu) if target == "qcow2" else processes.run("fallocate", "-pn", "-o2M", "-l1M", path)

    with devices.target("file" if target else "block", tmp_path, 16 * MIB) as path:
        made = request(url, path, **({"format": target} if target == "qcow2" else {}))
        with pytest.raises(errors.TargetError, match=r"read back: 1048576 bytes differ .* byte 2097152 on"):
            cdi_worker.run(made, Doing(path, punch))
        if target == "raw":
            with pytest.raises(errors.TargetError, match="read back: 1 bytes are missing"):
                cdi_worker.run(made, Doing(path, lambda path: os.truncate(path, SIZE - 1)))


def test_missing_libnbd_is_found_before_the_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nbd", None)
    target = tmp_path / "disk.qcow2"
    made = request("http://127.0.0.1:9/never-asked", target, format="qcow2")
    with pytest.raises(errors.MissingExtra, match="libnbd"):
        cdi_worker.run(made)
    assert not target.exists()


def test_update_is_read_back_too(server: misbehave.Server, tmp_path: Path) -> None:
    url = served(server, "raw", tmp_path)
    target = tmp_path / "disk.img"
    target.write_bytes(DATA)
    assert cdi_worker.run(request(url, target, existing="update")).confirmed == SIZE
    with pytest.raises(errors.TargetError, match="differ from those received"):
        cdi_worker.run(request(url, target, existing="update"), damaging(target, 10 * MIB))


def test_digest_of_the_source_is_compared(server: misbehave.Server, tmp_path: Path) -> None:
    url = served(server, "raw", tmp_path)
    target = tmp_path / "disk.img"
    checksum = f"sha256:{hashlib.sha256(DATA).hexdigest()}"
    assert cdi_worker.run(request(url, target, checksum=checksum)).confirmed == SIZE
    with pytest.raises(errors.TargetError, match="read back"):
        cdi_worker.run(request(url, target, checksum=checksum), damaging(target, 3))


def test_what_qemu_reads_is_read_back(server: misbehave.Server, tmp_path: Path) -> None:
    url = served(server, "vmdk-odd", tmp_path)
    done = cdi_worker.run(request(url, tmp_path / "disk.img"))
    assert (done.confirmed, done.sha256) == (SIZE, hashlib.sha256(DATA).hexdigest())


def test_killed_import_is_read_back_when_it_is_complete(server: misbehave.Server, tmp_path: Path) -> None:
    processes.need("qemu-img")
    url = server.serve("/disk", misbehave.Page(DATA, stall_at=9 * MIB + 5))
    target = tmp_path / "disk.img"
    few = cdi_worker.FetchOptions(connections=2, chunk=MIB, no_progress=1)
    with pytest.raises(errors.Error):
        cdi_worker.run(request(url, target, fetch=few, journal_interval=0.05))
    server.serve("/disk", misbehave.Page(DATA))
    done = cdi_worker.run(request(url, target, fetch=few))
    assert done.sha256 == hashlib.sha256(DATA).hexdigest()
    assert done.resumed > 0
    assert 0 < done.confirmed < SIZE


def test_digest_of_an_archive_is_refused_at_once(server: misbehave.Server, tmp_path: Path) -> None:
    url = server.serve("/files.tar", misbehave.Page(DATA))
    done = worker.call("import", url, tmp_path, "--content-type=archive", "--verify")
    assert (done.status, server.requests) == (2, [])
    assert "an archive is not a disk" in done.error_message


def test_disk_that_is_cut_off_differs() -> None:
    noted, data = journal.Journal.in_memory(2 * MIB), memoryview(DATA[: 2 * MIB])
    noted.wrote(0, data, noted.digest(0, data))
    compare = readback.Compare(noted, "disk")
    compare.take(volume.Data(0, data[:MIB]))
    compare.end()
    assert (compare.total, compare.differing, compare.first) == (2 * MIB, MIB, MIB)
