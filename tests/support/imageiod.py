"""The real ovirt-imageio daemon on 127.0.0.1, and the disks it serves."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import processes, tls


class Daemon:
    """A running daemon; add and remove tickets as an oVirt host does."""

    def __init__(self, directory: Path, port: int) -> None:
        from ovirt_imageio import admin

        self.port = port
        self.directory = directory
        self._configuration = admin.load_config(str(directory))
        self._lock = threading.Lock()

    def url(self, ticket: str) -> str:
        """Return the transfer URL of a ticket."""
        return f"https://127.0.0.1:{self.port}/images/{ticket}"

    def add(self, ticket: str, url: str, size: int) -> None:
        """Add a ticket to read ``size`` bytes from ``url``."""
        self._ask(
            "add_ticket",
            {
                "uuid": ticket,
                "url": url,
                "size": size,
                "timeout": 300,
                "ops": ["read"],
                "transfer_id": ticket,
            },
        )

    def remove(self, ticket: str) -> None:
        """Remove a ticket."""
        self._ask("del_ticket", ticket)

    def idle(self, ticket: str) -> int:
        """Return the whole seconds since a ticket was last used."""
        return int(self._ask("get_ticket", ticket)["idle_time"])

    def log(self) -> str:
        """Return the daemon's log."""
        return (self.directory / "daemon.log").read_text()

    def _ask(self, call: str, *arguments: object) -> Any:
        from ovirt_imageio import admin

        with self._lock, contextlib.closing(admin.Client(self._configuration)) as client:
            return getattr(client, call)(*arguments)


@contextlib.contextmanager
def daemon(
    directory: Path, pair: tls.KeyPair, *, local: bool = True, level: str = "INFO"
) -> Iterator[Daemon]:
    """Run a daemon; ``local``: also on a unix socket, which clients on this machine prefer.

    With ``level`` DEBUG its log has every data request.
    """
    program = Path(sysconfig.get_path("scripts"), "ovirt-imageio")
    if not program.exists():
        pytest.skip("needs ovirt-imageio")
    port = processes.free_port()
    (directory / "conf.d").mkdir(parents=True)
    (directory / "conf.d" / "test.conf").write_text(
        CONFIGURATION.format(pair=pair, port=port, directory=directory, local=str(local).lower(), level=level)
    )
    control = directory / "control"
    ready = lambda: processes.is_listening(port) and processes.is_listening(control)  # noqa: E731  (one expression)
    with processes.running([program, "-c", directory], log=directory / "daemon.log", ready=ready):
        yield Daemon(directory, port)


CONFIGURATION = """\
[daemon]
systemd_enable = false
drop_privileges = false
run_dir = {directory}
poll_interval = 0.1
[tls]
key_file = {pair.key}
cert_file = {pair.certificate}
[remote]
host = 127.0.0.1
port = {port}
[local]
enable = {local}
socket = {directory}/local
[control]
transport = unix
socket = {directory}/control
[handlers]
keys = stderr
[logger_root]
level = {level}
handlers = stderr
"""


@dataclasses.dataclass(frozen=True)
class Volume:
    """One qcow2 file of a disk: the changes since its backing file. ``snapshot``: its owner."""

    id: str
    path: Path
    size: int
    snapshot: str


class Chain:
    """The volumes of a disk in a directory of its own, oldest first; the last is the active one."""

    def __init__(self, directory: Path, disk: str, content: Path) -> None:
        self.directory = directory
        self.disk = disk
        directory.mkdir()
        self._numbers = itertools.count()
        first = self._volume(content.stat().st_size)
        processes.run("qemu-img", "convert", "-f", "raw", "-O", "qcow2", content, first.path)
        self.volumes = [first]

    @property
    def active(self) -> Volume:
        """Return the volume that the machine writes to."""
        return self.volumes[-1]

    def volume(self, number: str) -> Volume | None:
        """Return the volume with an ID, or None."""
        return next((volume for volume in self.volumes if volume.id == number), None)

    def snapshot(self, *writes: str, size: int | None = None) -> Volume:
        """Freeze the active volume, add a new one on top and write to it; ``writes`` are qemu-io commands."""
        below = self.active
        size = size or below.size
        above = self._volume(size)
        backing = ["-b", below.path.name, "-F", "qcow2"]
        processes.run("qemu-img", "create", "-q", "-f", "qcow2", *backing, above.path, str(size))
        self.volumes.append(above)
        self.write(*writes)
        return self.active

    def remove(self, number: str) -> None:
        """Remove the snapshot that owns a frozen volume, which gets data and snapshot of the one above."""
        index = [volume.id for volume in self.volumes].index(number)
        below, above, *rest = self.volumes[index:]
        processes.run("qemu-img", "commit", "-q", "-f", "qcow2", above.path)
        if rest:
            backing = ["-b", below.path.name, "-F", "qcow2"]
            processes.run("qemu-img", "rebase", "-u", "-f", "qcow2", *backing, rest[0].path)
        above.path.unlink()
        self.volumes[index:] = [dataclasses.replace(above, id=below.id, path=below.path), *rest]

    def _volume(self, size: int) -> Volume:
        name = f"{self.disk}-{next(self._numbers)}"
        return Volume(name, self.directory / name, size, f"vm-snapshot-{name}")

    def write(self, *writes: str) -> None:
        """Run qemu-io commands on the active volume."""
        arguments = [item for command in writes for item in ("-c", command)]
        if arguments:
            processes.run("qemu-io", "-f", "qcow2", *arguments, self.active.path)

    def content(self, number: str, into: Path) -> Path:
        """Write the raw disk at a volume to ``into`` and return that path."""
        volume = self.volume(number)
        assert volume
        processes.run("qemu-img", "convert", "-f", "qcow2", "-O", "raw", volume.path, into)
        return into


@contextlib.contextmanager
def exported(directory: Path, path: Path, *, delay: str = "") -> Iterator[Path]:
    """Serve a qcow2 chain by qemu-nbd as an oVirt host does; yield the socket.

    ``delay`` of each read, such as ``5ms``.
    """
    socket = directory / "nbd"
    log = directory / "nbd.log"
    argv: list[str | Path] = ["qemu-nbd", "-r", "-f", "qcow2", "-x", "", "-e", "16", "-t"]
    with contextlib.ExitStack() as stack:
        command = [*argv, f"--socket={socket}", path]
        ready = functools.partial(processes.is_listening, socket)
        stack.enter_context(processes.running(command, log=log, ready=ready))
        if delay:
            front = directory / "slow"
            slow: list[str | Path] = ["nbdkit", "-f", "-r", "-U", front, "--filter=delay", "nbd"]
            command = [*slow, f"socket={socket}", f"delay-read={delay}"]
            ready = functools.partial(processes.is_listening, front)
            stack.enter_context(processes.running(command, log=log, ready=ready))
            socket = front
        yield socket
