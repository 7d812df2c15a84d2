"""Small files that a user names: keys, certificates, passwords, settings. They may be pipes."""

from __future__ import annotations

import io
import os
import select
import time
from pathlib import Path
from typing import Final

from cdi_worker import errors

#: In bytes. The largest keyrings of distributions have some 100 KiB.
LARGEST: Final = 1 << 20
#: Seconds in which a pipe must end. A program that writes it may ask for a password first.
PATIENCE: Final = 60.0


def read(path: str | Path, largest: int = LARGEST, patience: float = PATIENCE) -> bytes:
    """Return a file, or what a pipe brings, of at most ``largest`` bytes, which are MiB.

    The writer of a pipe must come and end within ``patience`` seconds. Raises ``RequestError``.
    """
    try:
        with open(path, "rb", buffering=0, opener=open_without_wait) as stream:
            data = _all(stream, largest + 1, time.monotonic() + patience)
    except OSError as err:
        raise errors.RequestError(f"{path}: {errors.words(err)}") from err
    if data is None:
        raise errors.RequestError(f"{path}: is a pipe that has not ended in {patience:g} s")
    if len(data) > largest:
        raise errors.RequestError(f"{path}: is larger than {largest >> 20} MiB; is this the right file?")
    return data


def open_without_wait(path: str, flags: int) -> int:
    """Open a file, as an ``opener``; do not wait for the writer of a pipe, which could not be cancelled."""
    return os.open(path, flags | os.O_NONBLOCK)


def _all(stream: io.RawIOBase, most: int, latest: float) -> bytes | None:
    """Read to the end, or ``most`` bytes; None if a pipe has not ended by then.

    One that has had no writer yet is not at its end, and not ready (pipe(7)). A file is always ready.
    """
    data, waiting = bytearray(), select.poll()
    waiting.register(stream, select.POLLIN)
    while len(data) < most:
        if not waiting.poll(max(0.0, latest - time.monotonic()) * 1000):
            return None
        part = stream.read(most - len(data))
        if part == b"":
            break
        data += part or b""
    return bytes(data)
