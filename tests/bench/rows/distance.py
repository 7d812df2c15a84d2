"""Sources that are far away: the time at the speed of the wire, and round trips."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.bench import bench as benches
from tests.bench import settings
from tests.bench.bench import Bench, Sides, Work
from tests.support import processes, servers

#: Of the time that the bytes take on the wire.
AIM = 1.2
#: Round trips until the first byte of data arrives, that of connecting included.
TRIPS = 4


@benches.row(
    "qcow2 by the speed of the wire",
    rival="its bytes at the speed of the wire",
    aim=AIM,
    only=settings.FAR.name,
)
def wire(bench: Bench) -> Iterator[Sides]:
    """Measure an image against its bytes at the speed of the wire."""
    path = bench.form("qcow2")
    ideal = path.stat().st_size / bench.setting.wire
    yield Sides(
        bench.imports(bench.web.url(path), bench.file),
        bench.shell(f"curl -sf {bench.web.url(path)} -o /dev/null", bench.file),
        work=Work(path.stat().st_size, bench.setting.data),
        verdict=lambda costs: (
            costs[0].wall / ideal,
            f"by {ideal:.2f} s on the wire; the rival is one `curl`",
        ),
    )


def trips(bench: Bench, name: str) -> Iterator[Sides]:
    """Count the round trips before the first data byte of an image arrives."""
    path = bench.form(name)
    with bench.nginx(f"trips-{name}", servers.Settings()) as web:
        yield Sides(
            bench.imports(web.url(path), bench.file),
            work=Work(path.stat().st_size, bench.setting.data),
            verdict=lambda _: (_trips(path, web, bench.setting.delay), "round trips"),
        )


def _trips(path: Path, web: servers.Web, delay: float) -> float:
    """Return the round trips until a byte of data arrives: one to connect, one for each wait of requests."""
    form = "vmdk" if path.suffix == ".vmdk" else "qcow2"
    mapped = json.loads(processes.run("qemu-img", "map", "--output=json", "-f", form, path).stdout)
    data = [(part["offset"], part["offset"] + part["length"]) for part in mapped if "offset" in part]
    begun = sorted((_begun(request), _span(request)) for request in web.requests())
    first = begun[0][0]
    for time, (start, end) in begun:
        if any(start < last and begin < end for begin, last in data):
            return 2.0 + int((time - first) / delay)
    raise AssertionError(f"no request for data: {begun}")


def _begun(request: Mapping[str, str]) -> float:
    return float(request["ended"]) - float(request["seconds"])


def _span(request: Mapping[str, str]) -> tuple[int, int]:
    """Return the bytes of a request, as a half-open range."""
    if request["method"] != "GET" or not request["range"]:
        return 0, 0
    start, end = request["range"].removeprefix("bytes=").split("-")
    return int(start), int(end or start) + 1


for _name in ("qcow2", "vmdk"):
    benches.row(
        f"{_name}: round trips before the first data byte",
        rival="none: connecting, then each wait for an answer",
        aim=TRIPS,
        only=settings.DISTANT.name,
    )(functools.partial(trips, name=_name))
