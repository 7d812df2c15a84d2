"""Where a disk of VMware is, and where VMware's library is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from cdi_worker.sources import fields, staged

LIBRARY = "/opt/vmware-vix-disklib-distrib"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Vddk(staged.Staged):
    """A vCenter or ESXi host, a virtual machine and the file of its disk. Checkpoints: see the contract.

    ``vddk_libdir``: the folder of VMware's library. ``vddk_config``: its configuration file, if any.
    """

    uuid: str = fields.field(env="IMPORTER_UUID", option="--uuid", help="VMware virtual machine.", key="uuid")
    backing_file: str = fields.field(
        env="IMPORTER_BACKING_FILE",
        option="--backing-file",
        help="VMware disk: '[datastore] dir/disk.vmdk'.",
        key="backingFile",
    )
    thumbprint: str = fields.field(
        env="IMPORTER_THUMBPRINT",
        option="--thumbprint",
        help="SHA-1 thumbprint of the vCenter or ESXi certificate.",
        key="thumbprint",
    )
    vddk_libdir: str = fields.field(
        LIBRARY, option="--vddk-libdir", help="Folder of VMware's VDDK library.", mount=LIBRARY
    )
    vddk_config: str = fields.field(
        option="--vddk-config",
        help="Configuration file of the VDDK library.",
        key="extraArgs",
        entry="vddk-config-file",
        mount="/vddk-args/vddk-config-file",
        file=True,
    )

    def faults(self) -> Iterator[str]:
        yield from staged.Staged.faults(self)
        wanted = {
            "the uuid of a virtual machine (IMPORTER_UUID)": self.uuid,
            "the file of a disk (IMPORTER_BACKING_FILE)": self.backing_file,
        }
        yield from (f"the vddk source needs {what}" for what, value in wanted.items() if not value)
