"""Disks in every format over HTTP, compared with the commands a user would type."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.bench import bench as benches
from tests.bench import go, inputs
from tests.bench.bench import Bench, Sides, Work
from tests.bench.measure import Cost
from tests.support import devices, misbehave, servers, tls, worker

MIB = 1 << 20

#: The steps between the download and the disk, and how much of the rival's time is allowed.
PIPES = {
    "raw": ("", 0.5),
    "raw.gz": ("pigz -dc |", 0.35),
    "raw.xz": ("xz -T0 -dc |", 1.0),
    "raw.zst": ("zstd -dc |", 0.6),
}
CONVERTED = {"qcow2": 0.5, "c.qcow2": 0.6, "vmdk": 0.9, "vhdx": 0.9}
CONVERT = "qemu-img convert -m 16 -W {flags} -f {form} -O raw {file} {target} && sync -d {target}"


def pipe(bench: Bench, name: str, kind: str) -> Iterator[Sides]:
    """Measure a raw disk, also compressed, against curl, the tool and dd."""
    path = bench.form(name)
    yield _piped(bench, path, name, kind, bench.web.url(path))


def converted(bench: Bench, name: str, kind: str) -> Iterator[Sides]:
    """Measure a disk format against a download followed by qemu-img."""
    path = bench.form(name)
    yield _converted(bench, path, name, kind, bench.web.url(path))


def secure(bench: Bench, name: str) -> Iterator[Sides]:
    """Measure the same over https, where each side decrypts."""
    path = bench.form(name)
    with inputs.folder(bench.directory, "tls") as own:
        authority = tls.Authority(own)
        with bench.nginx("secure", servers.Settings(pair=authority.issue())) as web:
            sides = _piped if name in PIPES else _converted
            yield sides(bench, path, name, "file", web.url(path), authority.certificate)


def _piped(bench: Bench, path: Path, name: str, kind: str, url: str, authority: Path | None = None) -> Sides:
    target = bench.target(kind)
    sparse = "" if kind == "block" else "sparse,"
    dd = f"dd bs=1M iflag=fullblock conv={sparse}fsync status=none of={target}"
    unpack = "" if name == "raw" else name
    return Sides(
        bench.imports(url, target, *_trusting("--ca-file", authority)),
        bench.shell(f"{_curl(url, authority)} | {PIPES[name][0]} {dd}", target),
        go=None if authority else go.importer(bench, kind, url),
        work=Work(path.stat().st_size, bench.setting.data, unpack),
    )


def _converted(
    bench: Bench, path: Path, name: str, kind: str, url: str, authority: Path | None = None
) -> Sides:
    target, form = bench.target(kind), name.removeprefix("c.")
    flags = "-n" if kind == "block" else ""
    convert = CONVERT.format(flags=flags, form=form, file=bench.temporary, target=target)
    return Sides(
        bench.imports(url, target, *_trusting("--ca-file", authority)),
        bench.shell(f"{_curl(url, authority)} -o {bench.temporary} && {convert}", target),
        go=None if authority else go.importer(bench, kind, url),
        work=Work(path.stat().st_size, bench.setting.data, name if name == "c.qcow2" else ""),
    )


def _curl(url: str, authority: Path | None) -> str:
    return " ".join(map(str, ["curl", "-sf", *_trusting("--cacert", authority), url]))


def _trusting(option: str, authority: Path | None) -> list[str | Path]:
    return [option, authority] if authority else []


for _kind in ("file", "block"):
    for _name, (_unpack, _aim) in PIPES.items():
        _rival = ", ".join(f"`{step.strip(' |')}`" for step in ("curl", _unpack, "dd") if step)
        benches.row(_name, target=_kind, rival=_rival, aim=_aim)(
            functools.partial(pipe, name=_name, kind=_kind)
        )
    for _name, _aim in CONVERTED.items():
        benches.row(_name, target=_kind, rival="`curl`, then `qemu-img convert -m 16 -W`", aim=_aim)(
            functools.partial(converted, name=_name, kind=_kind)
        )


for _name, _rival, _aim in (
    ("raw", "`curl`, `dd`", PIPES["raw"][1]),
    ("qcow2", "`curl`, then `qemu-img convert -m 16 -W`", CONVERTED["qcow2"]),
):
    benches.row(f"{_name} over https", rival=_rival, aim=_aim)(functools.partial(secure, name=_name))


@benches.row(
    "raw.gz against isal alone",
    rival="the same decompression library (isal) writing to /dev/null",
    aim=1.3,
    pod=False,
)
def isal(bench: Bench) -> Iterator[Sides]:
    """Measure decompression alone: the lower bound for raw.gz with this decompressor."""
    packed = bench.form("raw.gz")
    alone = f"{sys.executable} -m isal.igzip -dc {packed} > /dev/null"
    yield Sides(
        bench.imports(bench.web.url(packed), bench.file),
        bench.shell(alone, bench.file),
        work=Work(packed.stat().st_size, bench.setting.data, "raw.gz"),
    )


@benches.row("qcow2 in gz", rival="`curl`, `pigz -dc`, then `qemu-img convert`", aim=0.5)
def forward(bench: Bench) -> Iterator[Sides]:
    """Measure a qcow2 image inside gz, which can only be read in order."""
    path = bench.form("qcow2.gz")
    url = bench.web.url(path)
    convert = CONVERT.format(flags="", form="qcow2", file=bench.temporary, target=bench.file)
    yield Sides(
        bench.imports(url, bench.file),
        bench.shell(f"curl -sf {url} | pigz -dc > {bench.temporary} && {convert}", bench.file),
        go=go.importer(bench, "file", url),
        work=Work(path.stat().st_size, bench.setting.data, "qcow2.gz"),
    )


@benches.row(
    "40 MB/s a connection",
    rival="one `curl`; the server limits each connection to 40 MB/s (256 MiB of data)",
    aim=0.3,
)
def limited(bench: Bench) -> Iterator[Sides]:
    """Measure a server that limits each connection to 40 MB/s."""
    path = inputs.noise(bench.directory, 256 * MIB)
    with bench.nginx("limited", servers.Settings(limit_rate=40_000_000)) as web:
        url = web.url(path)
        yield Sides(
            bench.imports(url, bench.file),
            bench.shell(f"curl -sf {url} -o {bench.file} && sync -d {bench.file}", bench.file),
            work=Work(256 * MIB, 256 * MIB),
        )


@benches.row(
    "resume 90 % at 40 MB/s",
    rival="`curl`, which fetches all of 1 GiB; one connection at 40 MB/s each",
    aim=0.15,
    pod=False,
)
def resumed(bench: Bench) -> Iterator[Sides]:
    """Measure an import that resumes 90 % of a disk against fetching all of it, both at 40 MB/s."""
    path = inputs.noise(bench.directory, 1024 * MIB)
    kept = bench.file.with_name("kept.part")
    part = bench.file.with_name(f"{bench.file.name}.part")
    with bench.nginx("limited", servers.Settings(limit_rate=40_000_000)) as web:
        url = web.url(path)
        bench.fresh(bench.file)
        _stop(
            url,
            bench.file,
            lambda: part.exists() and part.stat().st_blocks * 512 > path.stat().st_size * 0.9,
        )
        part.rename(kept)

        def resume() -> Cost:
            bench.fresh(bench.file)
            subprocess.run(["cp", kept, part], check=True)
            os.sync()
            return bench.run(benches.importing(url, bench.file, "--connections", "1"))

        try:
            yield Sides(
                resume, bench.shell(f"curl -sf {url} -o {bench.file} && sync -d {bench.file}", bench.file)
            )
        finally:
            kept.unlink()


def _stop(url: str, target: Path, is_time: Callable[[], bool]) -> None:
    """Start an import and end it with SIGTERM when ``is_time``."""
    with subprocess.Popen(benches.importing(url, target), stderr=subprocess.DEVNULL) as process:
        while not is_time():
            time.sleep(0.02)
        process.terminate()


@benches.row("reset every 64 MiB", rival="none: bytes fetched by size (256 MiB of data)", aim=1.1)
def resets(bench: Bench) -> Iterator[Sides]:
    """Count the bytes fetched from a server that resets every connection after 64 MiB."""
    body = inputs.noise(bench.directory, 256 * MIB).read_bytes()
    with misbehave.Server() as server:
        url = server.serve("/disk", misbehave.Page(body, cut=64 * MIB))
        fetched: list[float] = []
        fetching = bench.imports(url, bench.file)

        def ours() -> Cost:
            before = server.sent("/disk")
            cost = fetching()
            fetched.append((server.sent("/disk") - before) / len(body))
            return cost

        yield Sides(
            ours,
            work=Work(256 * MIB, 256 * MIB),
            verdict=lambda _: (max(fetched), "bytes fetched / size"),
        )


def huge(bench: Bench, form: str) -> Iterator[Sides]:
    """Measure 1 TiB of virtual size with 100 MiB of data, to a file system with space for the data."""
    url = bench.web.url(inputs.huge(bench.directory, form))
    with devices.filesystem("xfs", bench.directory, 1100 * inputs.GIB) as mount:
        yield Sides(bench.imports(url, mount / "disk.img"), work=Work(100 * MIB, 100 * MIB))


for _form, _name in (("qcow2", "1 TiB virtual, 100 MiB data"), ("vhdx", "vhdx of 1 TiB, 100 MiB data")):
    benches.row(_name, pod=False)(functools.partial(huge, form=_form))


@benches.row("blank 1 GiB", rival="`qemu-img create`, then a sync; the aim is in seconds", aim=0.3)
def blank(bench: Bench) -> Iterator[Sides]:
    """Measure the start-up time."""
    yield Sides(
        bench.command([*worker.COMMAND, "blank", bench.file, "1Gi"], bench.file),
        bench.shell(f"qemu-img create -q -f raw {bench.file} 1G && sync {bench.file}", bench.file),
        go=go.importer(bench, "file", "", IMPORTER_SOURCE="none"),
        verdict=lambda costs: (costs[0].wall, "seconds"),
    )
