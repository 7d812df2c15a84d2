"""A disk that is compared with its source, against the tools that download and compare."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path

from tests.bench import bench as benches
from tests.bench import inputs, measure
from tests.bench.bench import Bench, Side, Sides
from tests.bench.settings import MIB
from tests.bench.wire import Wire
from tests.support import servers, worker

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


def longer(bench: Bench, name: str, kind: str) -> Iterator[Sides]:
    """Measure a comparison against the longer of its two readings alone, to nowhere.

    curl reads the source into 100 KiB that stay in the CPU cache. dd reads the disk past the page cache, as
    we do; for both of us the page cache has nothing of it, and all of the source. The server runs on the same
    CPUs: for the raw image, curl and nginx keep two of them busy.
    """
    url = bench.web.url(bench.form(name))
    disk = bench.block if kind == "block" else bench.file.with_name("verified.img")
    bench.run(benches.importing(url, disk))
    source = ["curl", "-sf", url, "-o", "/dev/null"]
    storage = ["dd", f"if={disk}", "of=/dev/null", "bs=4M", "iflag=direct", "status=none"]

    def alone() -> measure.Cost:
        return max(bench.run(source), bench.run(storage), key=lambda cost: cost.wall)

    yield Sides(_verify(bench, url, disk), alone)
    if kind == "file":
        disk.unlink()


for _name, _kind in itertools.product(("raw", "qcow2"), ("file", "block")):
    benches.row(
        f"verify {_name}, least", target=_kind, rival="the longer of curl and dd", is_least=True, more=True
    )(functools.partial(longer, name=_name, kind=_kind))


def distant(bench: Bench) -> Iterator[Sides]:
    """Measure a comparison with an image that is far away."""
    path = inputs.noise(bench.directory, 128 * MIB)
    disk, wire = bench.file.with_name("verified.img"), Wire(0.05, 20_000_000)
    with (
        inputs.folder(bench.directory, "distant") as own,
        wire.laid(own),
        servers.nginx(own, bench.directory) as web,
    ):
        url = web.url(path)
        bench.run(benches.importing(url, disk))
        curl = _after(bench, f"curl -sf {url} | cmp - {disk}", disk)
        yield Sides(_verify(bench, url, disk), curl, bound=wire.seconds(path.stat().st_size))
    disk.unlink()


benches.row("verify raw: 50 ms, 20 MB/s", rival="curl | cmp", more=True)(distant)


@benches.row("import --verify", rival="qemu-img convert; sha256sum", more=True)
def read_back(bench: Bench) -> Iterator[Sides]:
    """Measure an import that reads its disk back, which is hashed."""
    url, image = bench.web.url(bench.form("qcow2")), bench.temporary
    convert = f"curl -sf {url} -o {image} && qemu-img convert -f qcow2 -O raw {image} {bench.file}"
    hashed = f"{DROP.format(disk=bench.file)} && sha256sum {bench.file}"
    yield Sides(bench.imports(url, bench.file, "--verify"), bench.shell(f"{convert} && {hashed}", bench.file))


def _verify(bench: Bench, url: str, disk: Path) -> Side:
    return _after(bench, " ".join([*worker.COMMAND, "verify", "--progress", "none", url, str(disk)]), disk)


def _after(bench: Bench, command: str, disk: Path) -> Side:
    """Return a side that runs a command when the page cache has nothing of the disk."""
    return bench.shell(f"{DROP.format(disk=disk)} && {command}", bench.temporary)
