"""A warm migration from VMware in five stages, and its requests."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import cdi_worker
from tests.support import devices, oracle, vmware

MiB, GiB = 1 << 20, 1 << 30
SIZE = 24 * MiB
STAGES = 5


def noise(seed: int, length: int) -> bytes:
    """Return ``length`` random bytes, the same for each seed."""
    return random.Random(seed).randbytes(length)


def migration(directory: Path, size: int = SIZE) -> vmware.Estate:
    """Return a machine with five snapshots: a full copy, three deltas and a final one.

    Between them are data, holes, zeros and writes at both ends of the disk.
    """
    estate = vmware.Estate(directory, size)
    estate.take((0, noise(1, 5 * MiB)), (10 * MiB, noise(2, 3 * MiB)), (size - 512, b"end " * 128))
    estate.take((MiB, noise(3, 70_000)), (11 * MiB, MiB))
    estate.take((11 * MiB, noise(4, 4096)), (0, bytes(MiB)), (20 * MiB, noise(5, 100)))
    estate.take((5 * MiB - 4096, noise(6, 8192)), (2 * MiB, 512 * 1024))
    estate.take((size - 1024, bytes(1024)), (512, noise(7, 512)))
    return estate


def wanted(estate: vmware.Estate, target: Path, stage: int, **changes: Any) -> cdi_worker.Request:
    """Return the request of a stage; ``changes`` replace fields of its location."""
    options = cdi_worker.FetchOptions(no_progress=1)
    location = estate.location(**estate.stage(stage) | changes, final=stage == STAGES - 1)
    return cdi_worker.Request(
        source="vddk", location=location, target=str(target), fetch=options, connect_patience=1
    )


def check(estate: vmware.Estate, target: Path, stage: int) -> None:
    """Check that the target holds the disk at the snapshot of a stage."""
    oracle.same(target, estate.content(stage), beyond=devices.DIRT if target.is_block_device() else None)
