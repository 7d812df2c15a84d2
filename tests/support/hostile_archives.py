"""Archives that try to write outside the volume or to fill it, and truncated ones."""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.support import disks as disks_module
from tests.support import processes

GiB = 1 << 30
TiB = 1 << 40


def archive(disks: disks_module.Disks, name: str) -> Path:
    """Return an archive of ARCHIVES."""
    return disks.once(f"hostile.{name}.tar", lambda path: path.write_bytes(ARCHIVES[name]()))


def _pack(*members: tarfile.TarInfo) -> bytes:
    """Return an archive of a harmless file followed by the members."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for member in (_file("innocent"), *members):
            tar.addfile(member, io.BytesIO(b"x" * member.size))
    return packed.getvalue()


def _file(name: str, size: int = 7) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size = size
    return member


def _special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    member.devmajor, member.devminor = 1, 3
    return member


def _huge_sparse() -> bytes:
    """Return a GNU tar archive of a few KiB with an entry of 1 TiB that is nearly all hole."""
    processes.need("tar")
    with tempfile.TemporaryDirectory() as folder:
        with Path(folder, "sparse").open("wb") as file:
            file.truncate(TiB)
            file.seek(-512, os.SEEK_END)
            file.write(b"x" * 512)
        packed = Path(folder, "sparse.tar")
        processes.run("tar", "--create", "--sparse", f"--directory={folder}", f"--file={packed}", "sparse")
        return packed.read_bytes()


def _promised() -> bytes:
    """Return an entry whose header promises a GiB that does not follow."""
    return _file("promised", GiB).tobuf(tarfile.GNU_FORMAT) + b"x" * 10_000


ARCHIVES: dict[str, Callable[[], bytes]] = {
    "innocent": _pack,
    "absolute": lambda: _pack(_file("/tmp/cdi-test-absolute")),
    "dotdot": lambda: _pack(_file("../outside")),
    "dotdot-deep": lambda: _pack(_file("a/b/../../../outside")),
    "symlink-out": lambda: _pack(_special("way", tarfile.SYMTYPE, "../.."), _file("way/outside")),
    "symlink-absolute": lambda: _pack(_special("way", tarfile.SYMTYPE, "/etc"), _file("way/outside")),
    "symlink-chain": lambda: _pack(
        _special("a", tarfile.SYMTYPE, "."),
        _special("a/b", tarfile.SYMTYPE, ".."),
        _file("b/outside"),
    ),
    "hardlink-out": lambda: _pack(_special("hard", tarfile.LNKTYPE, "../../etc/hostname")),
    "hardlink-absolute": lambda: _pack(_special("hard", tarfile.LNKTYPE, "/etc/hostname")),
    "hardlink-through": lambda: _pack(
        _special("way", tarfile.SYMTYPE, "/etc"), _special("hard", tarfile.LNKTYPE, "way/hostname")
    ),
    "directory-through": lambda: _pack(
        _special("way", tarfile.SYMTYPE, "/tmp"), _special("way/cdi-test-absolute", tarfile.DIRTYPE)
    ),
    "mode-through": lambda: _pack(_special("way", tarfile.SYMTYPE, "/tmp"), _special("way", tarfile.DIRTYPE)),
    "character-device": lambda: _pack(_special("null", tarfile.CHRTYPE)),
    "block-device": lambda: _pack(_special("disk", tarfile.BLKTYPE)),
    "fifo": lambda: _pack(_special("fifo", tarfile.FIFOTYPE)),
    "huge-sparse": _huge_sparse,
    "promised": _promised,
    "truncated": lambda: _pack(_file("cut", 100_000))[:50_000],
    "garbage": lambda: _pack()[:1024] + b"garbage" * 1000,
}
