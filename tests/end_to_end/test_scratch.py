"""Streamed images that cannot be placed in one pass, or not in memory alone."""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import (
    contract,
    devices,
    misbehave,
    processes,
    qcow2_images,
    vhdx_images,
    vmdk_stream,
    worker,
)

MIB = 1 << 20


def more_than_memory(folder: Path) -> bytes:
    """Write a disk; return a qcow2 image of it with the tables behind more data than is kept in memory."""
    with (folder / "expected").open("wb") as raw:
        for number in range(80):
            raw.write(struct.pack(">Q", number) * (MIB // 8))
    return qcow2_images.tables_last(converted(folder))


def more_than_one_pass(folder: Path) -> bytes:
    """Write a disk; return a VMDK image of it with a marker that only other programs may know."""
    content = random.Random(5).randbytes(2 * MIB)
    (folder / "expected").write_bytes(content)
    image = bytearray(vmdk_stream.streamed(content))
    (directory,) = struct.unpack_from("<Q", image, len(image) - 1024 + 56)
    (table,) = struct.unpack_from("<I", image, directory * vmdk_stream.SECTOR)
    struct.pack_into("<I", image, (table - 1) * vmdk_stream.SECTOR + 12, 9)
    return bytes(image)


def converted(folder: Path) -> bytes:
    processes.run("qemu-img", "convert", "-f", "raw", "-O", "qcow2", folder / "expected", folder / "image")
    return (folder / "image").read_bytes()


@pytest.mark.parametrize("make", [more_than_memory, more_than_one_pass])
def test_scratch_is_requested_and_used(
    server: misbehave.Server, pod: worker.Pod, tmp_path: Path, make: Callable[[Path], bytes]
) -> None:
    image = make(tmp_path)
    url = server.serve("/disk", misbehave.Page(image, ranges=False))
    first = pod.call(IMPORTER_ENDPOINT=url)
    assert (first.status, pod.message) == (0, contract.NEEDS_SCRATCH), first.errors
    assert not [*pod.data.iterdir()]
    pod.has_scratch = True
    second = pod.call(IMPORTER_ENDPOINT=url)
    assert (second.status, pod.message) == (0, contract.COMPLETE), second.errors
    assert ("plan spool" in second.errors) == (make is more_than_one_pass)
    contract.check_disk(pod, tmp_path / "expected")
    assert not [*pod.scratch.iterdir()]


def test_killed_conversion_leaves_room_for_the_next_run(server: misbehave.Server, tmp_path: Path) -> None:
    """Scratch has no space for the image of the killed run and another one."""
    (tmp_path / "raw").write_bytes(random.Random(6).randbytes(40 * MIB))
    body = vhdx_images.logged((tmp_path / "raw").read_bytes())
    url = server.serve("/disk", misbehave.Page(body, ranges=False))
    checksum = f"--checksum=sha256:{hashlib.sha256(body).hexdigest()}"
    with devices.filesystem("tmpfs", tmp_path, 64 * MIB) as scratch:
        arguments = ("import", url, tmp_path / "disk.img", checksum, "--scratch", scratch)
        with worker.started(*arguments) as first:
            processes.wait_for(lambda: [*scratch.glob("*/image")], "the image to be complete")
            first.kill()
        assert [*scratch.glob("*/image")]
        second = worker.run(*arguments)
        assert second.status == 0, second.errors
        assert not [*scratch.iterdir()]
    assert (tmp_path / "disk.img").read_bytes() == (tmp_path / "raw").read_bytes()
