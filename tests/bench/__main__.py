"""Measure the worker against the commands a user would type: ``python -m tests.bench``.

Each row alternates with its rival, five rounds, medians. Compare ratios: machines differ and are noisy. The
result is ``docs/about/benchmarks.md`` with its plots.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.bench import inputs, report, scale, upload, vmware
from tests.bench import measure as bench_measure
from tests.bench import ovirt as bench_ovirt
from tests.bench.measure import Cost
from tests.support import containers, devices, misbehave, objectservers, registries, servers

ROUNDS = 5
MIB = 1 << 20
#: Of the rows in ``scale``: imports at once, MiB of each, and extents of the largest disk.
IMPORTS, SIZE, EXTENTS = 50, 128, 1 << 20

#: The steps between the download and the disk, and how much of the rival's time is allowed.
PIPES = {
    "raw": ("", 0.5),
    "raw.gz": ("pigz -dc |", 0.35),
    "raw.xz": ("xz -T0 -dc |", 1.0),
    "raw.zst": ("zstd -dc |", 0.6),
}
CONVERTED = {"qcow2": 0.5, "c.qcow2": 0.6, "vmdk": 0.9, "vhdx": 0.9}
CONVERT = "qemu-img convert -m 16 -W {flags} -f {form} -O raw {file} {target} && sync -d {target}"


@dataclasses.dataclass(frozen=True)
class Target:
    """A target: a file, removed before each run, or a block device."""

    path: Path
    block: bool

    def fresh(self) -> None:
        if not self.block:
            self.path.unlink(missing_ok=True)

    @property
    def dd(self) -> str:
        sparse = "" if self.block else "sparse,"
        return f"dd bs=1M iflag=fullblock conv={sparse}fsync status=none of={self.path}"


class Bench:
    """The rows of the report. Each method measures one row."""

    def __init__(self, directory: Path, web: servers.Web, rounds: int) -> None:
        self.directory = directory
        self.web = web
        self.rounds = rounds
        self.raw = inputs.disk(directory)
        self.temporary = directory / "temporary"

    def pipe(self, name: str, target: Target) -> report.Row:
        """Measure a raw disk, also compressed, against curl, the tool and dd."""
        path = self.raw if name == "raw" else inputs.form(self.raw, name)
        unpack, aim = PIPES[name]
        url = self.web.url(path)
        stages = {"download": f"curl -sf {url} -o /dev/null"}
        if unpack:
            stages["unpack"] = f"{unpack.rstrip('| ')} < {path} > /dev/null"
        stages["write"] = f"{target.dd} if={self.raw}"
        return self._row(name, target, aim, f"curl -sf {url} | {unpack} {target.dd}", url, stages)

    def converted(self, name: str, target: Target) -> report.Row:
        """Measure a disk format against a download followed by qemu-img."""
        path = inputs.form(self.raw, name)
        url, form = self.web.url(path), name.removeprefix("c.")
        convert = CONVERT.format(
            flags="-n" if target.block else "", form=form, file="{file}", target=target.path
        )
        stages = {"download": f"curl -sf {url} -o /dev/null", "convert": convert.format(file=path)}
        rival = f"curl -sf {url} -o {self.temporary} && {convert.format(file=self.temporary)}"
        return self._row(name, target, CONVERTED[name], rival, url, stages)

    def forward(self, target: Target) -> report.Row:
        """Measure a qcow2 image inside gz, which can only be read in order."""
        path = inputs.form(self.raw, "qcow2.gz")
        url = self.web.url(path)
        convert = CONVERT.format(flags="", form="qcow2", file=self.temporary, target=target.path)
        rival = f"curl -sf {url} | pigz -dc > {self.temporary} && {convert}"
        stages = {"unpack": f"pigz -dc < {path} > /dev/null"}
        return self._row("qcow2 in gz", target, 0.5, rival, url, stages)

    def limited(self, target: Target) -> report.Row:
        """Measure a server that limits each connection to 40 MB/s."""
        path = inputs.noise(self.directory, 256 * MIB)
        with _nginx(self.directory, "limited", servers.Settings(limit_rate=40_000_000)) as web:
            url = web.url(path)
            return self._row("40 MB/s a connection", target, 0.3, f"curl -sf {url} -o {target.path}", url, {})

    def resumed(self, target: Target) -> report.Row:
        """Measure an import that resumes 90 % of a disk against fetching all of it, both at 40 MB/s."""
        path = inputs.noise(self.directory, 2048 * MIB)
        kept = self.directory / "kept.part"
        part = target.path.with_name(f"{target.path.name}.part")
        with _nginx(self.directory, "limited", servers.Settings(limit_rate=40_000_000)) as web:
            url = web.url(path)
            target.fresh()
            self._stop(
                url, target, lambda: part.exists() and part.stat().st_blocks * 512 > path.stat().st_size * 0.9
            )
            part.rename(kept)
            fetching = self._ours(url, target, "--connections", "1")

            def resume() -> Cost:
                target.fresh()
                subprocess.run(["cp", kept, part], check=True)
                os.sync()
                return fetching()

            ours, theirs = bench_measure.alternate(
                self.rounds, [resume, self._shell(f"curl -sf {url} -o {target.path}", target)]
            )
        kept.unlink()
        return report.Row("resume 90 % at 40 MB/s", "file", ours, theirs, 0.15, ours.wall / theirs.wall)

    def _stop(self, url: str, target: Target, is_time: Callable[[], bool]) -> None:
        """Start an import and end it with SIGTERM when ``is_time``."""
        argv = [*_worker(), "import", "--force", "--progress", "none", url, target.path]
        with subprocess.Popen(argv, stderr=subprocess.DEVNULL) as worker:
            while not is_time():
                time.sleep(0.02)
            worker.terminate()

    def resets(self, target: Target) -> report.Row:
        """Count the bytes fetched from a server that resets every connection after 64 MiB."""
        body = inputs.noise(self.directory, 256 * MIB).read_bytes()
        with misbehave.Server() as server:
            url = server.serve("/disk", misbehave.Page(body, cut=64 * MIB))
            cost = self._ours(url, target)()
            ratio = server.sent("/disk") / len(body)
        return report.Row(
            "reset every 64 MiB", "file", cost, aim=1.1, ratio=ratio, note="bytes fetched / size"
        )

    def huge(self, _place: Target) -> report.Row:
        """Measure 1 TiB of virtual size with 100 MiB of data, to a file system with space for the data."""
        url = self.web.url(inputs.huge(self.directory))
        with devices.filesystem("xfs", self.directory, 1100 * inputs.GIB) as mount:
            target = Target(mount / "disk.img", block=False)
            (cost,) = bench_measure.alternate(self.rounds, [self._ours(url, target)])
        return report.Row("1 TiB virtual, 100 MiB data", "file", cost, note="seconds")

    def blank(self, target: Target) -> report.Row:
        """Measure the start-up time."""

        def make() -> Cost:
            target.fresh()
            return bench_measure.run([*_worker(), "blank", target.path, "1Gi"])

        (cost,) = bench_measure.alternate(self.rounds, [make])
        return report.Row("blank 1 GiB", "file", cost, aim=0.3, ratio=cost.wall, note="seconds")

    def isal(self) -> report.Row:
        """Measure decompression alone: the lower bound for raw.gz with this decompressor."""
        packed = inputs.form(self.raw, "raw.gz")
        target = Target(self.directory / "target", block=False)
        alone = f"{sys.executable} -m isal.igzip -dc {packed} > /dev/null"
        return self._row("raw.gz against isal alone", target, 1.3, alone, self.web.url(packed), {})

    def registry(self, target: Target) -> report.Row:
        """Measure a compressed qcow2 image in a layer against the slowest stage by itself."""
        packed, image = (inputs.form(self.raw, name) for name in ("c.qcow2.layer", "c.qcow2"))
        layer = containers.Blob(packed.read_bytes(), "application/vnd.oci.image.layer.v1.tar+gzip")
        with registries.registry(self.directory / "registry") as served:
            served.push("disk", containers.Image((layer,)))
            stages = {
                "download": f"curl -sf {served.url}/v2/disk/blobs/{layer.digest} -o /dev/null",
                "gunzip": f"{sys.executable} -m isal.igzip -dc {packed} > /dev/null",
                "write": CONVERT.format(flags="", form="qcow2", file=image, target=target.path),
            }
            ours, *alone = bench_measure.alternate(
                self.rounds,
                [
                    self._ours(served.reference("disk"), target, "--insecure"),
                    *(self._shell(command, target) for command in stages.values()),
                ],
            )
        slowest = max(alone, key=lambda cost: cost.wall)
        limits = dict(zip(stages, alone, strict=True))
        ratio = ours.wall / slowest.wall
        return report.Row("c.qcow2 in a layer", "file", ours, slowest, 1.15, ratio, limits)

    def s3(self, target: Target) -> report.Row:
        """Measure a raw disk by signed S3 requests against the same object by plain HTTP."""
        path = inputs.noise(self.directory, 256 * MIB)
        secret = self.directory / "secret"
        secret.write_text(objectservers.SECRET_KEY)
        own = self.directory / "seaweed"
        own.mkdir(exist_ok=True)
        with objectservers.seaweed(own) as store:
            client = store.client()
            client.upload_file(str(path), objectservers.BUCKET, path.name)
            presigned = client.generate_presigned_url(
                "get_object", {"Bucket": objectservers.BUCKET, "Key": path.name}
            )
            keys = ("--source", "s3", "--user", objectservers.ACCESS_KEY, "--password-file", str(secret))
            ours, theirs = bench_measure.alternate(
                self.rounds, [self._ours(store.url(path.name), target, *keys), self._ours(presigned, target)]
            )
        shutil.rmtree(own)
        return report.Row("raw from S3 against http", "file", ours, theirs, 1.1, ours.wall / theirs.wall)

    def growth(self, target: Target) -> dict[str, list[tuple[int, Cost]]]:
        """Measure time and memory against the size of the image."""
        found: dict[str, list[tuple[int, Cost]]] = {"raw": [], "raw.gz": [], "c.qcow2": []}
        for size in (512, 1024, 2048, 4096):
            raw = inputs.disk(self.directory, size * MIB, size * MIB // 5)
            for name, costs in found.items():
                path = raw if name == "raw" else inputs.form(raw, name)
                costs.append((size * MIB, self._ours(self.web.url(path), target)()))
        return found

    def _row(
        self, name: str, target: Target, aim: float, rival: str, url: str, stages: dict[str, str]
    ) -> report.Row:
        ours, theirs = bench_measure.alternate(
            self.rounds, [self._ours(url, target), self._shell(rival, target)]
        )
        limits = {
            stage: bench_measure.alternate(1, [self._shell(command, target)])[0]
            for stage, command in stages.items()
        }
        self.temporary.unlink(missing_ok=True)
        kind = "block" if target.block else "file"
        return report.Row(name, kind, ours, theirs, aim, ours.wall / theirs.wall, limits)

    def _ours(self, url: str, target: Target, *options: str) -> Callable[[], Cost]:
        def run() -> Cost:
            target.fresh()
            return bench_measure.run(
                [*_worker(), "import", "--force", "--progress", "none", *options, url, target.path]
            )

        return run

    def _shell(self, command: str, target: Target) -> Callable[[], Cost]:
        def run() -> Cost:
            target.fresh()
            self.temporary.unlink(missing_ok=True)
            return bench_measure.run(["bash", "-o", "pipefail", "-c", command])

        return run


def main() -> None:
    """Measure the requested rows; write the report if all rows were measured."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", help="measure only rows whose name contains this; write no report")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--directory", type=Path, default=Path("build/bench"), help="for the disks (50 GiB)")
    parser.add_argument("--imports", type=int, default=IMPORTS, help="of the rows with many imports at once")
    parser.add_argument("--size", type=int, default=SIZE, help="MiB of each of these imports")
    parser.add_argument("--extents", type=int, default=EXTENTS, help="of the rows with many extents")
    parser.add_argument("--report", type=Path, default=Path("docs/about/benchmarks.md"))
    given = parser.parse_args()
    directory = given.directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    inputs.bytecode()
    with contextlib.ExitStack() as stack:
        web = stack.enter_context(_nginx(directory, "plain", servers.Settings()))
        bench = Bench(directory, web, given.rounds)
        file = Target(directory / "target", block=False)
        block = Target(stack.enter_context(devices.loop(directory, 2 * inputs.GIB)), block=True)
        crowd = scale.Crowd(directory, web, given.imports, given.size * MIB)
        extents = scale.Extents(directory, web, given.extents)
        rows = []
        measures = _rows(bench, file, block) | crowd.rows() | extents.rows()
        for name, measure in measures.items():
            if given.only is None or given.only in name:
                rows.append(measure())
                print(rows[-1].line(), flush=True)
        if given.only is None:
            report.write(given.report, rows, bench.growth(file), extents.growth, given.rounds)
        file.fresh()


def _rows(bench: Bench, file: Target, block: Target) -> dict[str, Callable[[], report.Row]]:
    rows: dict[str, Callable[[], report.Row]] = {}
    for target, kind in ((file, "file"), (block, "block")):
        for name in PIPES:
            rows[f"{name} {kind}"] = lambda name=name, target=target: bench.pipe(name, target)
        for name in CONVERTED:
            rows[f"{name} {kind}"] = lambda name=name, target=target: bench.converted(name, target)
    rows["isal"] = bench.isal
    for vddk in (vmware.delayed, vmware.undelayed):
        rows[f"vddk {vddk.__name__}"] = lambda vddk=vddk: vddk(bench.directory, file.path, bench.rounds)
    for ovirt in (bench_ovirt.plain, bench_ovirt.library):
        rows[f"ovirt {ovirt.__name__}"] = lambda ovirt=ovirt: ovirt(
            bench.directory, bench.raw, file.path, bench.rounds
        )
    for single in (
        bench.forward,
        bench.limited,
        bench.resumed,
        bench.registry,
        bench.s3,
        bench.resets,
        bench.huge,
        bench.blank,
    ):
        rows[single.__name__] = lambda single=single: single(file)
    return rows | upload.Uploads(bench.directory, bench.raw, bench.rounds).rows()


@contextlib.contextmanager
def _nginx(directory: Path, name: str, settings: servers.Settings) -> Iterator[servers.Web]:
    own = directory / f"nginx-{name}"
    own.mkdir(exist_ok=True)
    with servers.nginx(own, directory, settings) as web:
        yield web


def _worker() -> list[str]:
    return [sys.executable, "-m", "cdi_worker"]


if __name__ == "__main__":
    main()
