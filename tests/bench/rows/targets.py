"""Disks written to qcow2 files."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from tests.bench import bench as benches
from tests.bench.bench import Bench, Sides

CONVERT = "qemu-img convert -m 16 -W -f {form} -O qcow2 {file} {target} && sync -d {target}"


def qcow2(bench: Bench, name: str) -> Iterator[Sides]:
    """Measure a qcow2 file against a download followed by qemu-img."""
    url = bench.web.url(bench.form(name))
    convert = CONVERT.format(form=name, file=bench.temporary, target=bench.file)
    yield Sides(
        bench.imports(url, bench.file, "--format", "qcow2"),
        bench.shell(f"curl -sf {url} -o {bench.temporary} && {convert}", bench.file),
    )


for _name in ("raw", "qcow2"):
    benches.row(f"{_name} to qcow2", rival="curl; qemu-img convert -O qcow2 -m 16 -W")(
        functools.partial(qcow2, name=_name)
    )
