"""Reading a qcow2 image from a stream keeps enough of it (``formats/test_random``: any image)."""

from __future__ import annotations

import random
import struct
import zlib

from tests.support import placing, qcow2_parts

BITS = 12
CLUSTER = 1 << BITS


def packed(at: int, noise: int) -> tuple[int, bytes]:
    """Return the entry of a compressed cluster with ``noise`` bytes at ``at``, and its data."""
    deflate = zlib.compressobj(9, zlib.DEFLATED, -12)
    data = deflate.compress(random.Random(at).randbytes(noise) + bytes(CLUSTER - noise)) + deflate.flush()
    sectors = (at + len(data) - 1) // 512 - at // 512
    return qcow2_parts.PACKED | sectors << 62 - (BITS - 8) | at, data


def test_compressed_data_that_ends_in_the_sector_of_the_next_is_kept() -> None:
    """Its table comes last. Of its length only the sectors are stated, the last of which the next shares."""
    first, second = 3 * CLUSTER, 64 * CLUSTER
    image = bytearray(second + CLUSTER)
    image[:CLUSTER] = qcow2_parts.header(
        bits=BITS, size=4 << 20, l1=(2, 2 * CLUSTER), refcounts=(CLUSTER, 1)
    )[:CLUSTER]
    struct.pack_into(">QQ", image, 2 * CLUSTER, first | qcow2_parts.COPIED, second | qcow2_parts.COPIED)
    at = 4 * CLUSTER
    for table, noise in ((first, 700), (second, 1500), (first + 8, 700)):
        entry, data = packed(at, noise)
        struct.pack_into(">Q", image, table, entry)
        image[at : at + len(data)] = data
        at += len(data)
    assert at % 512
    disk = placing.read_disk(bytes(image), "qcow2")
    assert any(disk[2 << 20 :])
    assert placing.passed(bytes(image), 8 * CLUSTER, recent=2) == disk
