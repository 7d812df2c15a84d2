"""The location of a local disk."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

from cdi_worker.sources import base

#: The address of standard input; a file with this name is ``./-``.
STDIN = "-"


@dataclasses.dataclass(frozen=True, slots=True)
class Local(base.Location):
    """A path, a ``file://`` URL, or ``-`` for standard input."""

    def reads(self, path: str) -> bool:
        try:
            if self.endpoint == STDIN:
                return os.path.samestat(os.fstat(0), Path(path).stat())
            return Path(self.endpoint.removeprefix("file://")).samefile(path)
        except OSError:
            return False


class Nowhere(base.Location):
    """The location of a blank disk. It has no endpoint."""

    __slots__ = ()

    def faults(self) -> Iterator[str]:
        return iter(())
