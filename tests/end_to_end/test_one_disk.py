"""A source that is the target under another name is refused, and keeps its bytes."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import chains, devices, nbd_exports, processes, worker

MIB = 1 << 20
SAME = "source and target are the same disk"
BLKPG, ADD_PARTITION, DELETE_PARTITION = 0x1269, 1, 2

#: As ``losetup`` does it.
attached = functools.partial(devices.attached, direct=False)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    path = tmp_path / "source.img"
    path.write_bytes(os.urandom(8 * MIB))
    return path


@contextlib.contextmanager
def partition(device: Path, number: int, start: int) -> Iterator[Path]:
    """Add a partition of 2 MiB to a device, in the kernel only; ``start`` in sectors."""
    with device.open("rb") as file:
        _change_partition(file.fileno(), ADD_PARTITION, number, start * 512, 4096 * 512)
        try:
            yield Path(f"{device}p{number}")
        finally:
            _change_partition(file.fileno(), DELETE_PARTITION, number, 0, 0)


def _change_partition(fd: int, operation: int, number: int, start: int, length: int) -> None:
    """Add or delete a partition as addpart and delpart do (linux/blkpg.h)."""
    about = ctypes.create_string_buffer(struct.pack("qqi64s64sxxxx", start, length, number, b"", b""))
    fcntl.ioctl(fd, BLKPG, struct.pack("iiiP", operation, 0, len(about), ctypes.addressof(about)))


def refused(source: Path, target: Path, *options: str | Path) -> None:
    done = worker.call("import", source, target, *options)
    assert (done.status, SAME in done.errors) == (2, True), done.errors
    assert target.is_block_device() or not list(target.parent.glob(f"{target.name}.*"))


@pytest.mark.parametrize("way", ["file to loop", "loop to file", "loop to loop", "loop on it", "from it"])
def test_loop_device_is_the_file_below(disk: Path, way: str) -> None:
    before = disk.read_bytes()
    with attached(disk) as one, attached(disk) as two, attached(one) as above:
        source, target = {
            "file to loop": (disk, one),
            "loop to file": (one, disk),
            "loop to loop": (one, two),
            "loop on it": (one, above),
            "from it": (above, disk),
        }[way]
        refused(source, target, "--force")
        refused(source, target, "--update")
    assert disk.read_bytes() == before


def test_part_of_a_file_is_that_file_only_there(disk: Path) -> None:
    before = disk.read_bytes()
    half = f"--sizelimit={4 * MIB}"
    with attached(disk, half) as first, attached(disk, half, f"--offset={4 * MIB}") as second:
        refused(disk, second)
        refused(second, disk)
        assert disk.read_bytes() == before
        assert worker.call("import", first, second).status == 0
    assert disk.read_bytes() == before[: 4 * MIB] * 2


@pytest.mark.parametrize("way", ["to the disk", "to the partition"])
def test_partition_is_a_part_of_its_disk(disk: Path, way: str) -> None:
    before = disk.read_bytes()
    with attached(disk) as device, partition(device, 1, 2048) as one, partition(device, 2, 8192) as two:
        refused(*((one, device) if way == "to the disk" else (device, one)))
        refused(disk, two)
        assert disk.read_bytes() == before
        assert worker.call("import", one, two).status == 0
    assert disk.read_bytes()[8192 * 512 :][: 4096 * 512] == before[2048 * 512 :][: 4096 * 512]


def test_image_below_a_loop_device_is_not_its_source(disk: Path, tmp_path: Path) -> None:
    image = tmp_path / "disk.qcow2"
    processes.run("qemu-img", "convert", "-f", "raw", "-O", "qcow2", disk, image)
    before = image.read_bytes()
    with attached(image) as device:
        refused(image, device)
    assert image.read_bytes() == before


def test_layer_below_a_loop_device_is_not_overwritten(tmp_path: Path) -> None:
    chain = chains.Chain(tmp_path)
    files = [chain.base("8M", "write -P 1 0 4M"), chain.overlay("write -P 2 1M 1M")]
    before = files[-1].read_bytes()
    with attached(files[-1]) as device:
        refused(files[0], device, "--layer", files[1])
    assert files[-1].read_bytes() == before


def test_disk_in_the_directory_of_a_volume_is_not_overwritten(disk: Path, tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    shutil.move(disk, volume / "disk.img")
    before = (volume / "disk.img").read_bytes()
    with attached(volume / "disk.img") as device:
        refused(volume, device, "--source", "volume")
    assert (volume / "disk.img").read_bytes() == before


@pytest.mark.parametrize("served", ["source", "target"])
def test_disk_of_a_server_is_found_by_the_record(tmp_path: Path, served: str) -> None:
    """No name says that it is the same: the first sector shows it, which is put back."""
    with devices.loop(tmp_path, 8 * MIB) as device:
        data = os.urandom(8 * MIB)
        devices.restore(device, data)
        if served == "source":
            with nbd_exports.qemu_nbd(tmp_path, device) as port:
                done = worker.call("import", f"nbd://127.0.0.1:{port}/", device)
        else:
            socket = tmp_path / "socket"
            command: list[str | Path] = ["qemu-nbd", "--format=raw", f"--socket={socket}", device]
            with processes.running(
                command, log=tmp_path / "log", ready=functools.partial(processes.has_listener, socket)
            ):
                done = worker.call("import", device, f"nbd+unix:///?socket={socket}")
        assert (done.status, SAME in done.errors) == (2, True), done.errors
        assert device.read_bytes() == data


def test_file_of_another_mount_namespace_is_another_disk(disk: Path, tmp_path: Path) -> None:
    """A loop device shows the path of its file as that was where it was set up."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    shutil.copy(disk, folder / "disk.img")
    with attached(folder / "disk.img") as device, devices.filesystem("tmpfs", tmp_path) as other:
        (other / "disk.img").write_bytes(bytes(MIB) + b"other".ljust(MIB))
        shell = ("unshare", "--mount", "sh", "-c", f'mount --bind "{other}" "{folder}" && exec "$@"', "sh")
        done = worker.run("import", folder / "disk.img", device, prefix=shell)
        assert done.status == 0, done.errors
        assert device.read_bytes()[: 2 * MIB] == (other / "disk.img").read_bytes()


def test_name_of_a_file_below_may_be_any_bytes(disk: Path, tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"\xff\xe9.img")
    shutil.copy(disk, odd)
    other = tmp_path / "other.img"
    other.write_bytes(bytes(8 * MIB))
    with attached(odd) as device:
        assert worker.call("import", other, device).status == 0
        refused(odd, device)
