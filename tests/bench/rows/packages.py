"""Disks in packages, and archives of files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.bench import bench as benches
from tests.bench import inputs
from tests.bench.bench import Bench, Side, Sides
from tests.bench.measure import Cost
from tests.bench.rows import disks
from tests.support import devices, ovas, processes

#: Bytes of the files of /usr in an archive, and of the largest of them.
USR = 96 << 20
SMALL = 64 << 10
#: Bytes of the volume for these files.
VOLUME = 512 << 20


@benches.row("vmdk in an OVA", rival="curl | tar -x; qemu-img convert -m 16 -W")
def ova(bench: Bench) -> Iterator[Sides]:
    """Measure the disk in an OVA, verified by its manifest, against a download that is unpacked."""
    disk = bench.form("vmdk")
    path = _packed(disk)
    url = bench.web.url(path)
    convert = disks.CONVERT.format(flags="", form="vmdk", file=bench.temporary, target=bench.file)
    yield Sides(
        bench.imports(url, bench.file),
        bench.shell(f"curl -sf {url} | tar -xOf - {disk.name} > {bench.temporary} && {convert}", bench.file),
    )


@benches.row("archive of small files of /usr, 96 MiB", rival="curl | tar -x")
def usr(bench: Bench) -> Iterator[Sides]:
    """Measure an archive of files as an operating system has them, on a new file system for each run."""
    url = bench.web.url(_archive(bench.directory))

    def into_new(command: Callable[[Path], Sequence[str | Path]]) -> Side:
        # On a file system that has been used for long, Linux may take seconds to find free inodes.
        def run() -> Cost:
            with devices.filesystem("ext4", bench.directory, VOLUME) as volume:
                return bench.run(command(volume))

        return run

    pipe = f"curl -sf {url} | tar -xC {{0}} && sync -f {{0}}"
    yield Sides(
        into_new(lambda volume: benches.importing(url, volume, "--content-type=archive")),
        into_new(lambda volume: ["bash", "-o", "pipefail", "-c", pipe.format(volume)]),
    )


def _archive(directory: Path) -> Path:
    """Return a tar archive of small files of /usr."""
    path = directory / "usr.tar"
    if not path.exists():
        with inputs.folder(directory, "usr") as root:
            inputs.fill(root, USR, SMALL)
            processes.run("tar", "-C", root, "-cf", path.with_suffix(".part"), ".")
        path.with_suffix(".part").rename(path)
    return path


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
