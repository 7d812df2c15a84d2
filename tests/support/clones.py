"""Volumes to clone, and the clone source, in this process or one of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import random
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from cdi_worker.formats.compressed import snappy
from cdi_worker.images import volume as volumes
from cdi_worker.images.engine import cancelling
from cdi_worker.importer import contract, progress
from cdi_worker.importer.send import extents, volume
from tests.support import devices, forked, processes, uploads

MIB = uploads.MIB
SYNC = uploads.SYNC
SIZE = 24 * MIB
DONE = '{"preallocationApplied":false,"message":"Clone Complete"}'
#: The headers of a clone in our own stream.
OURS = {"x-cdi-worker-stream": "extents-3"}
#: After files were cloned into a folder: CDI always reports them as preallocated.
FOLDER_DONE = '{"preallocationApplied":true,"message":"Clone Complete"}'


def write_disk(path: Path, size: int = SIZE) -> Path:
    """Write a disk of data, text and long zeros to a file or a device."""
    dice = random.Random(5)
    with path.open("r+b" if path.exists() else "wb") as stream:
        if not path.is_block_device():
            stream.truncate(size)
        else:
            for _ in range(size // MIB):
                stream.write(bytes(MIB))
        for offset, data in (
            (0, dice.randbytes(MIB + 5000)),
            (5 * MIB + 512, b"text " * 300_000),
        ):
            stream.seek(offset)
            stream.write(data)
        stream.seek(size - 512)
        stream.write(b"end!" * 128)
    return path


def fill_volume(directory: Path) -> Path:
    """Fill a directory as a file-system volume with a disk and other files."""
    for name in ("lost+found", "more/deep"):
        (directory / name).mkdir(parents=True)
    write_disk(directory / "disk.img").chmod(0o660)
    (directory / "lost+found" / "secret").write_text("not content")
    (directory / "more" / "deep" / "file").write_text("text\n" * 100)
    (directory / "more" / "empty").touch()
    (directory / "-dash").write_text("an unfriendly name")
    (directory / "more" / "link").symlink_to("deep/file")
    # A root file system is full of these.
    (directory / "more" / "absolute").symlink_to("/usr/lib/os-release")
    (directory / "more" / "above").symlink_to("../../../etc/passwd")
    os.link(directory / "more" / "absolute", directory / "more" / "hard", follow_symlinks=False)
    return directory


@dataclasses.dataclass(frozen=True)
class Receiver:
    """The volume of a receiver, and the upload servers that write to it."""

    certificates: uploads.Certificates
    paths: contract.Paths

    @property
    def data(self) -> Path:
        """Return the file-system volume."""
        return Path(self.paths.data)

    @property
    def disk(self) -> Path:
        """Return the disk in the file-system volume."""
        return self.data / "disk.img"

    def server(self, env: dict[str, str], data: Path | None = None) -> uploads.Server:
        """Return a server; ``data``: another file-system volume."""
        paths = self.paths if data is None else self.paths._replace(data=str(data))
        return uploads.Server(self.certificates, env, paths)

    def replaced(self, env: dict[str, str]) -> tuple[uploads.Server, uploads.Server]:
        """Return two servers at one address, as a pod and its replacement."""
        first = self.server(env)
        second = self.server({**env, "LISTEN_PORT": str(first.port)})
        second.port = first.port
        return first, second


@pytest.fixture
def receiver(certificates: uploads.Certificates, paths: contract.Paths) -> Receiver:
    """Return a receiver with an empty file-system volume."""
    return Receiver(certificates, paths)


class Place(NamedTuple):
    """An empty volume: the environment of its upload server, the disk, and what follows it on a device."""

    env: dict[str, str]
    disk: Path
    beyond: bytes | None


@contextlib.contextmanager
def place(kind: str, directory: Path, paths: contract.Paths) -> Iterator[Place]:
    """Yield a volume: ``folder``, or a device with sectors of ``kind`` bytes."""
    if kind == "folder":
        yield Place({}, Path(paths.data, "disk.img"), None)
        return
    with devices.loop(directory, 32 * MIB, sector=int(kind)) as device:
        yield Place({"DESTINATION": str(device)}, device, devices.DIRT)


PLACES = ("folder", "512", "4096")


def environment(server: uploads.Server, mode: str, directory: Path, **more: str) -> dict[str, str]:
    """Return the environment of a clone source; ``mode`` and ``directory`` of the volume to send."""
    certificates = server.certificates
    return {
        "CLIENT_KEY": certificates.client.key.read_text(),
        "CLIENT_CERT": certificates.client.certificate.read_text(),
        "SERVER_CA_CERT": certificates.authority.certificate.read_text(),
        "UPLOAD_URL": server.url(SYNC),
        "VOLUME_MODE": mode,
        "MOUNT_POINT": str(directory),
        **more,
    }


def body(folder: Path, mode: str, *, ours: bool) -> bytes:
    """Return what a clone source sends of ``folder``, or of the disk in it where ``mode`` is ``block``."""
    directory, shown = str(folder / "disk.img" if mode == "block" else folder), progress.NullProgress()
    with contextlib.ExitStack() as stack:
        parts: Iterable[bytes | memoryview]
        if not ours:
            settings = volume.Settings("", volume.MODES[mode], directory)
            parts = snappy.frames(stack.enter_context(volume.plain(settings, shown)))
        elif mode == "block":
            parts = extents.Stream(stack.enter_context(volumes.Volume(directory)), shown).chunks(0)
        else:
            disk = stack.enter_context(extents.open_disk(directory))
            parts = extents.Directory(directory, disk, shown, sparse=True).chunks(0)
        return b"".join(bytes(part) for part in parts)


def run(env: dict[str, str]) -> str:
    """Run the clone source in this process and return its termination message."""
    outcome = volume.run(env, contract.Paths(metrics_port=0), cancelling.Cancel())
    assert outcome.status == 0
    return outcome.message


def same_tree(source: Path, target: str | Path) -> None:
    """Check that two trees are the same, without ``lost+found``."""
    processes.run("diff", "-r", "--no-dereference", "--exclude=lost+found", source, target)


def start_source(env: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start the clone source as a process; ``log`` gets its termination message."""
    argv = [sys.executable, "-m", "cdi_worker", "-v=3", "-alsologtostderr", f"--termination-log={log}"]
    argv += ["--metrics-port=0"]
    return forked.Popen[bytes](argv, env={**forked.ENVIRONMENT, **env})


@contextlib.contextmanager
def target(server: uploads.Server, paths: contract.Paths, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``server``, which is not entered, as a process; its termination message is in ``paths``."""
    argv = [sys.executable, "-m", "cdi_worker", "-v=3", f"--data-dir={paths.data}", "--metrics-port=0"]
    argv += [f"--termination-log={paths.termination_log}", f"--block-device={paths.block}"]
    ready = functools.partial(processes.is_listening, server.port)
    with processes.running(argv, log=log, ready=ready, env={**forked.ENVIRONMENT, **server.env}) as process:
        yield process
