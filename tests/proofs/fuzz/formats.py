"""Parsers of disk images, archives and compressions: they may raise ``errors.Error`` and nothing else.

    make fuzz TARGET=formats SECONDS=600

The first byte of an input selects the parser.
"""

from __future__ import annotations

import bz2
import functools
import gzip
import lzma
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from cdi_worker.formats import readers, safety
from cdi_worker.formats.compressed import decompress, layers
from cdi_worker.formats.tar import archive
from cdi_worker.formats.zstd import zstd
from tests.proofs.fuzz import sums
from tests.support import disks, vhdx_images

_IMAGES = {"qcow2": "qcow2", "vmdk": "vmdk", "vdi": "vdi", "vhd": "vhd", "vhdx": "vhdx"}
_COMPRESSIONS = {
    "gz": gzip.compress,
    "xz": lzma.compress,
    "zst": zstd.compress,
    "bz2": bz2.compress,
}
_LIMIT = 1 << 24


def _image(name: str, data: bytes) -> None:
    if name == "vhdx":
        # The region table and the metadata, without the bytes between them.
        data = data[:64].ljust(192 << 10, b"\0") + data[64:].ljust(64 << 10, b"\0")
        data = vhdx_images.with_headers(data)
    if name == "vhd":
        data = sums.vhd(data)
    reader = {"read": lambda offset, length: data[offset : offset + length], "size": len(data)}
    safety.check(name, data[:262144], allow_backing="base")
    safety.check(name, data[:262144], **reader)
    safety.check_length(name, **reader)


def _archive(data: bytes) -> None:
    opened = archive.Archive(readers.BytesReader(sums.tar(data)), limit_bytes=_LIMIT)
    scrap = memoryview(bytearray(4096))
    for entry in opened:
        assert ".." not in entry.path
        assert not any("/" in part for part in entry.path)
        assert sum(length for _, length in entry.extents()) <= _LIMIT
        opened.readinto(scrap)


def _decompress(kind: str, data: bytes) -> None:
    reader = decompress.open(kind, readers.BytesReader(data), limit=_LIMIT)
    scrap = memoryview(bytearray(65536))
    while reader.readinto(scrap):
        pass


def _look(data: bytes) -> None:
    layers.look(data)


#: By the name of its files in tests/proofs/fuzz/corpus.
PARSERS: Mapping[str, Callable[[bytes], None]] = {
    "look": _look,
    "archive": _archive,
    **{kind: functools.partial(_decompress, kind) for kind in _COMPRESSIONS},
    **{name: functools.partial(_image, name) for name in _IMAGES},
}


def seeds() -> Iterator[tuple[str, bytes]]:
    """Yield a valid input for each parser, with its name."""
    yield "look", b"<html>"
    for kind, compress in _COMPRESSIONS.items():
        yield kind, compress(b"disk" * 500) * 2
    with tempfile.TemporaryDirectory() as directory:
        made = disks.Disks(Path(directory))
        yield "archive", made.tar().read_bytes()[:12_000]
        for name, variant in _IMAGES.items():
            data = made.image(variant, "zero").read_bytes()
            if name == "vhdx":
                data = data[:64] + data[192 << 10 :][:4096]
            yield name, data[: 8 << 10]
