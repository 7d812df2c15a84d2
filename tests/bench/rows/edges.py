"""What surrounds a transfer: from a start to the first request, and from the last answer to the end."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import NamedTuple

from tests.bench import bench as benches
from tests.bench import inputs
from tests.bench.bench import Bench, Side, Sides
from tests.bench.measure import Cost
from tests.support import engine, misbehave, pages, processes, uploads, worker

SIZE = 1 << 20


class Edges(NamedTuple):
    """What a run took, and the times (``time.monotonic``) of its edges: requests that it sends or answers."""

    cost: Cost
    started: float
    first: float
    last: float
    ended: float


#: Runs a role once.
Run = Callable[[], Edges]


def importer(bench: Bench, own: Path) -> Iterator[Run]:
    """Yield an import of 1 MiB in a pod, with its metrics."""
    noise = inputs.noise(bench.directory, SIZE).read_bytes()
    with misbehave.Server() as server:
        pod = worker.Pod(own, metrics_port=processes.free_port())
        env = {"IMPORTER_SOURCE": "http", "FILESYSTEM_OVERHEAD": "0"}
        env["IMPORTER_ENDPOINT"] = server.serve("/disk", pages.Page(noise))

        def run() -> Edges:
            pod.disk.unlink(missing_ok=True)
            server.requests.clear()
            started = time.monotonic()
            cost = bench.run([*_environment(env), *worker.COMMAND, *pod.arguments])
            ended, known = time.monotonic(), server.requests
            return Edges(cost, started, known[0].begun, max(each.ended for each in known), ended)

        yield run


def upload_server(bench: Bench, own: Path) -> Iterator[Run]:
    """Yield an upload of 1 MiB; the first edge is that the server listens."""
    noise, target = inputs.noise(bench.directory, SIZE).read_bytes(), own / "disk.img"
    paths = uploads.contract.Paths(
        data=str(own), block="/no", scratch="/no", termination_log="", metrics_port=0
    )
    server = uploads.Server(uploads.certificates(own), {"DESTINATION": str(target)}, paths)
    argv = [
        *_environment(server.env),
        *worker.COMMAND,
        "--metrics-port=0",
        f"--termination-log={own / 'message'}",
    ]
    with futures.ThreadPoolExecutor(1) as pool:

        def run() -> Edges:
            target.unlink(missing_ok=True)
            started = time.monotonic()
            running = pool.submit(lambda: (bench.run(argv), time.monotonic()))
            while not running.done() and not processes.is_listening(server.port):
                time.sleep(0.001)
            first = time.monotonic()
            if running.done():
                running.result()  # raises why it does not listen
            assert server.ask("POST", uploads.SYNC, noise).status == 200
            last = time.monotonic()
            cost, ended = running.result()
            return Edges(cost, started, first, last, ended)

        yield run


def clone_source(bench: Bench, own: Path) -> Iterator[Run]:
    """Yield a clone of a file system with a disk of 1 MiB to a server that discards it."""
    (volume := own / "volume").mkdir()
    (volume / "disk.img").write_bytes(inputs.noise(bench.directory, SIZE).read_bytes())

    begun: list[float] = []
    answered: list[float] = []

    class Timed(uploads.MinimalServer):
        def answer(self) -> None:
            begun.append(time.monotonic())
            super().answer()
            answered.append(time.monotonic())

        do_HEAD = do_POST = do_PATCH = answer  # noqa: N815  (the names in http.server)

        def log_message(self, *_: object) -> None: ...

    made = uploads.certificates(own)
    with Timed.serving() as port:
        env = {
            "CLIENT_KEY": made.client.key.read_text(),
            "CLIENT_CERT": made.client.certificate.read_text(),
            "SERVER_CA_CERT": made.authority.certificate.read_text(),
            "UPLOAD_URL": f"http://127.0.0.1:{port}{uploads.SYNC}",
            "VOLUME_MODE": "filesystem",
            "MOUNT_POINT": str(volume),
        }
        argv = [
            *_environment(env),
            *worker.COMMAND,
            "--metrics-port=0",
            f"--termination-log={own / 'message'}",
        ]

        def run() -> Edges:
            begun.clear()
            answered.clear()
            started = time.monotonic()
            cost = bench.run(argv)
            return Edges(cost, started, begun[0], answered[-1], time.monotonic())

        yield run


def ovirt_populator(bench: Bench, own: Path) -> Iterator[Run]:
    """Yield an import of 1 MiB from oVirt; the last edge is that the engine gets its last request."""
    called: list[float] = []

    class Timed(list[str]):
        def append(self, call: str, /) -> None:
            called.append(time.monotonic())
            super().append(call)

    program = own / "ovirt-populator"
    program.write_text("from cdi_worker.importer import cli\ncli.main()\n")
    target = own / "disk.img"
    with engine.running(own, local=False) as (served, authority):
        served.add_disk("disk", inputs.noise(bench.directory, SIZE))
        served.calls = Timed()
        env = {
            "user": engine.USER,
            "password": engine.PASSWORD,
            "cacert": authority.certificate.read_text(),
        }
        argv = [
            *_environment(env),
            *(worker.COMMAND[0], program),
            *(f"--engine-url={served.url.removesuffix('/ovirt-engine/api')}", "--disk-id=disk"),
            *(f"--volume-path={target}", f"--pvc-size={SIZE}", "--metrics-port=0"),
        ]

        def run() -> Edges:
            target.unlink(missing_ok=True)
            called.clear()
            started = time.monotonic()
            cost = bench.run(argv)
            return Edges(cost, started, called[0], called[-1], time.monotonic())

        yield run


def _environment(env: dict[str, str]) -> list[str | Path]:
    return ["env", *(f"{name}={value}" for name, value in env.items())]


def _side(run: Run, *, is_end: bool) -> Side:
    """Return a side whose time is that of one edge."""

    def side() -> Cost:
        found = run()
        wall = found.ended - found.last if is_end else found.first - found.started
        return dataclasses.replace(found.cost, wall=wall)

    return side


def edge(bench: Bench, role: Callable[[Bench, Path], Iterator[Run]], *, is_end: bool) -> Iterator[Sides]:
    """Measure one edge of a role."""
    with inputs.folder(bench.directory, "edge") as own:
        for run in role(bench, own):
            yield Sides(_side(run, is_end=is_end))


for _role, _first in (
    (importer, "to its first request"),
    (upload_server, "until it listens"),
    (clone_source, "to its first request"),
    (ovirt_populator, "to its first request"),
):
    _name = _role.__name__.replace("_", " ")
    for _end, _what in ((False, f"from its start {_first}"), (True, "from the last answer to its end")):
        benches.row(f"{_name}: {_what}", pod=False)(functools.partial(edge, role=_role, is_end=_end))
