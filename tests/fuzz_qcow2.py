"""Fuzz the qcow2 reader: qemu-img's bytes or a clean error, whatever the file holds.

    pip install --group fuzz
    python -m tests.fuzz_qcow2 FOLDER -max_total_time=600

The folder takes the inputs worth keeping; an empty one is first filled with small images of many
kinds. A disk that both ways of reading accept has to be the same, and the same as QEMU's.
"""

from __future__ import annotations

import contextlib
import random
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["formats"]):
    from formats import mapped, pieces, qcow2, qcow2_header

from importer import errors
from tests import qcow2_images, test_formats_qcow2_stream

LARGEST = 4 << 20
KINDS = [
    "cluster_size=512,compat=0.10",
    "cluster_size=512,compression_type=zlib,refcount_bits=1",
    "cluster_size=512,compression_type=zstd,lazy_refcounts=on",
    "cluster_size=512,preallocation=metadata",
    "cluster_size=16k,extended_l2=on",
]
STEPS = [
    "qemu-io write -q -s {folder}/noise 0 3k",
    "qemu-io write -q -c -s {folder}/noise 8k 2k",
    "qemu-io write -q -z 1k 1k",
    "qemu-io write -q -z -u 8k 512",
    "qemu-img snapshot -q -c s {path}",
    "qemu-io write -q -P 3 2k 9k",
]


def ranged(data: bytes) -> bytes:
    """Return the disk, read as from random ranges."""

    def read(offset: int, length: int) -> bytes:
        assert 0 <= offset <= offset + length <= len(data)
        return data[offset : offset + length]

    image = qcow2.read_image(read, len(data))
    disk = bytearray(b"\xff") * image.layout.virtual_size
    covered = 0
    for window in image.windows():
        for batch in window.tables():
            for table in batch.pieces:
                window.load(table, read(table.host, table.length))
        window.check()
        for offset, length in window.holes():
            disk[offset : offset + length] = bytes(length)
            covered += length
        for batch in window.data():
            body = read(batch.offset, batch.length)
            for piece in batch.pieces:
                disk[piece.guest : piece.guest + piece.size] = _content(image, piece, body, batch.offset)
                covered += piece.size
    assert covered == len(disk) == image.layout.virtual_size
    return bytes(disk)


def _content(image: mapped.Image, piece: pieces.Piece, body: bytes, offset: int) -> bytes:
    part = body[piece.host - offset :][: piece.length]
    return image.inflate(part, piece.guest)[: piece.size] if piece.packed else part


def one_input(data: bytes) -> None:
    """Read one file both ways and by QEMU."""
    found = set()
    with contextlib.suppress(errors.ImageError):
        header = qcow2_header.parse(data)
        if header.virtual_size > LARGEST:
            return
        found.add(ranged(data))
    with contextlib.suppress(errors.ImageError, errors.ScratchRequired):
        found.add(test_formats_qcow2_stream.passed(data, 2 << 20, recent=2))
    if not found:
        return
    with tempfile.TemporaryDirectory() as folder:
        path, expected = Path(folder, "image"), Path(folder, "expected")
        path.write_bytes(data)
        complaint = qcow2_images.read(path, expected)
        if not qcow2_images.elsewhere(complaint):
            assert not complaint
            assert found == {expected.read_bytes()}


def mutated(data: bytes, size: int, seed: int) -> bytes:
    """Change words of header and tables, now and then anything."""
    dice = random.Random(seed)
    if len(data) < 1024 or dice.random() < 0.2:
        return atheris.Mutate(data, size)
    changed = bytearray(data)
    for _ in range(dice.randint(1, 3)):
        qcow2_images.damage(changed, qcow2_images.words(bytes(data)), dice)
    return bytes(changed)


def seed_corpus(folder: Path) -> None:
    """Make a small image of each kind and of each beginning of the steps."""
    for number, options in enumerate(KINDS):
        for length in range(len(STEPS) + 1):
            recipe = qcow2_images.Recipe(20_480, options, tuple(STEPS[:length]))
            with tempfile.TemporaryDirectory() as made:
                qcow2_images.make(recipe, Path(made, "image"))
                (folder / f"seed-{number}-{length}").write_bytes(Path(made, "image").read_bytes())


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    if not any(folder.iterdir()):
        seed_corpus(folder)
    options = [*sys.argv, "-max_len=200000", "-timeout=60"]
    atheris.Setup(options, one_input, custom_mutator=mutated)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
