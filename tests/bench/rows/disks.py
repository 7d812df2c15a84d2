"""Disks in every format over HTTP, compared with the commands a user would type."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from tests.bench import bench as benches
from tests.bench import go, inputs
from tests.bench.bench import Bench, Bound, Sides
from tests.bench.measure import Cost
from tests.bench.settings import FAR
from tests.support import servers, tls, worker

#: The steps between the download and the disk.
PIPES = {"raw": "", "raw.gz": "pigz -dc | ", "raw.xz": "xz -T0 -dc | ", "raw.zst": "zstd -dc | "}
CONVERTED = ("qcow2", "c.qcow2", "vmdk", "vhdx")
CONVERT = "qemu-img convert -m 16 -W {flags} -f {form} -O raw {file} {target} && sync -d {target}"
RIVALS = {name: f"curl | {step}dd" for name, step in PIPES.items()} | dict.fromkeys(
    CONVERTED, "curl; qemu-img convert -m 16 -W"
)


def served(bench: Bench, name: str, kind: str) -> Iterator[Sides]:
    """Measure a disk from a web server, against the tools that download and convert it."""
    url = bench.web.url(bench.form(name))
    ours = bench.imports(url, bench.target(kind))
    yield Sides(ours, _rival(bench, name, kind, f"curl -sf {url}"), go.importer(bench, kind, url))


def secure(bench: Bench, name: str) -> Iterator[Sides]:
    """Measure the same over https, where each side decrypts."""
    path = bench.form(name)
    with inputs.folder(bench.directory, "tls") as own:
        authority = tls.Authority(own)
        with bench.nginx("secure", servers.Settings(pair=authority.issue())) as web:
            url, trusted = web.url(path), authority.certificate
            ours = bench.imports(url, bench.file, "--ca-file", trusted)
            rival = _rival(bench, name, "file", f"curl -sf --cacert {trusted} {url}")
            yield Sides(ours, rival, bounds=_cpu)


def far(bench: Bench, name: str) -> Iterator[Sides]:
    """Measure the same 50 ms away."""
    for sides in served(bench, name, "file"):
        yield Sides(sides.ours, sides.rival, bounds=_time)


def _time(costs: Sequence[Cost]) -> list[Bound]:
    return [Bound("time by that of the rival", costs[0].wall / costs[1].wall, 1.0)]


def _cpu(costs: Sequence[Cost]) -> list[Bound]:
    return [Bound("CPU time by that of the rival", costs[0].cpu / costs[1].cpu, 1.0)]


def _rival(bench: Bench, name: str, kind: str, curl: str) -> benches.Side:
    target = bench.target(kind)
    if name in PIPES:
        sparse = "" if kind == "block" else "sparse,"
        dd = f"dd bs=1M iflag=fullblock conv={sparse}fsync status=none of={target}"
        return bench.shell(f"{curl} | {PIPES[name]}{dd}", target)
    flags, form = "-n" if kind == "block" else "", name.removeprefix("c.")
    convert = CONVERT.format(flags=flags, form=form, file=bench.temporary, target=target)
    return bench.shell(f"{curl} -o {bench.temporary} && {convert}", target)


for _name, _kind in (*((name, "file") for name in RIVALS), ("raw", "block"), ("qcow2", "block")):
    benches.row(_name, target=_kind, rival=RIVALS[_name])(functools.partial(served, name=_name, kind=_kind))
for _name in ("raw", "qcow2"):
    benches.row(f"{_name} over https", rival=RIVALS[_name], is_extra=True)(
        functools.partial(secure, name=_name)
    )
benches.row("qcow2, 50 ms away", rival=RIVALS["qcow2"], is_extra=True, setting=FAR)(
    functools.partial(far, name="qcow2")
)


@benches.row("blank 1 GiB", rival="qemu-img create")
def blank(bench: Bench) -> Iterator[Sides]:
    """Measure the start-up time."""
    yield Sides(
        bench.command([*worker.COMMAND, "blank", bench.file, "1Gi"], bench.file),
        bench.shell(f"qemu-img create -q -f raw {bench.file} 1G && sync {bench.file}", bench.file),
        go.importer(bench, "file", "", IMPORTER_SOURCE="none"),
    )
