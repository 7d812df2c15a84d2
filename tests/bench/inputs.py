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

GIB = 1 << 30
#: Bytes of real files on the disk.
DATA = 400 << 20

#: How each form is made from ``{raw}``, into ``{out}``.
FORMS = {
    "raw.gz": "pigz -c {raw} > {out}",
    "raw.xz": "xz -1 -T2 --block-size=16MiB -c {raw} > {out}",
    "raw.zst": "zstd -q -T2 -c {raw} > {out}",
    "qcow2": "qemu-img convert -O qcow2 {raw} {out}",
    "c.qcow2": "qemu-img convert -c -O qcow2 {raw} {out}",
    "qcow2.gz": "qemu-img convert -O qcow2 {raw} {out}.tmp && pigz -c {out}.tmp > {out} && rm {out}.tmp",
    "c.qcow2.layer": "qemu-img convert -c -O qcow2 {raw} {out}.tmp &&"
    " tar -P --transform 's,.*,disk/disk.img,' -c {out}.tmp | pigz -c > {out} && rm {out}.tmp",
    "vmdk": "qemu-img convert -O vmdk {raw} {out}",
    "vhdx": "qemu-img convert -O vhdx {raw} {out}",
}


def bytecode() -> None:
    """Compile our modules as pip does; otherwise Python's compiler would be measured, too."""
    for package in ("importer", "sources", "formats", "images", "scratch"):
        compileall.compile_dir(repository.ROOT / package, quiet=1)


def disk(directory: Path, size: int = 2 * GIB, data: int = DATA) -> Path:
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


def huge(directory: Path, form: str = "qcow2") -> Path:
    """Return an image of 1 TiB with 100 MiB of data spread over it."""
    path = directory / f"huge.{form}"
    if not path.exists():
        growing = path.with_suffix(".part")
        processes.run("qemu-img", "create", "-q", "-f", form, growing, "1T")
        writes = [f"write -q -P {1 + part} {part * 10}G 1M" for part in range(100)]
        arguments = [item for command in writes for item in ("-c", command)]
        processes.run("qemu-io", "-f", form, *arguments, growing)
        growing.rename(path)
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


def fill(mount: Path, data: int, largest: int = GIB) -> None:
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
