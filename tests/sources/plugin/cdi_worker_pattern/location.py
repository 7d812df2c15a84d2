"""The location of a pattern disk; its size is its address."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import cdi_worker


def _byte(text: str) -> int:
    value = int(text, 0)
    if not 0 <= value < 256:
        raise ValueError(f"{text!r} is not a byte")
    return value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pattern(cdi_worker.Location):
    """``pattern:SIZE``, in bytes. ``byte``: the byte to repeat."""

    byte: int = cdi_worker.field(
        0, env="IMPORTER_PATTERN_BYTE", option="--pattern-byte", help="What the disk is full of.", parse=_byte
    )

    @property
    def size(self) -> str:
        return self.endpoint.removeprefix("pattern:")

    def faults(self) -> Iterator[str]:
        yield from cdi_worker.Location.faults(self)
        if not self.size.isdecimal():
            yield f"{self.endpoint!r} is not pattern:SIZE"
