"""The location of a local disk."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from cdi_worker.sources import base


@dataclasses.dataclass(frozen=True, slots=True)
class Local(base.Location):
    """A path or a ``file://`` URL."""

    def reads(self, path: str) -> bool:
        try:
            return Path(self.endpoint.removeprefix("file://")).samefile(path)
        except OSError:
            return False


class Nowhere(base.Location):
    """The location of a blank disk. It has no endpoint."""

    __slots__ = ()

    def faults(self) -> Iterator[str]:
        return iter(())
