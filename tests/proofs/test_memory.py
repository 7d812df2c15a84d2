"""Memory of a worker that writes to QEMU: to a qcow2 file, or to an NBD export."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end import test_memory
from tests.support import disks as disks_module
from tests.support import limits, nbd_targets, processes, servers, worker

#: Of the worker and of QEMU's server.
SERVED = 256 << 20


@pytest.fixture(scope="module")
def image(disks: disks_module.Disks) -> Path:
    return test_memory.large(disks)


def test_qcow2_file_is_written_within_the_memory_limit(image: Path, web: servers.Web, tmp_path: Path) -> None:
    target = tmp_path / "disk.qcow2"
    with limits.cgroup(memory=SERVED, cpus=2) as group:
        done = worker.run("import", web.url(image), target, "-O", "qcow2", prefix=group.prefix)
        assert done.status == 0, done.errors
        assert group.killed() == 0
    processes.run("qemu-img", "compare", "-q", "-f", "qcow2", "-F", "qcow2", target, image)


def test_export_is_written_within_the_memory_limit(image: Path, web: servers.Web, tmp_path: Path) -> None:
    guest = tmp_path / "guest"
    processes.run("truncate", "-s", f"{test_memory.SIZE}", guest)
    argv = nbd_targets.qemu_nbd(guest, "raw", tmp_path / "socket")
    with (
        nbd_targets.serving(argv, tmp_path) as served,
        limits.cgroup(memory=SERVED, cpus=2) as group,
    ):
        done = worker.run("import", web.url(image), served.url, prefix=group.prefix)
        assert done.status == 0, done.errors
        assert group.killed() == 0
    test_memory.check(guest)
