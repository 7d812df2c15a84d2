"""The interface of an open NBD export. Targets use no network: the caller provides the connection."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Protocol


def is_export(path: str | os.PathLike[str]) -> bool:
    """Return whether a target is the address of an NBD export."""
    return os.fspath(path).startswith(("nbd://", "nbds://", "nbd+unix://"))


class Device(Protocol):
    """An open NBD export. Thread-safe. Any range may be used, whatever the server's block sizes are.

    Raises OSError with the server's errno, and ``errors.TargetError`` when a connection is lost: then every
    later call does, too, because what was not flushed may be lost.
    """

    @property
    def size(self) -> int:
        """Bytes of the export."""

    @property
    def unit(self) -> int:
        """Bytes of the smallest block of the server."""

    def read(self, offset: int, length: int, /) -> bytes:
        """Return the bytes from ``offset``, fewer at the end."""

    def write(self, offset: int, data: memoryview, /) -> None:
        """Write ``data``."""

    def zero(self, offset: int, length: int, /, *, allocate: bool) -> None:
        """Zero a range on the server; ``allocate``: keep its storage. Raises OSError if that is refused."""

    def flush(self) -> None:
        """Write everything written so far to stable storage."""

    def allocated(self, start: int, end: int, /) -> Iterator[tuple[int, int]]:
        """Yield the parts of a range that the server does not know to be zeros."""

    def close(self) -> None:
        """Disconnect. Idempotent."""


class Connect(Protocol):
    """Connects to the NBD export at a URL. Raises ``errors.TargetError``, and if it must not be written."""

    def __call__(self, url: str, *, writable: bool = True, name: str = "") -> Device:
        """Return the open export. ``name``: for messages; empty: its address."""
