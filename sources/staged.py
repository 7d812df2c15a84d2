"""Sources whose disks come in stages: a full copy of one checkpoint, then what has changed up to the next."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

from cdi_worker.sources import base, fields


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Staged(base.Location):
    """A disk at a checkpoint. ``previous``: the stage before; empty: everything. ``final``: none follows."""

    staged: ClassVar[bool] = True

    previous: str = fields.field(about=base.PREVIOUS)
    current: str = fields.field(
        env="IMPORTER_CURRENT_CHECKPOINT", option="--current-checkpoint", help="The snapshot of this stage."
    )
    final: bool = fields.field(
        default=False,
        env="IMPORTER_FINAL_CHECKPOINT",
        option="--final-checkpoint",
        help="This stage is the last.",
    )

    @property
    def stage(self) -> base.Stage:
        return base.Stage(self.previous, self.current, self.final)

    def faults(self) -> Iterator[str]:
        yield from base.Location.faults(self)
        if self.previous and not self.current:
            yield "a previous checkpoint without a current one"
