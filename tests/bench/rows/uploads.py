"""Uploads and clones, compared with a client whose server discards the bytes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.bench import bench as benches
from tests.bench import inputs, measure
from tests.bench.bench import Bench, Sides
from tests.bench.measure import Cost
from tests.support import devices, limits, processes, uploads, worker

#: The volume modes of the contract.
MODES = {"device": "block", "file system": "filesystem"}


class Ends:
    """Servers and clients of a row. ``directory``: for their files; ``server``: the limits of servers."""

    def __init__(self, bench: Bench, directory: Path, server: limits.Cgroup | None) -> None:
        self._bench = bench
        self._directory = directory
        self._server_prefix = server.prefix if server else ()
        self._made = uploads.certificates(directory / "certificates")

    def upload(self, path: Path, target: Path) -> Cost:
        """Upload to our server, whose CPU time counts, from its start: not that of curl."""
        before = os.times()
        with self._server(target) as port:
            cost = self.send(path, f"https://localhost:{port}/v1beta1/upload", "--request", "POST")
        after = os.times()
        both = after.children_user - before.children_user + after.children_system - before.children_system
        return dataclasses.replace(cost, cpu=both - cost.cpu)

    def clone(self, mode: str, source: Path, target: Path) -> Cost:
        """Clone a volume from our source to our server."""
        with self._server(target) as port:
            env = {
                "CLIENT_KEY": self._made.client.key.read_text(),
                "CLIENT_CERT": self._made.client.certificate.read_text(),
                "SERVER_CA_CERT": self._made.authority.certificate.read_text(),
                "UPLOAD_URL": f"https://localhost:{port}/v1beta1/upload",
                "VOLUME_MODE": mode,
                "MOUNT_POINT": str(source),
            }
            given = [f"{name}={value}" for name, value in env.items()]
            return self._bench.run(["env", *given, *_pod(self._directory / "cloner.message")])

    def send(self, path: Path, url: str, *more: str) -> Cost:
        """Send a file with curl."""
        made = self._made
        pair = ["--cert", str(made.client.certificate), "--key", str(made.client.key)]
        authority = ["--cacert", str(made.authority.certificate)]
        return measure.run(["curl", "-sSf", *pair, *authority, *more, "-T", path, url])

    @contextlib.contextmanager
    def discarding(self) -> Iterator[str]:
        """Yield the URL of a server that discards what it receives."""
        port = processes.free_port()
        pair = (self._made.server.certificate, self._made.server.key)
        argv = [*self._server_prefix, sys.executable, "-m", "tests.bench.null", str(port), *pair]
        ready = functools.partial(processes.is_listening, port)
        with processes.running(argv, log=self._directory / "null.log", ready=ready):
            yield f"https://localhost:{port}/"

    @contextlib.contextmanager
    def source(self, what: str) -> Iterator[Path]:
        """Yield the volume of a clone source: a device, or a directory with a disk and a small file."""
        if what == "device":
            with devices.attached(self._bench.raw, direct=False) as device:
                yield device
            return
        volume = self._directory / "volume"
        volume.mkdir()
        processes.run("cp", "--sparse=always", self._bench.raw, volume / "disk.img")
        (volume / "note").write_text("beside the disk")
        yield volume
        shutil.rmtree(volume)

    @contextlib.contextmanager
    def target(self, kind: str) -> Iterator[Path]:
        """Yield the disk of a target: a device that is not empty, or a file that does not exist."""
        if kind == "block":
            yield self._bench.block
            return
        data = self._bench.file.with_name("data")
        data.mkdir(exist_ok=True)
        yield data / "disk.img"
        shutil.rmtree(data)

    @contextlib.contextmanager
    def _server(self, target: Path) -> Iterator[int]:
        """Yield the port of our server; wait for its end, then remove what it has written to a file."""
        port = processes.free_port()
        env = {
            **os.environ,
            "LISTEN_ADDRESS": "127.0.0.1",
            "LISTEN_PORT": str(port),
            "TLS_CERT_FILE": str(self._made.server.certificate),
            "TLS_KEY_FILE": str(self._made.server.key),
            "CLIENT_CERT_FILE": str(self._made.authority.certificate),
            "CLIENT_NAME": uploads.CLIENT,
            "DESTINATION": str(target),
        }
        ready = functools.partial(processes.is_listening, port)
        argv = [*self._server_prefix, *_pod(self._directory / "server.message")]
        with processes.running(argv, log=self._directory / "server.log", ready=ready, env=env) as server:
            yield port
            server.wait(processes.PATIENCE)
        if not target.is_block_device():
            for path in target.parent.iterdir():
                path.unlink()


def upload(bench: Bench, name: str) -> Iterator[Sides]:
    """Measure curl against our server, and against one that discards everything; both use TLS."""
    path = bench.form(name)
    with _ends(bench) as (ends, null), ends.target("file") as target:
        yield Sides(lambda: ends.upload(path, target), lambda: ends.send(path, null))


def clone(bench: Bench, what: str, kind: str) -> Iterator[Sides]:
    """Measure a clone, from start to end, against sending all bytes of its disk to a discarding server."""
    with _ends(bench) as (ends, null), ends.source(what) as source, ends.target(kind) as target:
        yield Sides(lambda: ends.clone(MODES[what], source, target), lambda: ends.send(bench.raw, null))


@contextlib.contextmanager
def _ends(bench: Bench) -> Iterator[tuple[Ends, str]]:
    """Yield the ends of a row, and the URL of a server that discards."""
    with inputs.folder(bench.directory, "ends") as own, bench.setting.limited() as group:
        ends = Ends(bench, own, group)
        with ends.discarding() as url:
            yield ends, url


for _name in ("raw", "raw.gz"):
    benches.row(f"upload {_name}", rival="curl -T", is_least=True)(functools.partial(upload, name=_name))
for _what, _kind in (("file system", "file"), ("device", "block")):
    benches.row(f"clone of a {_what}", target=_kind, rival="curl -T", is_least=True)(
        functools.partial(clone, what=_what, kind=_kind)
    )


def _pod(message: Path) -> list[str | Path]:
    return [*worker.COMMAND, "--metrics-port=0", f"--termination-log={message}"]
