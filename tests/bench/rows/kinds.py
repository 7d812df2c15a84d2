"""What one import of each kind costs, and whether deploy/estimate.py predicts the time of many at once.

The disk has little free space, so that what is read and written says something about others. Sources and
commands are those of other rows, without their rivals. The figures are on docs/pods/scale.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.bench import bench as benches
from tests.bench import inputs
from tests.bench.bench import Bench, Sides
from tests.bench.measure import Cost
from tests.bench.rows import disks, ovirt, scale, sources, vmware
from tests.support import repository

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
#: Kinds whose size in the list is that of the data, which a hypervisor shows, not of what it sends.
HYPERVISORS = {"vsphere", "vddk", "imageio"}
ESTIMATE = "deploy/estimate.py"
#: The disks of the imports at once: bytes, and bytes of files. The first is the small disk.
SMALLER = ((64 * MIB, 50 * MIB), (128 * MIB, 100 * MIB), (256 * MIB, 200 * MIB))


def of_size(bench: Bench, size: int, data: int) -> Bench:
    """Return the bench with another disk."""
    return dataclasses.replace(bench, setting=dataclasses.replace(bench.setting, size=size, data=data))


def cost(bench: Bench, kind: str, size: int, data: int) -> Iterator[Sides]:
    """Measure the import of a kind alone."""
    with contextlib.contextmanager(KINDS[kind])(of_size(bench, size, data)) as sides:
        yield Sides(sides.ours)


def known(small: Cost, large: Mapping[str, Cost], cpu: Callable[[Cost], float]) -> dict[str, Any]:
    """Return what deploy/costs.json has, of a small raw disk and a large disk of each kind.

    ``start``: CPU seconds of an import of no bytes. ``size``: what a line of the list says of the large disk.
    """
    slope = (cpu(large["raw"]) - cpu(small)) / (large["raw"].read - small.read)
    kinds = {
        kind: {
            "size": each.written if kind in HYPERVISORS else each.read,
            "read": each.read,
            "written": each.written,
            "cpu": round(cpu(each), 3),
            "memory": each.memory,
        }
        for kind, each in large.items()
    }
    return {"start": round(cpu(small) - slope * small.read, 3), "kinds": kinds}


for _kind in KINDS:
    benches.row(f"cost of {_kind}", scale=True)(functools.partial(cost, kind=_kind, size=SIZE, data=DATA))
benches.row("cost of a small disk", scale=True)(
    functools.partial(cost, kind="raw", size=SMALLER[0][0], data=SMALLER[0][1])
)


def predicted(bench: Bench, kinds: Sequence[str]) -> Iterator[Sides]:
    """Measure many imports at once of images of these kinds, against the estimate of their costs alone."""
    with inputs.folder(bench.directory, "crowd") as folder:
        made = [(kind, of_size(bench, *each).form(kind)) for kind in kinds for each in SMALLER]
        images = list(itertools.islice(itertools.cycle(made), scale.CROWD))

        def crowd() -> Cost:
            targets = [folder / f"{number}.img" for number in range(len(images))]
            for target in targets:
                target.unlink(missing_ok=True)
            commands = [
                benches.importing(bench.web.url(image), target)
                for (_, image), target in zip(images, targets, strict=True)
            ]
            return scale.together(commands, len(commands))

        yield Sides(crowd, functools.partial(_estimate, bench, folder, images))


for _kinds in (("raw",), ("raw", "qcow2", "raw.gz")):
    benches.row(f"{scale.CROWD} imports at once: {', '.join(_kinds)}", rival=ESTIMATE, scale=True)(
        functools.partial(predicted, kinds=_kinds)
    )


def _estimate(bench: Bench, folder: Path, images: Sequence[tuple[str, Path]]) -> Cost:
    """Measure an import of each kind alone, three times; return what the program predicts from them.

    The servers are on this machine: all of its CPU time counts.
    """

    def alone(image: Path) -> Cost:
        found = []
        for _ in range(3):
            bench.fresh(bench.file)
            found.append(bench.run(benches.importing(bench.web.url(image), bench.file)))
        return sorted(found, key=lambda each: each.busy)[1]

    large = of_size(bench, SIZE, DATA)
    costs = known(
        alone(of_size(bench, *SMALLER[0]).raw),
        {kind: alone(large.form(kind)) for kind in dict.fromkeys(["raw", *(kind for kind, _ in images)])},
        lambda each: each.busy,
    )
    costs["crowded"] = json.loads((repository.ROOT / "deploy/costs.json").read_text())["crowded"]
    (folder / "costs.json").write_text(json.dumps(costs))
    (folder / "list").write_text("".join(f"{image.stat().st_size} {kind}\n" for kind, image in images))
    options = ("--json", f"--pods={len(images)}", f"--cpus={os.cpu_count()}", "--pod-cpu=1")
    argv = [sys.executable, repository.ROOT / ESTIMATE, folder / "list", *options]
    done = subprocess.run(
        [*argv, "--costs", folder / "costs.json"], check=True, capture_output=True, timeout=60
    )
    (found,) = json.loads(done.stdout)
    return Cost(found["seconds"], 0, 0)
