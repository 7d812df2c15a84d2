"""The rows of VMware: a full copy by an export lease, and through nbdkit and the stub of the VDDK library."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.bench import bench as benches
from tests.bench import inputs
from tests.bench.bench import Bench, Side, Sides
from tests.bench.measure import Cost
from tests.bench.rows import disks
from tests.bench.wire import Wire
from tests.support import leases, servers, tls, vmware

#: The leases of a row, at most.
LEASES = 100
#: The network of a host.
WIRE = Wire(0.001, 50_000_000, mtu=9000)


def alone(bench: Bench, kind: str) -> Iterator[Sides]:
    """Measure the disk of a snapshot, with the lease, against a download of its stream."""
    target = bench.target(kind)
    with _lease(bench) as served:
        ours = bench.command(served.importing(target, "--disk", "1"), target)
        flags = "-n" if kind == "block" else ""
        yield Sides(ours, bench.shell(served.download(bench.temporary, target, flags), target))


for _kind in ("file", "block"):
    benches.row("vsphere", target=_kind, rival="curl; qemu-img convert -m 16 -W")(
        functools.partial(alone, kind=_kind)
    )


@benches.row("vsphere: 50 MB/s", rival="curl", more=True)
def distant(bench: Bench) -> Iterator[Sides]:
    """Measure the disk of a host at the speed of its network, against a download of the stream."""
    with inputs.folder(bench.directory, "distant") as own, WIRE.laid(own), _lease(bench) as served:
        yield Sides(
            bench.command(served.importing(bench.file, "--disk", "1"), bench.file),
            bench.shell(f"{served.curl(bench.file)} && sync {bench.file}", bench.file),
            bound=WIRE.seconds(_stream(bench.raw).stat().st_size),
        )


@benches.row("vsphere, 4 disks", rival="4 times at once: curl; qemu-img convert -m 16 -W")
def together(bench: Bench) -> Iterator[Sides]:
    """Measure all disks of a snapshot."""
    with _lease(bench, count=4) as served:
        folder = served.directory / "disks"

        def into_new(argv: Sequence[str | Path]) -> Side:
            def run() -> Cost:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                return bench.run(argv)

            return run

        each = served.download(f"{folder}/$n.vmdk", f"{folder}/$n.img")
        begin = f"for n in 1 2 3 4; do ({each}) & jobs+=($!); done"
        end = "for job in ${jobs[@]}; do wait $job || exit; done"
        yield Sides(into_new(served.importing(folder, "--all")), into_new(["bash", "-c", f"{begin}; {end}"]))


@dataclasses.dataclass(frozen=True)
class _Served:
    """A machine whose disks nginx serves as the host of a lease: over TLS, without a length and ranges."""

    vcsim: vmware.Vcsim
    url: str
    trust: Path

    @property
    def directory(self) -> Path:
        return self.vcsim.directory

    def importing(self, target: Path, *options: str) -> list[str | Path]:
        """Return the command that imports disks of the snapshot."""
        known = self.vcsim.machine(current=self.vcsim.snapshot(0))
        given = {
            "--source": "vsphere",
            "--user": vmware.USER,
            "--password-file": self.directory / "password",
            "--uuid": known.uuid,
            "--thumbprint": known.thumbprint,
            "--snapshot": known.current,
        }
        every = [part for pair in given.items() for part in pair]
        return benches.importing(known.endpoint, target, *every, *options)

    def curl(self, file: str | Path) -> str:
        """Return the command of the shell that downloads the stream of a disk."""
        return f"curl -sf --cacert {self.trust} {self.url} -o {file}"

    def download(self, file: str | Path, target: str | Path, flags: str = "") -> str:
        """Return the command of the shell that downloads the stream of a disk and converts it."""
        convert = disks.CONVERT.format(flags=flags, form="vmdk", file=file, target=target)
        return f"{self.curl(file)} && {convert}"


@contextlib.contextmanager
def _lease(bench: Bench, count: int = 1) -> Iterator[_Served]:
    """Serve a machine with so many disks, which are equal."""
    own, raw = bench.directory / f"vmware-{os.urandom(4).hex()}", bench.raw
    size = raw.stat().st_size
    vcsim = vmware.Vcsim(own, size, more=[size] * (count - 1), exports=True)
    (own / "password").write_text(vmware.PASSWORD)
    stream = _stream(raw)
    try:
        vcsim.take_snapshot()
        for disk in range(count):
            vcsim.content(0, disk).unlink()
            vcsim.content(0, disk).hardlink_to(raw)
        pair = tls.Authority(own / "nginx").issue()
        settings = servers.Settings(pair=pair, chunked=True)
        with vcsim.running(), servers.nginx(own / "nginx", stream.parent, settings) as web:
            url = web.url(stream)
            _state(vcsim, stream, url, pair)
            yield _Served(vcsim, url, own / "nginx/ca.pem")
    finally:
        shutil.rmtree(own)


def _state(vcsim: vmware.Vcsim, stream: Path, url: str, pair: tls.KeyPair) -> None:
    """Let the leases of the snapshot name a stream, and their manifests have its digests."""
    assert vcsim.host is not None
    devices = [each | {"URL": url, "Thumbprint": pair.thumbprint} for each in vcsim.host.devices()]
    digests = {}
    with stream.open("rb") as file:
        for name in ("sha1", "sha256"):
            file.seek(0)
            digests[name.upper()] = hashlib.file_digest(file, name).hexdigest()
    manifest = [
        {"Key": each["Key"], **digests, "Size": stream.stat().st_size, "Disk": True, "Capacity": vcsim.size}
        for each in devices
        if each["Disk"]
    ]
    # Each run has a lease of its own.
    manifests = {f"{vcsim.snapshot(0)}.{number}": manifest for number in range(1, LEASES)}
    vcsim.lease = {"Devices": devices, "Manifests": manifests}
    vcsim.save()


def _stream(raw: Path) -> Path:
    """Return the stream of a disk as ESXi sends it."""
    path = raw.with_suffix(".esxi.vmdk")
    if not path.exists():
        leases.by_esxi(raw, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
    return path


@benches.row("vddk", rival="nbdkit and nbdcopy, as virt-v2v")
def vddk(bench: Bench) -> Iterator[Sides]:
    """Measure against nbdcopy with its default settings."""
    target = bench.file
    with _disk(bench) as vcsim:
        yield Sides(
            bench.command(_ours(vcsim, target), target), bench.command(_nbdcopy(vcsim, target), target)
        )


@contextlib.contextmanager
def _disk(bench: Bench) -> Iterator[vmware.Vcsim]:
    own = bench.directory / f"vmware-{os.urandom(4).hex()}"
    vcsim = vmware.Vcsim(own, bench.setting.size)
    vcsim.content(0).unlink()
    vcsim.content(0).hardlink_to(inputs.noise(bench.directory, bench.setting.size))
    vcsim.take_snapshot()
    del vcsim.settings["log"]
    (own / "password").write_text(vmware.PASSWORD)
    try:
        with vcsim.running():
            yield vcsim
    finally:
        shutil.rmtree(own)


def _ours(vcsim: vmware.Vcsim, target: Path) -> list[str | Path]:
    known = vcsim.location(**vcsim.stage(0))
    given = {
        "--source": "vddk",
        "--user": vmware.USER,
        "--password-file": vcsim.directory / "password",
        "--uuid": known.uuid,
        "--backing-file": known.backing_file,
        "--thumbprint": known.thumbprint,
        "--vddk-libdir": known.vddk_libdir,
        "--current-checkpoint": known.current,
    }
    options = [part for pair in given.items() for part in pair]
    return benches.importing(known.endpoint, target, *options)


def _nbdcopy(vcsim: vmware.Vcsim, target: Path) -> list[str | Path]:
    given = {
        "libdir": vcsim.libdir,
        "server": "localhost",
        "user": vmware.USER,
        "password": f"+{vcsim.directory}/password",
        "thumbprint": vcsim.thumbprint,
        "vm": "moref=vm-1",
        "file": vcsim.file(0),
        "snapshot": vcsim.snapshot(0),
    }
    quoted = shlex.quote(str(target))
    copy = f'truncate -s {vcsim.size} {quoted} && nbdcopy --flush "$uri" {quoted}'
    plugin = ["vddk", *(f"{key}={value}" for key, value in given.items())]
    return ["nbdkit", "--readonly", "--unix=-", *plugin, f"--run={copy}"]
