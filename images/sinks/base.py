"""What a disk is delivered to: a target, or a sink that passes it on to another one."""

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


class ForwardingSink:
    """Passes everything on: the base of sinks that change or watch what passes."""

    def __init__(self, to: Sink) -> None:
        self._to = to

    def write(self, offset: int, data: memoryview, /) -> None:
        self._to.write(offset, data)

    def zero(self, offset: int, length: int, /) -> None:
        self._to.zero(offset, length)
