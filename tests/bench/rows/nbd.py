"""NBD: a raw disk by nbdkit, with and without a delay of each read."""

from __future__ import annotations

from collections.abc import Iterator

from tests.bench import bench as benches
from tests.bench import inputs
from tests.bench.bench import Bench, Sides, Work
from tests.support import nbd_exports

MIB = 1 << 20
SIZE = 1024 * MIB
#: One read after the other, each of 256 KiB.
SERIAL = "--synchronous --connections=1 --requests=1 --flush"


@benches.row(
    "NBD, 5 ms a read",
    rival="`nbdcopy` with one reader; each read is delayed by 5 ms (1 GiB of data)",
    aim=0.33,
    pod=False,
)
def delayed(bench: Bench) -> Iterator[Sides]:
    """Measure against one reader's serial copy, where each read is delayed by 5 ms."""
    path = inputs.noise(bench.directory, SIZE)
    slow = ("-r", "--filter=delay", "file", path, "delay-read=5ms")
    with inputs.folder(bench.directory, "nbd") as own, nbd_exports.nbdkit(own, *slow) as port:
        url = f"nbd://127.0.0.1:{port}/"
        copy = f"truncate -s {SIZE} {bench.file} && nbdcopy {SERIAL} {url} {bench.file}"
        yield Sides(bench.imports(url, bench.file), bench.shell(copy, bench.file), work=Work(SIZE, SIZE))


@benches.row(
    "NBD against http",
    rival="cdi-worker itself, over HTTP from nginx (1 GiB of data)",
    aim=1.2,
    pod=False,
)
def undelayed(bench: Bench) -> Iterator[Sides]:
    """Measure against the http source with the same bytes."""
    path = inputs.noise(bench.directory, SIZE)
    with inputs.folder(bench.directory, "nbd") as own, nbd_exports.nbdkit(own, "-r", "file", path) as port:
        yield Sides(
            bench.imports(f"nbd://127.0.0.1:{port}/", bench.file),
            bench.imports(bench.web.url(path), bench.file),
            work=Work(SIZE, SIZE),
        )
