"""A disk that is compared with its source, against the tools that download and compare."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.bench import bench as benches
from tests.bench.bench import Bench, Side, Sides
from tests.support import worker

#: Removes a disk from the page cache: it is compared with what is on storage.
DROP = "dd of={disk} oflag=nocache conv=notrunc,fdatasync count=0 status=none"


@benches.row("verify raw", rival="curl | cmp")
def raw(bench: Bench) -> Iterator[Sides]:
    """Measure the comparison of a disk that is equal."""
    url, disk = bench.web.url(bench.raw), bench.file.with_name("verified.img")
    bench.run(benches.importing(url, disk))
    yield Sides(_verify(bench, url, disk), _after(bench, f"curl -sf {url} | cmp - {disk}", disk))
    disk.unlink()


@benches.row("verify qcow2", target="block", rival="curl; qemu-img compare")
def qcow2(bench: Bench) -> Iterator[Sides]:
    """Measure the same of an image and a device."""
    url = bench.web.url(bench.form("qcow2"))
    bench.run(benches.importing(url, bench.block))
    compare = f"qemu-img compare -q -f qcow2 -F raw {bench.temporary} {bench.block}"
    rival = f"curl -sf {url} -o {bench.temporary} && {compare}"
    yield Sides(_verify(bench, url, bench.block), _after(bench, rival, bench.block))


def _verify(bench: Bench, url: str, disk: Path) -> Side:
    return _after(bench, " ".join([*worker.COMMAND, "verify", "--progress", "none", url, str(disk)]), disk)


def _after(bench: Bench, command: str, disk: Path) -> Side:
    """Return a side that runs a command when the page cache has nothing of the disk."""
    return bench.shell(f"{DROP.format(disk=disk)} && {command}", bench.temporary)
