"""Disks as test inputs: deterministic, a few MiB, built once in a test run by one of its processes.

``Disks`` is the cache; the fixture ``disks`` returns it, and tests request a disk by name:
``disks.image("qcow2-zstd")``, ``disks.wrapped("raw", "gz")``. Hostile images are in ``hostile``.
"""

from __future__ import annotations

import bz2
import dataclasses
import functools
import gzip
import hashlib
import lzma
import random
import shutil
import struct
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

from cdi_worker.formats.zstd import zstd
from tests.support import processes, shared, vhdx_images, vmdk_stream

MiB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Format:
    """How to make a variant by qemu-img. ``driver`` is qemu-img's name of the format."""

    driver: str
    options: str = ""
    flags: tuple[str, ...] = ()
    #: Makes the image from the bytes of the raw disk, instead of qemu-img.
    write: Callable[[bytes], bytes] | None = None


def _odd_vmdk(disk: bytes) -> bytes:
    """Return a VMDK with an unknown flag, which QEMU ignores: only qemu-img reads it."""
    with tempfile.TemporaryDirectory() as folder:
        raw, image = Path(folder, "raw"), Path(folder, "image")
        raw.write_bytes(disk)
        convert(raw, image, Format("vmdk", "subformat=monolithicSparse"))
        data = bytearray(image.read_bytes())
    data[8] |= 1 << 6
    return bytes(data)


#: Every variant of every disk format that is made from a raw disk.
FORMATS = {
    "raw": Format("raw"),
    "qcow2": Format("qcow2"),
    "qcow2-v2": Format("qcow2", "compat=0.10"),
    "qcow2-zlib": Format("qcow2", "", ("-c",)),
    "qcow2-v2-zlib": Format("qcow2", "compat=0.10", ("-c",)),
    "qcow2-zstd": Format("qcow2", "compression_type=zstd", ("-c",)),
    "qcow2-4k": Format("qcow2", "cluster_size=4k"),
    "qcow2-512": Format("qcow2", "cluster_size=512"),
    "qcow2-2m": Format("qcow2", "cluster_size=2M"),
    "qcow2-2m-zlib": Format("qcow2", "cluster_size=2M", ("-c",)),
    "qcow2-extended": Format("qcow2", "extended_l2=on,cluster_size=128k"),
    "qcow2-refcount1": Format("qcow2", "refcount_bits=1"),
    "qcow2-refcount64": Format("qcow2", "refcount_bits=64"),
    "qcow2-full": Format("qcow2", "preallocation=full"),
    "vmdk": Format("vmdk", "subformat=monolithicSparse"),
    "vmdk-stream": Format("vmdk", "subformat=streamOptimized"),
    "vmdk-zeros": Format("vmdk", "subformat=monolithicSparse,zeroed_grain=on"),
    "vmdk-compat6": Format("vmdk", "subformat=monolithicSparse,compat6=on"),
    "vmdk-odd": Format("vmdk", write=_odd_vmdk),
    "vmdk-tables-last": Format("vmdk", write=vmdk_stream.streamed),
    "vmdk-tables-last-zeros": Format("vmdk", write=functools.partial(vmdk_stream.streamed, zeros=True)),
    "vdi": Format("vdi"),
    "vdi-static": Format("vdi", "static=on"),
    "vhd": Format("vpc", "subformat=dynamic,force_size=on"),
    "vhd-fixed": Format("vpc", "subformat=fixed,force_size=on"),
    "vhdx": Format("vhdx"),
    "vhdx-fixed": Format("vhdx", "subformat=fixed"),
    "vhdx-log": Format("vhdx", write=vhdx_images.logged),
}

#: One variant of each format, for combinations with other things.
COMMON = (
    "raw",
    "qcow2",
    "qcow2-v2",
    "qcow2-zlib",
    "qcow2-zstd",
    "vmdk",
    "vmdk-stream",
    "vmdk-tables-last",
    "vdi",
    "vhd",
    "vhdx",
    "vhdx-log",
    "iso",
)

#: Compressions by the name of ``formats.detect``, as their tools compress by default.
COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "gz": lambda data: gzip.compress(data, 6, mtime=0),
    "xz": lambda data: lzma.compress(data, preset=1),
    "zst": lambda data: zstd.compress(data, options={zstd.CompressionParameter.checksum_flag: 1}),
    "bz2": lambda data: bz2.compress(data, 5),
}

#: An image and compression for each of the routes that read ranges.
BY_RANGES: list[tuple[str, str | None]] = [
    ("raw", None),
    ("qcow2", None),
    ("qcow2-zlib", None),
    ("vmdk", None),
    ("vmdk-odd", None),
    ("vhdx-log", None),
    ("raw", "gz"),
    ("qcow2", "zst"),
    ("vhdx-log", "xz"),
]


class Disks:
    """The disks of one test run, each made at first use."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def once(self, name: str, make: Callable[[Path], object]) -> Path:
        """Return a file of the cache; ``make`` writes it at the first use."""
        path = self.directory / name
        if not path.exists():
            with shared.locked(path.with_name(f"{name}.lock")):
                if not path.exists():
                    unfinished = path.with_name(f"{name}.unfinished")
                    make(unfinished)
                    unfinished.rename(path)
        return path

    def raw(self, content: str = "mixed") -> Path:
        """Return a raw disk; ``content`` is a key of CONTENTS."""
        return self.once(f"{content}.raw", CONTENTS[content])

    def image(self, variant: str, content: str = "mixed") -> Path:
        """Return a disk in a variant of FORMATS, or ``iso`` / ``iso-hybrid`` with content of their own."""
        if variant == "raw":
            return self.raw(content)
        if variant.startswith("iso"):
            return self.once(f"{variant}.iso", lambda path: _iso(path, hybrid=variant == "iso-hybrid"))
        return self.once(
            f"{content}.{variant}", lambda path: convert(self.raw(content), path, FORMATS[variant])
        )

    def driver(self, variant: str) -> str:
        """Return qemu-img's name of a variant's format."""
        return FORMATS[variant].driver if variant in FORMATS else "raw"

    def wrapped(self, variant: str, compression: str | None, content: str = "mixed") -> Path:
        """Return a disk compressed by one of COMPRESSIONS; None: the disk itself."""
        disk = self.image(variant, content)
        if compression is None:
            return disk
        compress = COMPRESSIONS[compression]
        return self.once(
            f"{disk.name}.{compression}", lambda path: path.write_bytes(compress(disk.read_bytes()))
        )

    def expected(self, variant: str, content: str = "mixed") -> Path:
        """Return the disk converted by ``qemu-img convert``: the bytes a target must hold."""
        disk = self.image(variant, content)
        return self.once(f"{disk.name}.expected", lambda path: to_raw(disk, self.driver(variant), path))

    def tar(self, compression: str | None = None) -> Path:
        """Return an archive of ``tree``, in GNU format with a sparse file."""
        plain = self.once("archive.tar", lambda path: _tar(self.tree(), path))
        if compression is None:
            return plain
        compress = COMPRESSIONS[compression]
        return self.once(
            f"archive.tar.{compression}", lambda path: path.write_bytes(compress(plain.read_bytes()))
        )

    def tree(self) -> Path:
        """Return a directory of plain files, a sparse file, a directory and links within it."""
        return self.once("tree", _tree)


def convert(source: Path, target: Path, to: Format) -> None:
    """Make an image in format ``to`` from a raw disk."""
    if to.write is not None:
        target.write_bytes(to.write(source.read_bytes()))
        return
    processes.need("qemu-img")
    options = ("-o", to.options) if to.options else ()
    processes.run("qemu-img", "convert", "-f", "raw", "-O", to.driver, *to.flags, *options, source, target)


def digest(path: Path, algorithm: str) -> str:
    """Return the digest of a file, in hexadecimal."""
    return hashlib.new(algorithm, path.read_bytes(), usedforsecurity=False).hexdigest()


def to_raw(source: Path, driver: str, target: Path) -> None:
    """Convert an image to a raw disk by qemu-img."""
    processes.need("qemu-img")
    processes.run("qemu-img", "convert", "-f", driver, "-O", "raw", source, target)


def _mixed(path: Path) -> None:
    """Write data, text and zeros in runs of all alignments, with an MBR as on a real disk."""
    _write(path, 8 * MiB, _runs(8 * MiB, seed=1), mbr=True)


def _ragged(path: Path) -> None:
    """Write a disk whose size is a multiple of 512 but of nothing larger, with data up to its end."""
    size = 5 * MiB + 3 * 512
    _write(path, size, [*_runs(5 * MiB, seed=2), (size - 700, random.Random(3).randbytes(700))], mbr=True)


def _bytewise(path: Path) -> None:
    """Write a disk whose size is not a multiple of a sector."""
    _write(path, 3 * MiB + 333, [(0, random.Random(4).randbytes(70_000)), (3 * MiB + 300, b"e" * 33)])


def _zero(path: Path) -> None:
    _write(path, 8 * MiB, [])


def _dense(path: Path) -> None:
    """Write a disk without runs of zeros that does not compress."""
    _write(path, 4 * MiB, [(0, random.Random(5).randbytes(4 * MiB))])


def _far(path: Path) -> None:
    """Write a large and nearly empty disk, with data in its first and last sector."""
    size = 24 * MiB
    _write(path, size, [(0, b"first" * 100), (size - 512, b"last!" * 100)], mbr=True)


CONTENTS: dict[str, Callable[[Path], None]] = {
    "mixed": _mixed,
    "ragged": _ragged,
    "bytewise": _bytewise,
    "zero": _zero,
    "dense": _dense,
    "far": _far,
}


def _runs(size: int, seed: int) -> list[tuple[int, bytes]]:
    """Return runs of noise and text, separated by zeros of many lengths."""
    dice = random.Random(seed)
    runs, at = [], 4096
    while at < size - MiB:
        length = dice.choice((1, 511, 512, 4096, 5000, 65536, 70_001, 300_000))
        text = b"the quick brown fox " * (length // 20 + 1)
        runs.append((at, dice.randbytes(length) if dice.random() < 0.5 else text[:length]))
        at += length + dice.choice((0, 1, 512, 4096, 65536, 131_072, 700_000))
    return runs


def _write(path: Path, size: int, runs: list[tuple[int, bytes]], *, mbr: bool = False) -> None:
    with path.open("wb") as file:
        file.truncate(size)
        for offset, data in runs:
            file.seek(offset)
            file.write(data)
        if mbr:
            file.seek(446)
            file.write(_partition_table(0x83, 2048, size // 512 - 2048))


def _partition_table(kind: int, first: int, sectors: int) -> bytes:
    """Return the last 66 bytes of a master boot record with one active partition."""
    return struct.pack("<B3xB3xII", 0x80, kind, first, sectors) + bytes(48) + b"\x55\xaa"


def _iso(path: Path, *, hybrid: bool) -> None:
    processes.need("xorriso")
    content = path.with_name(f"{path.name}.content")
    content.mkdir()
    (content / "README").write_bytes(b"boot me\n")
    (content / "noise").write_bytes(random.Random(6).randbytes(2 * MiB))
    argv: list[str | Path] = ["xorriso", "-as", "mkisofs", "-quiet", "-V", "CDI", "-o", path, content]
    processes.run(*argv, env={"SOURCE_DATE_EPOCH": "1700000000", "PATH": "/usr/bin:/bin"})
    shutil.rmtree(content)
    if hybrid:
        with path.open("r+b") as file:
            file.seek(446)
            file.write(_partition_table(0x17, 0, path.stat().st_size // 512))


def _tree(path: Path) -> None:
    (path / "deep" / "er").mkdir(parents=True)
    (path / "disk.img").write_bytes(random.Random(7).randbytes(MiB + 17))
    (path / "deep" / "er" / "empty").touch()
    (path / "deep" / "text").write_text("text\n" * 1000)
    (path / "deep" / "same").hardlink_to(path / "deep" / "text")
    (path / "link").symlink_to("deep/text")
    (path / "absolute").symlink_to("/etc/hostname")
    _write(path / "sparse", 2 * MiB, [(MiB, b"island")])


def _tar(tree: Path, path: Path) -> None:
    """Pack the tree by GNU tar, with sparse files as such."""
    processes.need("tar")
    processes.run("tar", "--create", "--sparse", "--format=gnu", f"--file={path}", f"--directory={tree}", ".")
    assert tarfile.is_tarfile(path)
