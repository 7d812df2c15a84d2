"""Block devices and file systems as targets: normal, full, slow and failing ones.

Every function is a context manager that takes a directory of its own and leaves nothing behind.
Devices start filled with 0xFF, so that a forgotten zero shows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import processes

MiB = 1 << 20

#: What a target holds before the import.
DIRT = b"\xff"

#: Smallest sizes that mkfs accepts, in bytes.
SMALLEST = {
    "ext3": 64 * MiB,
    "ext4": 64 * MiB,
    "btrfs": 110 * MiB,
    "xfs": 300 * MiB,
    "tmpfs": 32 * MiB,
    "ramfs": 0,
}

_MKFS = {
    "ext3": ("mkfs.ext3", "-q", "-F"),  # neither preallocates nor zeroes ranges
    "ext4": ("mkfs.ext4", "-q", "-F"),
    "btrfs": ("mkfs.btrfs", "-q", "-f"),
    "xfs": ("mkfs.xfs", "-q", "-f"),
}


def fill(path: Path, size: int, byte: bytes = DIRT) -> Path:
    """Write a file of ``size`` bytes, all of one value."""
    with path.open("wb") as file:
        for start in range(0, size, MiB):
            file.write(byte * min(MiB, size - start))
    return path


def restore(target: Path, data: bytes) -> None:
    """Make a target the disk with these bytes, as an earlier import has left it; a device is larger."""
    if not target.is_block_device():
        target.write_bytes(b"")
    change(target, 0, data)


def change(path: Path, offset: int, data: bytes) -> None:
    """Write to a file or device, and wait until it is on storage."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def loop(directory: Path, size: int, *, sector: int = 512, dirt: bytes = DIRT) -> Iterator[Path]:
    """Make a block device of ``size`` bytes with direct I/O to a file that is filled with ``dirt``."""
    backing = fill(directory / f"loop-{os.urandom(4).hex()}", size, dirt)
    try:
        with attached(backing, sector=sector) as device:
            yield device
    finally:
        backing.unlink()


@contextlib.contextmanager
def target(kind: str, directory: Path, size: int) -> Iterator[Path]:
    """Yield a target: the path of a new ``file``, or a device of ``size`` bytes.

    ``kind`` of a device: ``block``, its sector size, or both.
    """
    if kind == "file":
        yield directory / "disk.img"
        return
    with loop(directory, size, sector=int(kind.removeprefix("block") or 512)) as device:
        yield device


def targets(*kinds: str, size: int) -> Any:
    """Return a fixture for a test module to call ``target``: a ``target`` of each kind in turn.

    A test may name its own kinds with ``on``, or with a parameter ``target`` that is ``indirect``.
    """

    @pytest.fixture(params=kinds)
    def made(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
        with target(request.param, tmp_path, size) as path:
            yield path

    return made


def on(*kinds: str) -> pytest.MarkDecorator:
    """Return a mark for a test whose ``target`` is of these kinds."""
    return pytest.mark.parametrize("target", kinds, indirect=True)


def beyond(target: Path) -> bytes:
    """Return the byte that must follow the disk: the old content on a device, zero in a file."""
    return DIRT if target.is_block_device() else b"\0"


@contextlib.contextmanager
def attached(backing: Path, *options: str, sector: int = 512, direct: bool = True) -> Iterator[Path]:
    """Attach a file as a loop device; ``options``: losetup's, ``direct``: with direct I/O where it can."""
    processes.need_root()
    processes.need("losetup")
    how = [f"--sector-size={sector}", f"--direct-io={'on' if direct else 'off'}", *options]
    found = processes.run("losetup", "--find", "--show", *how, backing)
    device = Path(found.stdout.strip())
    try:
        yield device
    finally:
        processes.run("losetup", "--detach", device)
        # The kernel closes the file when nobody has the device open any more: some look at all devices.
        processes.wait_for(lambda: not _is_attached(device, backing), f"{device} detached from {backing}")


def _is_attached(device: Path, backing: Path) -> bool:
    try:
        return Path("/sys/block", device.name, "loop/backing_file").read_text().startswith(str(backing))
    except OSError:  # ENOENT, or ENODEV if it is detached between the opening and the read
        return False


@contextlib.contextmanager
def filesystem(kind: str, directory: Path, size: int | None = None) -> Iterator[Path]:
    """Mount a new file system on a device of ``size`` bytes, the smallest possible by default."""
    processes.need_root()
    size = size or SMALLEST[kind]
    point = directory / f"{kind}-{os.urandom(4).hex()}"
    with contextlib.ExitStack() as stack:
        if kind in ("tmpfs", "ramfs"):  # ramfs supports only read and write
            point.mkdir()
            processes.run("mount", "-t", kind, "-o", f"size={size}", kind, point)
            stack.callback(processes.run, "umount", point)
        else:
            backing = point.with_suffix(".device")
            stack.callback(backing.unlink, missing_ok=True)
            with backing.open("wb") as file:
                file.truncate(size)
            device = stack.enter_context(attached(backing))
            stack.enter_context(mounted(kind, device, point))
        yield point


def make_filesystem(kind: str, device: Path) -> None:
    """Make a file system on a device."""
    processes.need(_MKFS[kind][0])
    processes.run(*_MKFS[kind], device)


@contextlib.contextmanager
def mounted(kind: str, device: Path, point: Path) -> Iterator[Path]:
    """Make a file system on a device and mount it."""
    make_filesystem(kind, device)
    point.mkdir()
    processes.run("mount", device, point)
    try:
        yield point
    finally:
        # A thread of a server that was stopped may hold a file for a moment; one that keeps it fails here.
        processes.wait_for(lambda: _unmounted(point), f"{point} to be free")


def _unmounted(point: Path) -> bool:
    return subprocess.run(["umount", point], capture_output=True, check=False).returncode == 0


@contextlib.contextmanager
def read_only(point: Path) -> Iterator[None]:
    """Remount a file system read-only for the duration of the block."""
    processes.run("mount", "-o", "remount,ro", point)
    try:
        yield
    finally:
        processes.run("mount", "-o", "remount,rw", point)


@dataclasses.dataclass(frozen=True)
class Failing:
    """A block device that fails writes with EIO while ``broken``, but never reads."""

    path: Path
    _switch: Path

    def fail(self) -> None:
        """Let every write fail from now on."""
        self._switch.touch()

    def mend(self) -> None:
        """Let writes succeed again."""
        self._switch.unlink(missing_ok=True)


@contextlib.contextmanager
def failing(directory: Path, size: int, *, sector: int = 512) -> Iterator[Failing]:
    """Make a block device whose writes fail on demand."""
    switch = directory / f"broken-{os.urandom(4).hex()}"
    options = ["error=EIO", "error-pwrite-rate=1", f"error-file={switch}"]
    with nbdkit_device(directory, size, ["error"], options, sector=sector) as device:
        try:
            yield Failing(device, switch)
        finally:
            switch.unlink(missing_ok=True)  # cached writes must go somewhere


@contextlib.contextmanager
def slow(directory: Path, size: int, *, bytes_per_second: int, sector: int = 512) -> Iterator[Path]:
    """Make a block device of limited write speed."""
    options = [f"rate={bytes_per_second * 8}", "burstiness=0.2"]
    with nbdkit_device(directory, size, ["rate"], options, sector=sector) as device:
        yield device


@contextlib.contextmanager
def nbdkit_device(
    directory: Path, size: int, filters: Sequence[str], options: Sequence[str], *, sector: int = 512
) -> Iterator[Path]:
    """Make a block device in memory behind nbdkit filters; above 1 GiB it is sparse, not dirty."""
    processes.need_root()
    processes.need("nbdkit", "nbdfuse", "losetup")
    if not Path("/dev/fuse").exists():
        pytest.skip("needs /dev/fuse")
    point = directory / f"fuse-{os.urandom(4).hex()}"
    point.mkdir()
    disk = point / "disk"
    named = [f"--filter={name}" for name in filters]
    memory = ["memory", f"{size}"] if size > 1 << 30 else ["data", f"data=( 0xff )*{size}", f"size={size}"]
    argv: list[str | Path] = [
        "nbdfuse",
        disk,
        "[",
        "nbdkit",
        "--exit-with-parent",
        *named,
        *memory,
        *options,
        "]",
    ]
    with (
        processes.running(argv, log=directory / f"{point.name}.log", ready=disk.exists),
        attached(disk, sector=sector) as device,
    ):
        yield device


def cached(path: Path) -> int:
    """Return how many bytes of a file are in the page cache, as fincore(1) reports."""
    out = processes.run("fincore", "--bytes", "--noheadings", "--output=RES", path).stdout
    return int(out.strip() or 0)
