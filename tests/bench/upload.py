"""The rows of uploads and clones, compared with a client whose server discards the bytes."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.bench import inputs, measure, report
from tests.bench.measure import Cost
from tests.support import devices, processes, uploads

#: The allowed ratio of each upload to one whose bytes are discarded.
UPLOADS = ("raw", "raw.gz", "qcow2")
AIM = 1.2
CLONE_AIM = 0.35
#: The clones: of a device or a file system (with a disk and a small file), and the kind of the target.
CLONES = (("device", "block"), ("device", "file"), ("file system", "file"), ("file system", "block"))
#: The volume modes of the contract.
MODES = {"device": "block", "file system": "filesystem"}


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
        clones: dict[str, Callable[[], report.Row]] = {
            f"clone {what} to {kind}": functools.partial(self.clone, what, kind) for what, kind in CLONES
        }
        return found | clones

    def upload(self, name: str) -> report.Row:
        """Measure curl against our server, and against one that discards everything.

        The rival uses TLS, as our server must; the note has the ratio to plain HTTP.
        """
        path = self._raw if name == "raw" else inputs.form(self._raw, name)
        with (
            self._null(tls=True) as null,
            self._null(tls=False) as plain,
            self._target("file") as target,
        ):
            ours, theirs, plainly = measure.alternate(
                self._rounds,
                [
                    functools.partial(self._ours, path, target),
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

    def clone(self, what: str, kind: str) -> report.Row:
        """Measure a clone, from start to end, against sending all bytes of its disk to a discarding server.

        The note has the ratio to sending them to the same target.
        """
        with self._source(what) as source, self._target(kind) as target, self._null(tls=True) as null:
            ours, theirs, there = measure.alternate(
                self._rounds,
                [
                    functools.partial(self._clone, MODES[what], source, target),
                    lambda: self._curl(self._raw, null),
                    functools.partial(self._ours, self._raw, target),
                ],
            )
        note = f"(to the same target {ours.wall / there.wall:.2f})"
        ratio = ours.wall / theirs.wall
        return report.Row(f"clone of a {what}", kind, ours, theirs, CLONE_AIM, ratio, note=note)

    @contextlib.contextmanager
    def _source(self, what: str) -> Iterator[Path]:
        """Yield the volume of a clone source: a device, or a directory with a disk and a small file."""
        if what == "device":
            with devices.attached(self._raw, direct=False) as device:
                yield device
            return
        volume = self._directory / "volume"
        volume.mkdir(exist_ok=True)
        processes.run("cp", "--sparse=always", self._raw, volume / "disk.img")
        (volume / "note").write_text("beside the disk")
        yield volume
        shutil.rmtree(volume)

    @contextlib.contextmanager
    def _target(self, kind: str) -> Iterator[Path]:
        """Yield the disk of a target: a device that is not empty, or a file that does not exist."""
        if kind == "file":
            folder = self._directory / "data"
            folder.mkdir(exist_ok=True)
            yield folder / "disk.img"
            return
        backing = devices.fill(self._directory / "clone-target", self._raw.stat().st_size)
        with devices.attached(backing) as device:
            yield device
        backing.unlink()

    def _ours(self, path: Path, target: Path) -> Cost:
        with self._server(target) as port:
            return self._curl(path, f"https://localhost:{port}/v1beta1/upload", "--request", "POST")

    def _clone(self, mode: str, source: Path, target: Path) -> Cost:
        with self._server(target) as port:
            env = {
                "CLIENT_KEY": self._made.client.key.read_text(),
                "CLIENT_CERT": self._made.client.certificate.read_text(),
                "SERVER_CA_CERT": self._made.authority.certificate.read_text(),
                "UPLOAD_URL": f"https://localhost:{port}/v1beta1/upload",
                "VOLUME_MODE": mode,
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
        argv = _pod(self._directory / "server.message")
        with processes.running(argv, log=self._directory / "server.log", ready=ready, env=env) as server:
            yield port
            server.wait(processes.PATIENCE)
        if not target.is_block_device():
            for path in target.parent.iterdir():
                path.unlink()


def _pod(message: Path) -> list[str]:
    return [sys.executable, "-m", "cdi_worker", "--metrics-port=0", f"--termination-log={message}"]
