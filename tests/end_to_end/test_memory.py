"""A worker with a pod's limits on slow storage: its writes do not pile up in memory."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support import devices, limits, processes, servers, worker
from tests.support import disks as disks_module

MiB, GiB = 1 << 20, 1 << 30
SIZE, DATA = 20 * GiB, 320 * MiB
#: Half the memory of a pod, as the disk is small.
MEMORY = 300 * MiB


@pytest.fixture(scope="module")
def image(disks: disks_module.Disks) -> Path:
    return large(disks)


def large(disks: disks_module.Disks) -> Path:
    """Return a qcow2 image of 20 GiB with more data than the worker may have memory."""

    def make(path: Path) -> None:
        processes.run("qemu-img", "create", "-q", "-f", "qcow2", path, f"{SIZE}")
        noise = path.with_name("noise")
        noise.write_bytes(random.Random(9).randbytes(DATA // 8) * 8)
        write = f"write -q -s {noise} 1M {DATA}"
        processes.run("qemu-io", "-f", "qcow2", "-c", write, path)
        noise.unlink()

    return disks.once("large.qcow2", make)


def test_import_to_slow_storage_stays_below_the_memory_limit(
    image: Path, web: servers.Web, tmp_path: Path
) -> None:
    with (
        devices.slow(tmp_path, 22 * GiB, bytes_per_second=40 * MiB) as device,
        devices.mounted("ext4", device, tmp_path / "volume") as volume,
        limits.cgroup(memory=MEMORY, cpus=0.75) as group,
    ):
        target = volume / "disk.img"
        done = worker.run("import", web.url(image), target, prefix=group.prefix)
        assert done.status == 0, done.errors
        assert group.killed() == 0
        assert group.peak() <= MEMORY
        assert target.stat().st_size == SIZE
        check(target)


def check(guest: Path) -> None:
    """Check that a raw disk is that of the image."""
    noise = random.Random(9).randbytes(DATA // 8)
    with guest.open("rb") as disk:
        disk.seek(MiB)
        assert all(disk.read(len(noise)) == noise for _ in range(8))
