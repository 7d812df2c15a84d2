"""Small files that a user names: keys, certificates, passwords, settings. They may be pipes."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterator
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
    data, waiting, latest = bytearray(), select.poll(), time.monotonic() + patience
    try:
        with open(path, "rb", buffering=0, opener=open_without_wait) as stream:
            waiting.register(stream, select.POLLIN)
            while len(data) <= largest:
                # A pipe without a writer is not at its end, and not ready (pipe(7)). A file always is.
                if not waiting.poll(max(0.0, latest - time.monotonic()) * 1000):
                    raise errors.RequestError(f"{path}: is a pipe that has not ended in {patience:g} s")
                part = stream.read(largest + 1 - len(data))
                if part == b"":
                    return bytes(data)
                data += part or b""
    except OSError as err:
        raise errors.RequestError(f"{path}: {errors.words(err)}") from err
    raise errors.RequestError(f"{path}: is larger than {largest >> 20} MiB; is this the right file?")


def read_each(path: str) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of the file at ``path``, or of each in the folder. Raises ``RequestError``."""
    place = Path(path)
    try:
        # Kubernetes mounts a ConfigMap as links into ..data.
        inside = [each for each in sorted(place.iterdir()) if not each.name.startswith(".")]
    except NotADirectoryError:
        inside = [place]
    except OSError as err:
        raise errors.RequestError(f"{path}: {errors.words(err)}") from err
    for each in inside:
        yield str(each), read(each)


def open_without_wait(path: str, flags: int) -> int:
    """Open a file for ``open``. Opening a pipe would wait for its writer, and could not be cancelled."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
