"""A disk in a backup of KubeVirt, with and without a delay of each request."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from tests.bench import bench as benches
from tests.bench import inputs
from tests.bench.bench import Bench, Sides, Work
from tests.support import kubevirt, tls

MIB = 1 << 20
SIZE = 256 * MIB
#: Of one request of the serial reader: what KubeVirt's server reads from QEMU at once.
STEP = kubevirt.CHUNK
DELAY = 0.005


@dataclasses.dataclass
class Allocated:
    """A disk in a file, without holes."""

    path: Path
    size: int = SIZE
    names: dict[int, str] = dataclasses.field(default_factory=lambda: kubevirt.ALLOCATED)

    def runs(self, offset: int) -> Iterator[kubevirt.Run]:
        """Yield one extent."""
        yield offset, self.size - offset, 0

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes of the file."""
        with self.path.open("rb") as file:
            file.seek(offset)
            return file.read(length)


@benches.row(
    "KubeVirt backup, 5 ms a request",
    rival="one `curl` that requests 256 KiB after 256 KiB; each answer is delayed by 5 ms (256 MiB of data)",
    aim=0.33,
    pod=False,
)
def delayed(bench: Bench) -> Iterator[Sides]:
    """Measure against one reader's serial copy, where each answer is delayed by 5 ms."""
    with _served(bench, DELAY) as (server, authority):
        data = server.url("exports", "root", "data")
        query = f"offset=[0-{SIZE - 1}:{STEP}]&length={STEP}"
        serial = (
            f"curl -sSf --cacert {authority} -H '{kubevirt.HEADER}: {kubevirt.TOKEN}' '{data}?{query}'"
            f" > {bench.file} && sync -d {bench.file}"
        )
        yield Sides(_backup(bench, server, authority), bench.shell(serial, bench.file), work=Work(SIZE, SIZE))


@benches.row(
    "KubeVirt backup against http",
    rival="cdi-worker itself, over HTTP from the same server (256 MiB of data)",
    aim=1.2,
    pod=False,
)
def undelayed(bench: Bench) -> Iterator[Sides]:
    """Measure against the http source with the same bytes."""
    with _served(bench, 0) as (server, authority):
        url = f"{server.url('volumes', 'root', 'disk.img')}?{kubevirt.HEADER}={kubevirt.TOKEN}"
        yield Sides(
            _backup(bench, server, authority),
            bench.imports(url, bench.file, "--ca-file", authority),
            work=Work(SIZE, SIZE),
        )


@contextlib.contextmanager
def _served(bench: Bench, delay: float) -> Iterator[tuple[kubevirt.Server, Path]]:
    """Serve the same bytes as a volume and as a backup; yield the server and its authority's certificate."""
    path = inputs.noise(bench.directory, SIZE)
    with inputs.folder(bench.directory, "kubevirt") as own:
        authority = tls.Authority(own)
        with kubevirt.Server(authority.issue()) as server:
            server.volumes["root"], server.backups["root"] = path, Allocated(path)
            server.delay = delay
            yield server, authority.certificate


def _backup(bench: Bench, server: kubevirt.Server, authority: Path) -> benches.Side:
    """Return a side that imports the backup."""
    url = server.url("exports", "root", "map", scheme="kubevirt")
    return bench.imports(f"{url}?{kubevirt.HEADER}={kubevirt.TOKEN}", bench.file, "--ca-file", authority)
