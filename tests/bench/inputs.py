"""The disks to measure with, made once and kept between runs."""

from __future__ import annotations

import compileall
import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support import devices, processes, repository

#: How each form is made from ``{raw}``, into ``{out}``.
FORMS = {
    "raw.gz": "pigz -c {raw} > {out}",
    "raw.xz": "xz -1 -T2 --block-size=16MiB -c {raw} > {out}",
    "raw.zst": "zstd -q -T2 -c {raw} > {out}",
    "qcow2": "qemu-img convert -O qcow2 {raw} {out}",
    "c.qcow2": "qemu-img convert -c -O qcow2 {raw} {out}",
    "c.qcow2.layer": "qemu-img convert -c -O qcow2 {raw} {out}.tmp &&"
    " tar -P --transform 's,.*,disk/disk.img,' -c {out}.tmp | pigz -c > {out} && rm {out}.tmp",
    "vmdk": "qemu-img convert -O vmdk {raw} {out}",
    "vhdx": "qemu-img convert -O vhdx {raw} {out}",
}


def bytecode(before: Path | None = None) -> None:
    """Compile our modules as pip does; otherwise Python's compiler would be measured, too."""
    for root in filter(None, (repository.ROOT, before)):
        for package in ("cdi_worker", "importer", "sources", "formats", "images", "scratch"):
            # Where pip has installed it, only the first one exists.
            if (root / package).is_dir():
                compileall.compile_dir(root / package, quiet=1)


def disk(directory: Path, size: int, data: int) -> Path:
    """Return a disk of ``size`` bytes whose ext4 file system holds about ``data`` bytes of /usr."""
    path = directory / f"disk-{size >> 20}.raw"
    if path.exists():
        return path
    growing = path.with_suffix(".part")
    with growing.open("wb") as stream:
        stream.truncate(size)
    processes.run("mkfs.ext4", "-q", "-F", growing)
    mount = directory / "mount"
    mount.mkdir(exist_ok=True)
    with devices.attached(growing) as device:
        processes.run("mount", device, mount)
        try:
            fill(mount, data)
        finally:
            processes.run("umount", mount)
    return growing.rename(path)


def form(raw: Path, name: str) -> Path:
    """Return the disk ``raw`` in another form of ``FORMS``."""
    path = raw.with_suffix(f".{name}")
    if not path.exists():
        command = FORMS[name].format(raw=raw, out=path.with_suffix(".part"))
        subprocess.run(["bash", "-o", "pipefail", "-c", command], check=True)
        path.with_suffix(".part").rename(path)
    return path


def noise(directory: Path, size: int) -> Path:
    """Return a file of ``size`` bytes without zeros that does not compress."""
    path = directory / f"noise-{size >> 20}.raw"
    if not path.exists():
        growing = path.with_suffix(".part")
        with growing.open("wb") as stream:
            for _ in range(size >> 20):
                stream.write(os.urandom(1 << 20))
        growing.rename(path)
    return path


@contextlib.contextmanager
def folder(directory: Path, name: str) -> Iterator[Path]:
    """Make a directory for the files of a server, and remove it."""
    own = directory / f"{name}-{os.urandom(4).hex()}"
    own.mkdir()
    try:
        yield own
    finally:
        shutil.rmtree(own)


def fill(mount: Path, data: int, largest: int = 1 << 30) -> None:
    """Copy files of /usr, of up to ``largest`` bytes, in alphabetical order: ``data`` bytes of them."""
    left = data
    for root, folders, files in os.walk("/usr"):
        folders.sort()
        for name in sorted(files):
            source = Path(root, name)
            if source.is_symlink() or not source.is_file():
                continue
            size = source.stat().st_size
            if size > largest:
                continue
            if size > left:
                return
            target = mount / source.relative_to("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
            left -= size
