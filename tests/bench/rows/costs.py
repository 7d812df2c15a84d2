"""What one import of each kind costs: docs/pods/scale.md and deploy/costs.json.

The disk is nearly full, so that its size, what is read and what is written can be compared. Sources and
commands are those of other rows, without their rivals.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator

from tests.bench import bench as benches
from tests.bench.bench import Bench, Sides
from tests.bench.rows import disks, ovirt, sources, vmware

MIB = 1 << 20
#: Bytes of the disk, and of the files on it.
SIZE, DATA = 1024 * MIB, 900 * MIB
#: The kinds of sources, as deploy/estimate.py calls them, and the rows that start them.
KINDS: dict[str, Callable[[Bench], Iterator[Sides]]] = {
    **{name: functools.partial(disks.served, name=name, kind="file") for name in disks.RIVALS},
    "registry": sources.registry,
    "vsphere": functools.partial(vmware.alone, kind="file"),
    "vddk": vmware.vddk,
    "imageio": ovirt.library,
}


def full(bench: Bench) -> Bench:
    """Return the bench with a disk that is nearly full."""
    return dataclasses.replace(bench, setting=dataclasses.replace(bench.setting, size=SIZE, data=DATA))


def cost(bench: Bench, kind: str) -> Iterator[Sides]:
    """Measure the import of a kind alone."""
    with contextlib.contextmanager(KINDS[kind])(full(bench)) as sides:
        yield Sides(sides.ours)


for _kind in KINDS:
    benches.row(f"cost of {_kind}", more=True)(functools.partial(cost, kind=_kind))
