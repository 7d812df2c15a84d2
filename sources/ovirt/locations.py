"""The location of an oVirt disk."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import ClassVar, Final

from cdi_worker.sources import base, fields, staged

_ID: Final = re.compile("[0-9A-Za-z_-]+")


@dataclasses.dataclass(frozen=True, kw_only=True)
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
        if self.endpoint and not base.is_web(self.endpoint):
            text = "malformed URL of the engine ({}); expected https://host[:port]/ovirt-engine/api"
            yield fields.Fault(text, "IMPORTER_ENDPOINT", "SOURCE")
        if not self.disk_id:
            yield fields.fault(self, "the imageio source needs a disk id ({})", "disk_id")
        elif not _ID.fullmatch(self.disk_id):
            # The SDK makes a part of a path of it.
            yield fields.fault(self, "the disk id ({}) is not an oVirt id, which is a UUID", "disk_id")
