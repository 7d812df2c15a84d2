"""What a passing qcow2 image asks to be kept is enough, wherever the pieces of the file are cut."""

from __future__ import annotations

import tempfile
from pathlib import Path

import hypothesis
from hypothesis import strategies

from formats import placeable, qcow2_header
from tests import disks, processes, qcow2_images


def passed(data: bytes, chunk: int, recent: int, form: str = "qcow2") -> bytes:
    """Return the disk; only what was kept and the ``recent`` last chunks can be read again."""
    follower = placeable.FORMATS[form].follow(data[: placeable.HEAD_SIZE])
    disk = bytearray(b"\xff") * follower.virtual_size
    kept = bytearray(len(data))
    start = -chunk

    def read(offset: int, length: int) -> bytes:
        old = max(0, start - recent * chunk - offset)
        assert all(kept[offset : offset + min(old, length)]), "neither recent nor kept"
        return data[offset : offset + length]

    while start + chunk <= len(data):
        start += chunk
        end = min(start + chunk, len(data))
        arrival = follower.arrive(start, end, read, last=start + chunk > len(data))
        for offset, length in arrival.holes:
            disk[offset : offset + length] = bytes(length)
        for piece in (piece for batch in arrival.ready for piece in batch.pieces):
            body = read(piece.host, min(piece.length, len(data) - piece.host))
            disk[piece.guest : piece.guest + piece.size] = (
                follower.inflate(body, piece.guest)[: piece.size] if piece.packed else body
            )
            if piece.packed:
                # What fits behind it without a sector of its own is taken for its end. Where it is another
                # cluster, whose table comes much later, an import has to ask for scratch.
                after = piece.host + piece.length
                kept[after - 512 : after + 511] = b"\1" * 1023
        for first, after in arrival.keep:
            assert start <= first < after <= end
            kept[first:after] = b"\1" * (after - first)
    return bytes(disk)


@hypothesis.settings(max_examples=20, deadline=None, print_blob=True)
@hypothesis.given(qcow2_images.recipes(), strategies.integers(1, 40), strategies.booleans())
def test_keeps_enough(recipe: qcow2_images.Recipe, clusters: int, last: bool) -> None:
    processes.need("qemu-img", "qemu-io")
    with tempfile.TemporaryDirectory() as folder:
        path, expected = Path(folder, "image"), Path(folder, "expected")
        qcow2_images.make(recipe, path)
        hypothesis.assume(qcow2_images.sound(path))
        disks.to_raw(path, "qcow2", expected)
        data, disk = path.read_bytes(), expected.read_bytes()
    cluster = qcow2_header.parse(data).cluster_size
    if last:
        data = qcow2_images.tables_last(data)
    assert passed(data, clusters * cluster, recent=2) == disk
