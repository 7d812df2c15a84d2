"""The rows of uploads and clones, compared with a client whose server discards the bytes."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.bench import inputs, measure, report
from tests.bench.measure import Cost
from tests.support import devices, processes, uploads

#: The allowed ratio of each upload to one whose bytes are discarded.
UPLOADS = ("raw", "raw.gz", "qcow2")
AIM = 1.2
CLONE_AIM = 0.35


class Uploads:
    """The rows. ``raw``: the disk; ``directory``: for files and certificates."""

    def __init__(self, directory: Path, raw: Path, rounds: int) -> None:
        self._directory = directory / "upload"
        self._directory.mkdir(exist_ok=True)
        self._raw = raw
        self._rounds = rounds
        self._made = uploads.certificates(self._directory / "certificates")

    def rows(self) -> dict[str, Callable[[], report.Row]]:
        """Return the rows by name."""
        found: dict[str, Callable[[], report.Row]] = {
            f"upload {name}": functools.partial(self.upload, name) for name in UPLOADS
        }
        return {**found, "clone": self.clone}

    def upload(self, name: str) -> report.Row:
        """Measure curl against our server, and against one that discards everything.

        The rival uses TLS, as our server must; the note has the ratio to plain HTTP.
        """
        path = self._raw if name == "raw" else inputs.form(self._raw, name)
        with self._null(tls=True) as null, self._null(tls=False) as plain:
            ours, theirs, plainly = measure.alternate(
                self._rounds,
                [
                    functools.partial(self._ours, path),
                    lambda: self._curl(path, null),
                    lambda: self._curl(path, plain),
                ],
            )
        limits = {"TLS alone": theirs}
        if name.endswith(".gz"):
            # Decompressed it is 2 GiB, whatever the server.
            unpack = f"{sys.executable} -m isal.igzip -dc {path} > /dev/null"
            limits["unpack"] = measure.run(["bash", "-c", unpack])
        slowest = max(limit.wall for limit in limits.values())
        note = f"(slowest stage {ours.wall / slowest:.2f}, plain HTTP {ours.wall / plainly.wall:.2f})"
        ratio = ours.wall / theirs.wall
        return report.Row(f"upload {name}", "file", ours, theirs, AIM, ratio, limits, note=note)

    def clone(self) -> report.Row:
        """Measure a clone, from start to end, against sending all bytes of the device to a discarding server.

        The note has the ratio to sending them to the same device.
        """
        target = self._directory / "clone-target"
        with devices.attached(self._raw, direct=False) as source, self._null(tls=True) as null:
            devices.fill(target, self._raw.stat().st_size)
            with devices.attached(target) as device:
                ours, theirs, there = measure.alternate(
                    self._rounds,
                    [
                        functools.partial(self._clone, source, device),
                        lambda: self._curl(self._raw, null),
                        functools.partial(self._ours, self._raw, device),
                    ],
                )
            target.unlink()
        note = f"(to the same device {ours.wall / there.wall:.2f})"
        ratio = ours.wall / theirs.wall
        return report.Row("clone", "block", ours, theirs, CLONE_AIM, ratio, note=note)

    def _ours(self, path: Path, device: Path | None = None) -> Cost:
        data = self._directory / "data"
        data.mkdir(exist_ok=True)
        target = device or data / "disk.img"
        with self._server({"DESTINATION": str(target)}) as port:
            cost = self._curl(path, f"https://localhost:{port}/v1beta1/upload", "--request", "POST")
        if device is None:
            target.unlink()
        return cost

    def _clone(self, source: Path, target: Path) -> Cost:
        with self._server({"DESTINATION": str(target)}) as port:
            env = {
                "CLIENT_KEY": self._made.client.key.read_text(),
                "CLIENT_CERT": self._made.client.certificate.read_text(),
                "SERVER_CA_CERT": self._made.authority.certificate.read_text(),
                "UPLOAD_URL": f"https://localhost:{port}/v1beta1/upload",
                "VOLUME_MODE": "block",
                "MOUNT_POINT": str(source),
            }
            settings = [f"{name}={value}" for name, value in env.items()]
            return measure.run(["env", *settings, *_pod(self._directory / "cloner.message")])

    def _curl(self, path: Path, url: str, *more: str) -> Cost:
        made = self._made
        pair = ["--cert", str(made.client.certificate), "--key", str(made.client.key)]
        authority = ["--cacert", str(made.authority.certificate)]
        return measure.run(["curl", "-sSf", *pair, *authority, *more, "-T", path, url])

    @contextlib.contextmanager
    def _null(self, *, tls: bool) -> Iterator[str]:
        port = processes.free_port()
        pair = [self._made.server.certificate, self._made.server.key] if tls else []
        argv = [sys.executable, "-m", "tests.bench.null", str(port), *pair]
        ready = functools.partial(processes.is_listening, port)
        with processes.running(argv, log=self._directory / f"null-{tls}.log", ready=ready):
            yield f"http{'s' * tls}://localhost:{port}/"

    @contextlib.contextmanager
    def _server(self, more: Mapping[str, str]) -> Iterator[int]:
        port = processes.free_port()
        env = {
            **os.environ,
            "LISTEN_ADDRESS": "127.0.0.1",
            "LISTEN_PORT": str(port),
            "TLS_CERT_FILE": str(self._made.server.certificate),
            "TLS_KEY_FILE": str(self._made.server.key),
            "CLIENT_CERT_FILE": str(self._made.authority.certificate),
            "CLIENT_NAME": uploads.CLIENT,
            **more,
        }
        ready = functools.partial(processes.is_listening, port)
        argv = _pod(self._directory / "server.message")
        with processes.running(argv, log=self._directory / "server.log", ready=ready, env=env) as server:
            yield port
            server.wait(processes.PATIENCE)


def _pod(message: Path) -> list[str]:
    return [sys.executable, "-m", "cdi_worker", "--metrics-port=0", f"--termination-log={message}"]
