"""Multi-stage imports: a full copy of one checkpoint, then the changes between checkpoints."""

from __future__ import annotations

import dataclasses
import posixpath
import urllib.parse
from collections.abc import Iterator
from typing import ClassVar, Self

from cdi_worker import errors
from cdi_worker.sources import base, fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class Staged(base.Location):
    """A disk at a checkpoint. ``previous`` empty: a full copy. ``final``: the last stage."""

    staged: ClassVar[bool] = True

    previous: str = fields.field("", base.PREVIOUS)
    current: str = fields.field(
        env="IMPORTER_CURRENT_CHECKPOINT",
        option="--current-checkpoint",
        help="Checkpoint of this stage.",
        verbs=fields.READ,
    )
    final: bool = fields.field(
        default=False,
        env="IMPORTER_FINAL_CHECKPOINT",
        option="--final-checkpoint",
        help="Marks this stage as the last one.",
        verbs=fields.READ,
    )

    @property
    def stage(self) -> base.Stage:
        return base.Stage(self.previous, self.current, self.final)

    def faults(self) -> Iterator[str]:
        yield from base.Location.faults(self)
        if self.previous and not self.current:
            yield fields.fault(self, "a previous checkpoint without a current one; use {}", "current")
        if self.previous and self.previous == self.current:
            # The disk would seem to hold what it held before the delta.
            text = "the previous checkpoint is the current one, too; name that of this stage with {}"
            yield fields.fault(self, text, "current")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Files(Staged):
    """The address of a file. Checkpoints are files beside each other: the first is a complete disk, each
    other one a qcow2 file with what changed since the checkpoint before it.
    """

    of_files: ClassVar[bool] = True

    @property
    def file_name(self) -> str:
        return self.current or base.file_name(self.endpoint)

    def at_stage(self) -> Self:
        """Return the location of the file that has the name of the current checkpoint.

        Raises ``errors.RequestError`` for a name that leads elsewhere.
        """
        if not self.current:
            return self
        if posixpath.basename(self.current) != self.current or self.current in {".", ".."}:
            what = "is not the name of a file beside the first"
            raise errors.RequestError(f"checkpoint {self.current!r}: {what}")
        if "://" not in self.endpoint:
            path = posixpath.join(posixpath.dirname(self.endpoint), self.current)
            return dataclasses.replace(self, endpoint=path)
        parts = urllib.parse.urlsplit(self.endpoint)
        path = f"{parts.path.rpartition('/')[0]}/{urllib.parse.quote(self.current)}"
        return dataclasses.replace(self, endpoint=urllib.parse.urlunsplit(parts._replace(path=path)))
