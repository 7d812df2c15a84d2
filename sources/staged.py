"""Multi-stage imports: a full copy of one checkpoint, then the changes between checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

from cdi_worker.sources import base, fields


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Staged(base.Location):
    """A disk at a checkpoint. ``previous`` empty: a full copy. ``final``: the last stage."""

    staged: ClassVar[bool] = True

    previous: str = fields.field(about=base.PREVIOUS)
    current: str = fields.field(
        env="IMPORTER_CURRENT_CHECKPOINT", option="--current-checkpoint", help="Checkpoint of this stage."
    )
    final: bool = fields.field(
        default=False,
        env="IMPORTER_FINAL_CHECKPOINT",
        option="--final-checkpoint",
        help="Marks this stage as the last one.",
    )

    @property
    def stage(self) -> base.Stage:
        return base.Stage(self.previous, self.current, self.final)

    def faults(self) -> Iterator[str]:
        yield from base.Location.faults(self)
        if self.previous and not self.current:
            yield "a previous checkpoint without a current one; set IMPORTER_CURRENT_CHECKPOINT"
