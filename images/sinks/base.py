"""What a disk is delivered to: a target, or a sink that passes it on."""

from __future__ import annotations

from typing import Protocol


class Sink(Protocol):
    """Receives a disk: each range once, in any order, from any thread. A call may block.

    Raises ``errors.Error``, which ends the delivery.
    """

    def write(self, offset: int, data: memoryview, /) -> None:
        """Take ``data``, which may be reused on return."""

    def zero(self, offset: int, length: int, /) -> None:
        """Take a range that reads as zeros."""
