"""Real NBD servers that a disk is written to, full of 0xFF at first."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support import devices, processes

KINDS = (
    "nbdkit memory",
    "nbdkit file",
    "nbdkit 4096",
    "nbdkit 65536",
    "nbdkit nozero",
    "qemu-nbd raw",
    "qemu-nbd qcow2",
    "qemu-nbd iscsi",
    "storage daemon raw",
    "storage daemon luks",
    "nbd-server",
)


@dataclasses.dataclass(frozen=True)
class Served:
    """A running server. ``path``: the file behind it, if there is one."""

    url: str
    path: Path
    process: subprocess.Popen[bytes] | None = None

    def guest(self, into: Path) -> Path:
        """Read the export with nbdcopy; return the file with its bytes."""
        processes.run("nbdcopy", "--requests=1", self.url, into)
        return into

    def kill(self) -> None:
        """Kill the server; what it has not flushed is lost."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def fill(self, size: int) -> None:
        """Fill the export with 0xFF."""
        dirt = self.path.with_name("dirt")
        dirt.write_bytes(devices.DIRT * size)
        processes.run("nbdcopy", dirt, self.url)


def qemu_nbd(path: str | Path, form: str, socket: Path, *options: str) -> list[str | Path]:
    """Return the command of a server that stays, for one connection unless ``options`` say otherwise."""
    return ["qemu-nbd", "--persistent", f"--format={form}", f"--socket={socket}", *options, path]


def _command(kind: str, path: Path, size: int, socket: Path) -> list[str | Path]:
    """Return the command that serves a new disk of a kind at ``path`` on ``socket``."""
    nbdkit: list[str | Path] = ["nbdkit", "--foreground", f"--unix={socket}"]
    server, _, form = kind.partition(" ")
    if server == "nbdkit" and form.isdigit():
        policy = [f"blocksize-{name}={form}" for name in ("minimum", "preferred")]
        path.write_bytes(bytes(-(-size // int(form)) * int(form)))
        policy += ["blocksize-maximum=1M", "blocksize-error-policy=error"]
        return [*nbdkit, "--filter=blocksize-policy", "file", path, *policy]
    if kind == "nbdkit memory":
        return [*nbdkit, "memory", str(size)]
    if form == "qcow2":
        processes.run("qemu-img", "create", "-q", "-f", form, path, str(size))
    else:
        path.write_bytes(bytes(size))
    if kind in {"nbdkit file", "nbdkit nozero"}:
        return [*nbdkit, *(["--filter=nozero"] if form == "nozero" else []), "file", path]
    if server == "qemu-nbd":
        return qemu_nbd(path, form, socket)
    if server == "storage":
        driver = form.partition(" ")[2]
        return _storage_daemon(driver, path, size, socket)
    config = path.with_name("nbd-server.conf")
    export = f"[disk]\nexportname = {path}\nflush = true\nfua = true\ntrim = true\n"
    config.write_text(f"[generic]\nunixsock = {socket}\nallowlist = true\n{export}")
    return ["nbd-server", "-C", config, "-p", path.with_name("pid")]


def _storage_daemon(driver: str, path: Path, size: int, socket: Path) -> list[str | Path]:
    secret = ["--object=secret,id=key,data=passphrase"]
    if driver == "luks":
        options = ("--object=secret,id=key,data=passphrase", "-okey-secret=key,iter-time=10")
        luks = ["qemu-img", "create", "-q", "-f", "luks", *options, path, str(size)]
        # It fails where the kernel accounts some milliseconds of work to no user time, until QEMU's commit
        # "crypto: run qcrypto_pbkdf2_count_iters in a new thread".
        processes.wait_for(lambda: subprocess.run(luks, check=False).returncode == 0, "qemu-img create")
    key = ",key-secret=key" if driver == "luks" else ""
    return [
        "qemu-storage-daemon",
        *secret,
        f"--blockdev=driver=file,node-name=file,filename={path},discard=unmap",
        f"--blockdev=driver={driver},node-name=disk,file=file{key},discard=unmap",
        f"--nbd-server=addr.type=unix,addr.path={socket}",
        "--export=type=nbd,id=one,node-name=disk,name=disk,writable=on",
    ]


@contextlib.contextmanager
def running(kind: str, folder: Path, size: int, *, dirty: bool = True) -> Iterator[Served]:
    """Serve a disk of ``size`` bytes until the end of the block."""
    with contextlib.ExitStack() as stack:
        if kind == "qemu-nbd iscsi":
            unit = stack.enter_context(_iscsi_unit(folder / "served", size))
            argv = qemu_nbd(unit, "raw", folder / "socket")
        else:
            argv = _command(kind, folder / "served", size, folder / "socket")
        processes.need(str(argv[0]), "nbdcopy")
        served = stack.enter_context(serving(argv, folder))
        if dirty:
            served.fill(size)
        yield served


@contextlib.contextmanager
def _iscsi_unit(path: Path, size: int) -> Iterator[str]:
    """Serve a new file as a logical unit over iSCSI until the end of the block; yield its address."""
    processes.need("tgtd")
    path.write_bytes(bytes(size))
    port, name, control = processes.free_port(), "iqn.2026-01.org.example:disk", path.with_name("tgtd")
    env = {**os.environ, "TGT_IPC_SOCKET": str(control)}
    argv = ["tgtd", "--foreground", "--iscsi", f"portal=127.0.0.1:{port}"]
    ready = functools.partial(processes.is_listening, control.with_name("tgtd.0"))
    with processes.running(argv, log=path.with_name("tgtd.log"), ready=ready, env=env) as process:
        admin = functools.partial(processes.run, "tgtadm", "--lld=iscsi", "--tid=1", env=env)
        admin("--op=new", "--mode=target", f"--targetname={name}")
        admin("--op=new", "--mode=logicalunit", "--lun=1", f"--backing-store={path}")
        admin("--op=bind", "--mode=target", "--initiator-address=ALL")
        try:
            yield f"iscsi://127.0.0.1:{port}/{name}/1"
        finally:
            process.kill()  # with a target it goes on after SIGTERM


@contextlib.contextmanager
def serving(argv: list[str | Path], folder: Path, path: str = "served") -> Iterator[Served]:
    """Run a server of the export ``disk`` on the socket ``folder/socket``."""
    socket = folder / "socket"
    socket.unlink(missing_ok=True)
    export = "" if argv[0] == "qemu-nbd" else "disk"
    ready = functools.partial(processes.is_listening, socket)
    if argv[0] == "nbd-server":
        # In the foreground it serves one client.
        processes.run(*argv)
        try:
            processes.wait_for(ready, "nbd-server")
            yield Served(f"nbd+unix:///{export}?socket={socket}", folder / path)
        finally:
            os.kill(int((folder / "pid").read_text()), signal.SIGTERM)
        return
    with processes.running(argv, log=folder / "server.log", ready=ready) as process:
        yield Served(f"nbd+unix:///{export}?socket={socket}", folder / path, process)
