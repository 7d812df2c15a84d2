"""A warm migration from VMware in five stages, and its requests."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import cdi_worker
from tests.support import oracle, vmware

MiB, GiB = 1 << 20, 1 << 30
SIZE = 24 * MiB
STAGES = 5


def noise(seed: int, length: int) -> bytes:
    """Return ``length`` random bytes, the same for each seed."""
    return random.Random(seed).randbytes(length)


def migration(directory: Path, size: int = SIZE, *, exports: bool = False) -> vmware.Vcsim:
    """Return a machine with five snapshots: a full copy, three deltas and a final one.

    Between them are data, holes, zeros and writes at both ends of the disk. ``exports``: as of ``Vcsim``.
    """
    vcsim = vmware.Vcsim(directory, size, exports=exports)
    vcsim.take_snapshot((0, noise(1, 5 * MiB)), (10 * MiB, noise(2, 3 * MiB)), (size - 512, b"end " * 128))
    vcsim.take_snapshot((MiB, noise(3, 70_000)), (11 * MiB, MiB))
    vcsim.take_snapshot((11 * MiB, noise(4, 4096)), (0, bytes(MiB)), (20 * MiB, noise(5, 100)))
    vcsim.take_snapshot((5 * MiB - 4096, noise(6, 8192)), (2 * MiB, 512 * 1024))
    vcsim.take_snapshot((size - 1024, bytes(1024)), (512, noise(7, 512)))
    return vcsim


def request(vcsim: vmware.Vcsim, target: Path, stage: int, **changes: Any) -> cdi_worker.Request:
    """Return the request of a stage; ``changes`` replace fields of its location."""
    options = cdi_worker.FetchOptions(no_progress=1)
    location = vcsim.location(**vcsim.stage(stage) | changes, final=stage == STAGES - 1)
    return cdi_worker.Request(
        existing="replace",
        source="vddk",
        location=location,
        target=str(target),
        fetch=options,
        connect_patience=1,
    )


def exported(vcsim: vmware.Vcsim, target: Path, stage: int, **changes: Any) -> cdi_worker.Request:
    """Return the request of a stage by an export lease; ``changes`` replace fields of its location."""
    made = request(vcsim, target, stage)
    location = vcsim.machine(**vcsim.stage(stage) | {"final": made.location.stage.final} | changes)
    return dataclasses.replace(made, source="vsphere", location=location, disk="Hard disk 1")


def untidy(vcsim: vmware.Vcsim) -> set[str]:
    """Return what was begun on vSphere and not ended: leases, and snapshots."""

    def names(call: str, what: str) -> set[str]:
        return {each[what] for each in vcsim.calls(call)}

    held = names("lease", "lease") - names("ended", "lease")
    return held | (names("created", "snapshot") - names("removed", "snapshot"))


def check(vcsim: vmware.Vcsim, target: Path, stage: int) -> None:
    """Check that the target holds the disk at the snapshot of a stage, followed by zeros."""
    oracle.same(target, vcsim.content(stage))


def run(vcsim: vmware.Vcsim, target: Path, stage: int, **changes: Any) -> cdi_worker.Result:
    """Run the request of a stage, and check the target."""
    result = cdi_worker.run(request(vcsim, target, stage, **changes))
    check(vcsim, target, stage)
    return result
