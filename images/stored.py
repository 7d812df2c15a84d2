"""Read a finished disk back from storage."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Final, TypeAlias

from cdi_worker import errors

_PIECE: Final = 4 << 20
#: Returns bytes from an offset, fewer at the end. Raises OSError.
Read: TypeAlias = Callable[[int, int], bytes]


@contextlib.contextmanager
def file(path: str) -> Iterator[Read]:
    """Yield what reads a finished disk; pages that were just written are dropped from the cache first."""
    with open(path, "rb", buffering=0) as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        yield lambda offset, length: os.pread(stream.fileno(), length, offset)


def sha256(
    path: str,
    size: int,
    seen: Callable[[int, bytes], object] = lambda _offset, _data: None,
    opened: Callable[[str], AbstractContextManager[Read]] = file,
) -> str:
    """Return the SHA-256 of the first ``size`` bytes of a disk, as storage returns them.

    ``seen`` gets the pieces, each 4 MiB but the last. ``opened`` opens the disk.
    Raises ``errors.TargetError``.
    """
    digest = hashlib.sha256()
    at = 0
    with errors.on_target(path, "read back"), opened(path) as read:
        while at < size and (data := read(at, min(size - at, _PIECE))):
            digest.update(data)
            seen(at, data)
            at += len(data)
    if at < size:
        raise errors.TargetError(path=path, reason=f"read back: {size - at} bytes are missing at its end")
    return digest.hexdigest()
