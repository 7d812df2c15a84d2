"""Real NBD servers on 127.0.0.1: qemu-nbd, qemu-storage-daemon and nbdkit."""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Iterator
from pathlib import Path

from tests.support import processes, tls


@contextlib.contextmanager
def qemu_nbd(directory: Path, path: Path, *options: str, form: str = "raw") -> Iterator[int]:
    """Serve a disk by qemu-nbd, read-only and until the end of the block; yield the port."""
    processes.need("qemu-nbd")
    port = processes.free_port()
    given = [
        *options,
        "--read-only",
        "--persistent",
        f"--format={form}",
        "--bind=127.0.0.1",
        f"--port={port}",
    ]
    ready = functools.partial(processes.is_listening, port)
    with processes.running(["qemu-nbd", *given, path], log=directory / "qemu-nbd.log", ready=ready):
        yield port


@contextlib.contextmanager
def plain_qemu_nbd(directory: Path, path: Path, *options: str) -> Iterator[Path]:
    """Serve a disk as qemu-nbd does without options: to one client, until that leaves; yield the socket."""
    processes.need("qemu-nbd")
    socket = directory / "plain"
    command: list[str | Path] = [
        "qemu-nbd",
        *options,
        "--read-only",
        "--format=raw",
        f"--socket={socket}",
        path,
    ]
    with processes.running(
        command, log=directory / "qemu-nbd.log", ready=functools.partial(processes.has_listener, socket)
    ):
        yield socket


@contextlib.contextmanager
def nbdkit(directory: Path, *arguments: str | Path) -> Iterator[int]:
    """Serve by nbdkit; ``arguments`` are its options, the plugin and its parameters. Yield the port."""
    processes.need("nbdkit")
    port = processes.free_port()
    argv: list[str | Path] = ["nbdkit", "--foreground", "--ipaddr=127.0.0.1", f"--port={port}", *arguments]
    ready = functools.partial(processes.is_listening, port)
    with processes.running(argv, log=directory / "nbdkit.log", ready=ready):
        yield port


@contextlib.contextmanager
def storage_daemon(directory: Path, path: Path, export: str, *bitmaps: str) -> Iterator[int]:
    """Serve a qcow2 image by qemu-storage-daemon with its bitmaps; yield the port."""
    processes.need("qemu-storage-daemon")
    port = processes.free_port()
    listed = "".join(f",bitmaps.{number}={name}" for number, name in enumerate(bitmaps))
    argv = [
        "qemu-storage-daemon",
        f"--blockdev=driver=file,node-name=file,filename={path},read-only=on",
        "--blockdev=driver=qcow2,node-name=disk,file=file,read-only=on",
        f"--nbd-server=addr.type=inet,addr.host=127.0.0.1,addr.port={port}",
        f"--export=type=nbd,id=one,node-name=disk,name={export}{listed}",
    ]
    ready = functools.partial(processes.is_listening, port)
    with processes.running(argv, log=directory / "qsd.log", ready=ready):
        yield port


def credentials(folder: Path, authority: tls.Authority, pair: tls.KeyPair, kind: str = "server") -> Path:
    """Return a folder of certificates with the names of QEMU and nbdkit; ``kind``: server or client."""
    folder.mkdir(exist_ok=True)
    shutil.copy(authority.certificate, folder / "ca-cert.pem")
    shutil.copy(pair.certificate, folder / f"{kind}-cert.pem")
    shutil.copy(pair.key, folder / f"{kind}-key.pem")
    return folder


def bitmap(path: Path, name: str) -> None:
    """Add a persistent dirty bitmap to a qcow2 image: it records what is written from now on."""
    processes.run("qemu-img", "bitmap", "--add", "-f", "qcow2", path, name)


def write(path: Path, *commands: str) -> None:
    """Write to a qcow2 image as a guest, by commands of qemu-io."""
    given = [part for command in commands for part in ("-c", command)]
    processes.run("qemu-io", "-f", "qcow2", "-d", "unmap", *given, path)
