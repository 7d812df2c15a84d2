"""Disks in every format over HTTP, compared with the commands a user would type."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from tests.bench import bench as benches
from tests.bench import go
from tests.bench.bench import Bench, Sides

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
