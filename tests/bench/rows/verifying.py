"""A disk that is compared with its source, against reading both to nowhere; and one with a map."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.bench import bench as benches
from tests.bench.bench import Bench, Sides, Verdict, Work
from tests.bench.measure import Cost
from tests.support import processes, worker

RIVAL = "the longer of `curl` of the source to nowhere, and `dd` of the disk to nowhere"
LONGEST = 5.0
TIB = 1 << 40


def longer(costs: Sequence[Cost]) -> Verdict:
    """Return the time by that of the slower side alone."""
    ours, source, disk = (each.wall for each in costs)
    return ours / max(source, disk), f"source alone {source:.2f} s, disk alone {disk:.2f} s"


def compared(bench: Bench, name: str, kind: str) -> Iterator[Sides]:
    """Measure the comparison of a disk that is equal."""
    url = bench.web.url(bench.form(name))
    disk = bench.block if kind == "block" else bench.file.with_name("verified.img")
    bench.run(benches.importing(url, disk))
    verify = [*worker.COMMAND, "verify", "--progress", "none", url, disk]
    data = bench.form(name).stat().st_size
    yield Sides(
        lambda: bench.run(verify),
        lambda: bench.run(["curl", "-sf", url, "-o", "/dev/null"]),
        [lambda: bench.run(["dd", f"if={disk}", "of=/dev/null", "bs=4M", "iflag=direct", "status=none"])],
        work=Work(fetched=data),
        verdict=longer,
    )
    if kind == "file":
        disk.unlink()


for _name, _kind in (("raw", "file"), ("qcow2", "file"), ("raw", "block"), ("qcow2", "block")):
    benches.row(f"verify {_name}", target=_kind, rival=RIVAL, aim=1.1)(
        functools.partial(compared, name=_name, kind=_kind)
    )


def seconds(costs: Sequence[Cost]) -> Verdict:
    """Return the time by the longest that is allowed."""
    return costs[0].wall / LONGEST, f"of {LONGEST:.0f} s"


@benches.row("verify --sample 1% of 1 TiB", rival=f"none: {LONGEST:.0f} s", aim=1.0, pod=False)
def sample(bench: Bench) -> Iterator[Sides]:
    """Measure a sample of a large and nearly empty disk."""
    image, disk = large(bench), bench.file.with_name("large.img")
    url = bench.web.url(image)
    # An import refuses a disk that is larger than the file system.
    processes.run("qemu-img", "convert", "-f", "qcow2", "-O", "raw", image, disk)
    verify = [*worker.COMMAND, "verify", "--progress", "none", "--sample", "1%", "--seed", "1", url, disk]
    yield Sides(lambda: bench.run(verify), verdict=seconds)
    disk.unlink()


def large(bench: Bench) -> Path:
    """Return an image of 1 TiB with 64 MiB of data, made once."""
    path = bench.directory / "large.qcow2"
    if not path.exists():
        growing = path.with_suffix(".part")
        processes.run("qemu-img", "create", "-q", "-f", "qcow2", growing, str(TIB))
        for number in range(64):
            processes.run("qemu-io", "-f", "qcow2", "-c", f"write -q -P 7 {number * 16}G 1M", growing)
        growing.rename(path)
    return path


def mapped(bench: Bench, name: str, kind: str) -> Iterator[Sides]:
    """Measure an import with a block map."""
    url, target = bench.web.url(bench.form(name)), bench.target(kind)
    written = bench.file.with_name("disk.bmap")
    yield Sides(
        bench.imports(url, target, "--write-map", written),
        bench.imports(url, target),
        work=Work(bench.form(name).stat().st_size, bench.setting.data),
    )
    written.unlink()


for _name in ("raw", "qcow2"):
    for _kind in ("file", "block"):
        benches.row(f"import --write-map {_name}", target=_kind, rival="the same import without", aim=1.15)(
            functools.partial(mapped, name=_name, kind=_kind)
        )
