"""Where a disk of oVirt is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from cdi_worker.sources import fields, staged


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Imageio(staged.Staged):
    """The API of an engine, and the id of a disk there. Checkpoints are ids of snapshots."""

    disk_id: str = fields.field(env="IMPORTER_DISK_ID", option="--disk-id", help="oVirt disk.", key="diskId")

    def faults(self) -> Iterator[str]:
        yield from staged.Staged.faults(self)
        if not self.disk_id:
            yield "the imageio source needs the id of a disk (IMPORTER_DISK_ID)"
