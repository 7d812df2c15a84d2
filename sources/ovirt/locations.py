"""The location of an oVirt disk."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import ClassVar

from cdi_worker.sources import fields, staged


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Imageio(staged.Staged):
    """The API URL of an engine and the id of a disk. Checkpoints are snapshot ids."""

    variables: ClassVar[Mapping[str, str]] = {
        "user": "OVIRT_USERNAME",
        "password": "OVIRT_PASSWORD",
        "ca_file": "OVIRT_CAFILE",
    }

    disk_id: str = fields.field(
        env="IMPORTER_DISK_ID", option="--disk-id", help="Id of the oVirt disk.", key="diskId"
    )

    def faults(self) -> Iterator[str]:
        yield from staged.Staged.faults(self)
        if not self.disk_id:
            yield fields.fault(self, "the imageio source needs a disk id ({})", "disk_id")
