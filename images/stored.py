"""Read a finished disk back from storage."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Final

from cdi_worker import errors

_PIECE: Final = 4 << 20


def sha256(path: str, size: int, advance: Callable[[int], object] = lambda _: None) -> str:
    """Return the SHA-256 of the first ``size`` bytes of a disk, as storage returns them.

    The pages that were just written are dropped from the cache first. ``advance`` gets the bytes read. Raises
    ``errors.TargetError``.
    """
    digest = hashlib.sha256()
    try:
        with open(path, "rb", buffering=0) as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while size and (data := stream.read(min(size, _PIECE))):
                digest.update(data)
                advance(len(data))
                size -= len(data)
    except OSError as err:
        raise errors.target_error(path, err, "read back") from err
    if size:
        raise errors.TargetError(path=path, reason=f"read back: {size} bytes are missing at its end")
    return digest.hexdigest()
