"""Disks written to qcow2 files and to NBD exports."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from tests.bench import bench as benches
from tests.bench import inputs
from tests.bench.bench import Bench, Sides, Work
from tests.support import nbd_targets

CONVERT = "qemu-img convert -m 16 -W -f {form} -O qcow2 {options} {file} {target} && sync -d {target}"


def qcow2(bench: Bench, name: str, given: tuple[str, ...], options: str) -> Iterator[Sides]:
    """Measure a qcow2 file against a download followed by qemu-img."""
    path, target = bench.form(name), bench.target("file")
    url = bench.web.url(path)
    convert = CONVERT.format(form=name, options=options, file=bench.temporary, target=target)
    yield Sides(
        bench.imports(url, target, *given),
        bench.shell(f"curl -sf {url} -o {bench.temporary} && {convert}", target),
        work=Work(path.stat().st_size, bench.setting.data),
    )


for _name in ("raw", "qcow2"):
    benches.row(
        f"{_name} to qcow2",
        rival="`curl`, then `qemu-img convert -O qcow2 -m 16 -W`",
        aim=0.7,
        pod=False,
    )(functools.partial(qcow2, name=_name, given=("--format", "qcow2"), options=""))
benches.row(
    "qcow2 to compressed qcow2 (zstd)",
    rival="`curl`, then `qemu-img convert -O qcow2 -c -m 16 -W`",
    aim=0.8,
    pod=False,
)(
    functools.partial(
        qcow2,
        name="qcow2",
        given=("--format", "qcow2,compression_type=zstd", "--compress"),
        options="-c -o compression_type=zstd",
    )
)


@benches.row("raw to NBD in memory", rival="cdi-worker itself, to a block device", aim=1.1, pod=False)
def memory(bench: Bench) -> Iterator[Sides]:
    """Measure nbdkit's memory against a device."""
    path, device = bench.form("raw"), bench.target("block")
    url = bench.web.url(path)
    with inputs.folder(bench.directory, "nbd") as own:
        argv = ["nbdkit", "--foreground", f"--unix={own / 'socket'}", "memory", str(path.stat().st_size)]
        with nbd_targets.serving([*argv], own) as served:
            export = bench.command([*benches.importing(url, device)[:-1], served.url], device)
            yield Sides(
                export,
                bench.imports(url, device),
                work=Work(path.stat().st_size, bench.setting.data),
            )
