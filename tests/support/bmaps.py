"""Block maps of disks, made in the simplest way."""

from __future__ import annotations

import hashlib

from cdi_worker.formats import bmap

BLOCK, MiB = 4096, 1 << 20


def expected(data: bytes) -> bmap.Map:
    """Return the map of a disk, made in the simplest way."""
    found = []
    for start in range(0, len(data), MiB):
        piece = data[start : start + MiB]
        full = [at for at in range(0, len(piece), BLOCK) if any(piece[at : at + BLOCK])]
        if full:
            low, high = start + full[0], min(len(data), start + full[-1] + BLOCK)
            found.append((low, high, hashlib.sha256(data[low:high]).digest()))
    return bmap.Map(len(data), BLOCK, tuple(found))
