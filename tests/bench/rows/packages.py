"""Disks in packages."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from tests.bench import bench as benches
from tests.bench.bench import Bench, Sides, Work
from tests.bench.rows import disks
from tests.support import ovas, processes


@benches.row("vmdk in an OVA", rival="`curl`, `tar -x`, then `qemu-img convert -m 16 -W`", aim=1.1)
def ova(bench: Bench) -> Iterator[Sides]:
    """Measure the disk in an OVA, verified by its manifest, against a download that is unpacked."""
    disk = bench.form("vmdk")
    path = _packed(disk)
    url = bench.web.url(path)
    convert = disks.CONVERT.format(flags="", form="vmdk", file=bench.temporary, target=bench.file)
    yield Sides(
        bench.imports(url, bench.file),
        bench.shell(f"curl -sf {url} | tar -xOf - {disk.name} > {bench.temporary} && {convert}", bench.file),
        work=Work(path.stat().st_size, bench.setting.data),
    )


def _packed(disk: Path) -> Path:
    """Return an OVA of a disk, with a manifest."""
    path = disk.with_suffix(".ova")
    if not path.exists():
        size = {"size": str(disk.stat().st_size)}
        ovf = disk.with_name("vm.ovf")
        ovf.write_bytes(ovas.descriptor([ovas.Disk(b"", disk.name, file=size)]))
        disk.with_name("vm.mf").write_text("".join(map(_line, (ovf, disk))))
        part = path.with_suffix(".part")
        processes.run("tar", "-C", disk.parent, "-cf", part, "vm.ovf", "vm.mf", disk.name)
        part.rename(path)
    return path


def _line(path: Path) -> str:
    """Return the line of a file in a manifest."""
    with path.open("rb") as file:
        return f"SHA256({path.name})= {hashlib.file_digest(file, 'sha256').hexdigest()}\n"
