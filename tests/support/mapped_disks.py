"""Sparse disks, their maps by bmaptool, and imports of them by their map."""

from __future__ import annotations

import bz2
import dataclasses
import functools
import gzip
import hashlib
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cdi_worker
from cdi_worker.formats import bmap
from cdi_worker.images.engine import fetch
from cdi_worker.sources import trust
from tests.support import bmaptool, devices, disks, members, misbehave, oracle
from tests.support.pages import Page

KIB, MIB = 1 << 10, 1 << 20
SIZE = 24 * MIB
#: Where the disk has data, with far holes between, and its length.
DATA = ((0, 300 * KIB), (2 * MIB, 5 * MIB), (12 * MIB + 4096, 8192), (20 * MIB, 3 * MIB + 100))
MAPPED = sum(-(-length // 4096) * 4096 for _, length in DATA)


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "plain": bytes,
    "gz": lambda data: gzip.compress(data, 1),
    "xz": members.xz,
    "bz2": lambda data: bz2.compress(data, 1),
    "zst": lambda data: (
        subprocess.run(["zstd", "-q", "-c"], input=data, capture_output=True, check=True).stdout
    ),
}


@dataclasses.dataclass(frozen=True)
class Made:
    """A sparse disk, and its map by bmaptool."""

    disk: Path
    map: bytes

    @property
    def data(self) -> bytes:
        return self.disk.read_bytes()

    @property
    def ranges(self) -> tuple[bmap.Range, ...]:
        return bmap.parse(self.map).ranges


@functools.cache
def packed(made: Made, form: str) -> bytes:
    """Return the disk in a form of ``PACKED``, made once in a process."""
    return PACKED[form](made.data)


def make(disk: Path, pieces: tuple[tuple[int, int], ...] = DATA, size: int = SIZE, seed: int = 1) -> Made:
    noise = random.Random(seed)
    with disk.open("wb") as stream:
        stream.truncate(size)
        for offset, length in pieces:
            stream.seek(offset)
            stream.write(noise.randbytes(length))
    return Made(disk, bmaptool.create(disk))


def asked(url: str, map_: str, target: Path, **more: Any) -> cdi_worker.Request:
    demand = trust.Demand(map=map_ or None, **more.pop("demand", {}))
    return cdi_worker.Request(
        source="http",
        location=cdi_worker.Location(url),
        target=str(target),
        existing=more.pop("existing", "replace"),
        demand=demand,
        journal_interval=0.05,
        fetch=fetch.Options(connections=2, chunk=MIB, no_progress=20),
        **more,
    )


def serve(server: misbehave.Server, made: Made, *turns: Any) -> tuple[str, str]:
    """Serve a disk and its map; return their URLs."""
    disk = server.serve("/disk", *(turns or (Page(made.data),)))
    return disk, server.serve("/disk.bmap", Page(made.map))


def same(target: Path, made: Made) -> None:
    oracle.same(target, made.disk, beyond=devices.beyond(target))
    if not target.is_block_device():
        assert target.stat().st_size == made.disk.stat().st_size
        assert [path.name for path in target.parent.glob("disk.img*")] == ["disk.img"]


def page(data: bytes, form: str, folder: Path) -> Page:
    """Return a page that serves a disk in a form: of FORMATS, ``raw.gz``, or raw as a ``stream``."""
    if form in {"raw", "stream"}:
        return Page(data, ranges=form == "raw")
    if form == "raw.gz":
        return Page(gzip.compress(data, 1))
    raw, image = folder / "raw", folder / f"image.{form}"
    raw.write_bytes(data)
    disks.convert(raw, image, disks.FORMATS[form])
    return Page(image.read_bytes())


def flipped(data: bytes, *places: int) -> bytes:
    wrong = bytearray(data)
    for place in places:
        wrong[place] ^= 1
    return bytes(wrong)


def split(made: Made) -> Made:
    """Return the disk with a map of ranges of at most 256 KiB."""
    data, ranges = made.data, []
    for start, end, _ in made.ranges:
        for at in range(start, end, 256 * KIB):
            part = data[at : min(end, at + 256 * KIB)]
            ranges.append((at, at + len(part), hashlib.sha256(part).digest()))
    return Made(made.disk, bmap.write(dataclasses.replace(bmap.parse(made.map), ranges=tuple(ranges))))
