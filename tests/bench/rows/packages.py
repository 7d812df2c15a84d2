"""Disks in packages, and archives of files."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.bench import bench as benches
from tests.bench import inputs
from tests.bench.bench import Bench, Side, Sides, Work
from tests.bench.measure import Cost
from tests.bench.rows import disks
from tests.support import ovas, processes

#: Bytes of the files of /usr in an archive, and of the largest of them.
USR = 96 << 20
SMALL = 64 << 10


@benches.row("vmdk in an OVA", rival="`curl`, `tar -x`, then `qemu-img convert -m 16 -W`", aim=1.1)
def ova(bench: Bench) -> Iterator[Sides]:
    """Measure the disk in an OVA, verified by its manifest, against a download that is unpacked."""
    disk = bench.form("vmdk")
    path = _packed(disk)
    url = bench.web.url(path)
    convert = disks.CONVERT.format(flags="", form="vmdk", file=bench.temporary, target=bench.file)
    yield Sides(
        bench.imports(url, bench.file),
        bench.shell(f"curl -sf {url} | tar -xOf - {disk.name} > {bench.temporary} && {convert}", bench.file),
        work=Work(path.stat().st_size, bench.setting.data),
    )


@benches.row("archive of 100,000 files of 1 KiB", rival="`curl` and `tar -x`", aim=0.7)
def small_files(bench: Bench) -> Iterator[Sides]:
    """Measure an archive whose files are much work and few bytes."""
    yield _unpacked(bench, _archive(bench.directory, "small", _small_files))


@benches.row("archive of small files of /usr, 96 MiB", rival="`curl` and `tar -x`", aim=0.7)
def usr(bench: Bench) -> Iterator[Sides]:
    """Measure an archive of files as an operating system has them."""
    yield _unpacked(bench, _archive(bench.directory, "usr", lambda root: inputs.fill(root, USR, SMALL)))


def _unpacked(bench: Bench, archive: Path) -> Sides:
    """Return the sides that unpack an archive into a folder that is removed before."""
    url, folder = bench.web.url(archive), bench.file.with_name("folder")

    def into_empty(argv: Sequence[str | Path]) -> Side:
        def run() -> Cost:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            return bench.run(argv)

        return run

    pipe = f"curl -sf {url} | tar -xC {folder} && sync -f {folder}"
    size = archive.stat().st_size
    return Sides(
        into_empty(benches.importing(url, folder, "--content-type=archive")),
        into_empty(["bash", "-o", "pipefail", "-c", pipe]),
        work=Work(size, size),
    )


def _archive(directory: Path, name: str, fill: Callable[[Path], object]) -> Path:
    """Return a tar archive of the files that ``fill`` writes."""
    path = directory / f"{name}.tar"
    if not path.exists():
        with inputs.folder(directory, name) as root:
            fill(root)
            processes.run("tar", "-C", root, "-cf", path.with_suffix(".part"), ".")
        path.with_suffix(".part").rename(path)
    return path


def _small_files(root: Path) -> None:
    for number in range(100):
        (root / f"{number}").mkdir()
        for each in range(1000):
            (root / f"{number}" / f"file-{each}").write_bytes(os.urandom(1024))


def _packed(disk: Path) -> Path:
    """Return an OVA of a disk, with a manifest."""
    path = disk.with_suffix(".ova")
    if not path.exists():
        size = {"size": str(disk.stat().st_size)}
        ovf = disk.with_name("vm.ovf")
        ovf.write_bytes(ovas.descriptor([ovas.Disk(b"", disk.name, file=size)]))
        disk.with_name("vm.mf").write_text("".join(map(_line, (ovf, disk))))
        part = path.with_suffix(".part")
        processes.run("tar", "-C", disk.parent, "-cf", part, "vm.ovf", "vm.mf", disk.name)
        part.rename(path)
    return path


def _line(path: Path) -> str:
    """Return the line of a file in a manifest."""
    with path.open("rb") as file:
        return f"SHA256({path.name})= {hashlib.file_digest(file, 'sha256').hexdigest()}\n"
