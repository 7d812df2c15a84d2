"""Coverage-guided fuzzing of the parsers: they may raise ``errors.Error`` and nothing else.

    make fuzz TARGET=formats SECONDS=600

The corpus is kept in build/fuzz; an empty one is first filled with small valid files. The first byte of an
input selects the parser.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import lzma
import pathlib
import struct
import sys
import tempfile

import atheris

with atheris.instrument_imports(include=["cdi_worker.formats"]):
    from cdi_worker.formats import readers, safety
    from cdi_worker.formats.compressed import decompress, layers
    from cdi_worker.formats.tar import archive

import zstandard

from cdi_worker import errors
from tests.support import disks

_IMAGES = {"qcow2": "qcow2", "vmdk": "vmdk", "vdi": "vdi", "vhd": "vhd", "vhdx": "vhdx"}
_COMPRESSIONS = {
    "gz": gzip.compress,
    "xz": lzma.compress,
    "zst": zstandard.compress,
    "bz2": bz2.compress,
}
_LIMIT = 1 << 24


def _image(name: str, data: bytes) -> None:
    if name == "vhdx":
        # The region table and the metadata, without the bytes between them.
        data = data[:64].ljust(192 << 10, b"\0") + data[64:]
    if name == "vhd":
        data = _with_vhd_sums(data)
    reader = {"read": lambda offset, length: data[offset : offset + length], "size": len(data)}
    safety.check(name, data[:262144], allow_backing="base")
    safety.check(name, data[:262144], **reader)
    safety.check_length(name, **reader)


def _with_vhd_sums(data: bytes) -> bytes:
    changed = bytearray(data.ljust(2048, b"\0"))
    for start, end, at in ((0, 512, 64), (512, 1536, 548)):
        changed[at : at + 4] = bytes(4)
        struct.pack_into(">I", changed, at, ~sum(changed[start:end]) & 0xFFFFFFFF)
    return bytes(changed)


def _archive(data: bytes) -> None:
    fixed = bytearray(data)
    for start in range(0, len(data) - 511, 512):
        block = fixed[start : start + 512]
        if b"ustar" in block:
            block[148:156] = b" " * 8
            fixed[start + 148 : start + 156] = b"%06o\0 " % (sum(block) & 0o777777)
    opened = archive.Archive(readers.Bytes(bytes(fixed)), limit_bytes=_LIMIT)
    scrap = memoryview(bytearray(4096))
    for entry in opened:
        assert ".." not in entry.path
        assert not any("/" in part for part in entry.path)
        assert sum(length for _, length in entry.extents()) <= _LIMIT
        opened.readinto(scrap)


def _decompress(kind: str, data: bytes) -> None:
    reader = decompress.open(kind, readers.Bytes(data), limit=_LIMIT)
    scrap = memoryview(bytearray(65536))
    while reader.readinto(scrap):
        pass


def _look(data: bytes) -> None:
    layers.look(data)


_PARSERS = [
    _look,
    _archive,
    *(lambda data, kind=kind: _decompress(kind, data) for kind in _COMPRESSIONS),
    *(lambda data, name=name: _image(name, data) for name in _IMAGES),
]


def _one(data: bytes) -> None:
    if data:
        with contextlib.suppress(errors.Error):
            _PARSERS[data[0] % len(_PARSERS)](data[1:])


def _seed(corpus: pathlib.Path) -> None:
    """Write one valid input for each parser."""
    with tempfile.TemporaryDirectory() as directory:
        made = disks.Disks(pathlib.Path(directory))
        seeds = [b"<html>", made.tar().read_bytes()[:60_000]]
        seeds += [compress(b"disk" * 500) * 2 for compress in _COMPRESSIONS.values()]
        for name, variant in _IMAGES.items():
            data = made.image(variant, "zero").read_bytes()
            if name == "vhdx":
                data = data[:64] + data[192 << 10 :][:4096]
            seeds.append(data[: 16 << 10])
    for index, seed in enumerate(seeds):
        (corpus / f"seed{index}").write_bytes(bytes([index]) + seed)


if __name__ == "__main__":
    corpus_directory = pathlib.Path(sys.argv[1])
    corpus_directory.mkdir(exist_ok=True)
    if not any(corpus_directory.iterdir()):
        _seed(corpus_directory)
    atheris.Setup(sys.argv, _one)
    atheris.Fuzz()
