"""A source is examined once: bytes read and checked are neither fetched again nor replaced by later ones."""

from __future__ import annotations

import dataclasses
import os
import threading
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker import errors
from cdi_worker.sources.web import http
from tests.support import disks as disks_module
from tests.support import hostile, misbehave, oracle, ways

KIB = 1 << 10
ONE = cdi_worker.FetchOptions(connections=1)


def requested_ranges(server: misbehave.Server) -> list[tuple[int, int]]:
    """Return the requested ranges (start, end), in order."""
    spans = (request.headers["range"].removeprefix("bytes=").split("-") for request in server.gets("/disk"))
    return [(int(first), int(last) + 1) for first, last in spans]


@pytest.mark.parametrize(("variant", "requests"), [("qcow2", 5), ("vmdk", 3), ("raw", 6)])
def test_hardly_a_byte_is_fetched_twice(
    server: misbehave.Server, disks: disks_module.Disks, tmp_path: Path, variant: str, requests: int
) -> None:
    """The ranges of the server are compared: a part of the head and of each table is read twice.

    For qcow2: the head with its header and first table, the second table, the data. For a raw disk the last
    sector is read first: it may be the footer of a fixed VHD.
    """
    data = disks.image(variant).read_bytes()
    ways.import_disk(server.serve("/disk", misbehave.Page(data)), tmp_path / "disk.img", fetch=ONE)
    oracle.same(tmp_path / "disk.img", disks.expected(variant))
    spans = requested_ranges(server)
    # Fewer and longer ones where the server takes long to answer, as it does on a busy machine.
    assert len(spans) <= requests
    assert spans[0] == (0, http.HEAD_SIZE)
    assert sum(end - start for start, end in spans) <= len(data) + 2 * 512 * requests


def test_image_in_the_head_takes_one_request(
    server: misbehave.Server, disks: disks_module.Disks, tmp_path: Path
) -> None:
    data = disks.image("qcow2", "zero").read_bytes()
    assert len(data) <= http.HEAD_SIZE
    ways.import_disk(server.serve("/disk", misbehave.Page(data)), tmp_path / "disk.img", fetch=ONE)
    oracle.same(tmp_path / "disk.img", disks.expected("qcow2", "zero"))
    assert len(requested_ranges(server)) == 1


@pytest.mark.parametrize(
    ("variant", "other"), [("qcow2", "qcow2-backing"), ("vmdk", "vmdk-extent"), ("vhdx", "vhdx-parent")]
)
def test_header_replaced_after_the_check_has_no_effect(
    server: misbehave.Server, disks: disks_module.Disks, tmp_path: Path, variant: str, other: str
) -> None:
    """The header that was checked defines the disk, even if qemu-img reads it.

    The part of the head that is compared has changed for qcow2, which is an error.
    """
    data = disks.image(variant).read_bytes()
    good = misbehave.Page(data, etag=None, modified=None)
    beginning = hostile.image(disks, other).read_bytes()[: http.HEAD_SIZE]
    if variant == "qcow2":
        beginning = beginning.ljust(http.HEAD_SIZE, b"x")
    replaced = dataclasses.replace(good, body=beginning + data[len(beginning) :])
    url = server.serve("/disk", (good, 1), replaced)
    if variant == "qcow2":
        with pytest.raises(errors.SourceChanged, match="beginning"):
            ways.import_disk(url, tmp_path / "disk.img", fetch=ONE)
        return
    ways.import_disk(url, tmp_path / "disk.img", fetch=ONE)
    oracle.same(tmp_path / "disk.img", disks.expected(variant))


@pytest.mark.parametrize("variant", ["raw", "qcow2"])
def test_other_disk_in_the_second_response_is_refused(
    server: misbehave.Server, disks: disks_module.Disks, tmp_path: Path, variant: str
) -> None:
    """A server without an identity stops supporting ranges and sends another disk."""
    data = disks.image(variant).read_bytes()
    first = misbehave.Page(data, etag=None, modified=None)
    other = data[: 32 * KIB] + b"x" + data[32 * KIB + 1 :]
    then = dataclasses.replace(first, body=other, ranges=False)
    with pytest.raises(errors.SourceChanged, match="beginning"):
        ways.import_disk(server.serve("/disk", (first, 1), then), tmp_path / "disk.img", fetch=ONE)
    oracle.unusable(tmp_path / "disk.img")


def test_bz2_from_a_pipe(disks: disks_module.Disks, tmp_path: Path) -> None:
    """Nothing is seen of a disk before 900 kB of it are there, and a pipe gives them once."""
    packed = disks.wrapped("raw", "bz2", "dense")
    assert packed.stat().st_size > 1 << 20
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writing = threading.Thread(target=lambda: pipe.write_bytes(packed.read_bytes()))
    writing.start()
    request = cdi_worker.Request(
        existing="replace",
        source="local",
        location=cdi_worker.Location(str(pipe)),
        target=str(tmp_path / "disk.img"),
    )
    result = cdi_worker.run(request)
    writing.join()
    assert result.compressions == ("bz2",)
    assert result.read == packed.stat().st_size
    oracle.same(tmp_path / "disk.img", disks.expected("raw", "dense"))


def test_bz2_without_ranges_takes_one_request(
    server: misbehave.Server, disks: disks_module.Disks, tmp_path: Path
) -> None:
    data = disks.wrapped("raw", "bz2", "dense").read_bytes()
    ways.import_disk(
        server.serve("/disk", misbehave.Page(data, ranges=False)), tmp_path / "disk.img", fetch=ONE
    )
    oracle.same(tmp_path / "disk.img", disks.expected("raw", "dense"))
    assert len(server.gets("/disk")) == 1
