"""The location of a VMware disk, and of the VDDK library."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import ClassVar

from cdi_worker.sources import base, fields, staged

LIBRARY = "/opt/vmware-vix-disklib-distrib"
#: Sessions of one worker: 48 MB of buffers that an ESXi host has for all, and 4 MB for each (VDDK guide, NFC
#: Session Limits).
MOST_CONNECTIONS = 12


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST_CONNECTIONS:
        raise ValueError(f"{text!r}; supported: 1 to {MOST_CONNECTIONS}")
    return int(text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vddk(staged.Staged):
    """The URL of a vCenter or ESXi host, a virtual machine and the path of its disk.

    Checkpoints: see the contract. ``vddk_libdir``: folder of the VDDK library. ``vddk_config``: its optional
    configuration file. ``vddk_connections``: sessions with the host, at most.
    """

    variables: ClassVar[Mapping[str, str]] = {
        "user": "GOVC_USERNAME",
        "password": "GOVC_PASSWORD",
        "ca_file": "GOVC_TLS_CA_CERTS",
    }

    uuid: str = fields.field(
        env="IMPORTER_UUID", option="--uuid", help="UUID of the VMware virtual machine.", key="uuid"
    )
    backing_file: str = fields.field(
        env="IMPORTER_BACKING_FILE",
        option="--backing-file",
        help="Path of the VMware disk: '[datastore] dir/disk.vmdk'.",
        key="backingFile",
    )
    thumbprint: str = fields.field(
        env="IMPORTER_THUMBPRINT",
        option="--thumbprint",
        help="SHA-1 thumbprint of the vCenter or ESXi certificate.",
        key="thumbprint",
        selects=False,
    )
    vddk_libdir: str = fields.field(
        LIBRARY,
        option="--vddk-libdir",
        help="Folder of VMware's VDDK library.",
        mount=LIBRARY,
        selects=False,
    )
    vddk_config: str = fields.field(
        option="--vddk-config",
        help="Configuration file of the VDDK library.",
        mount="/vddk-args/vddk-config-file",
        file=True,
        selects=False,
    )

    vddk_connections: int = fields.field(
        3,
        option="--vddk-connections",
        env="IMPORTER_VDDK_CONNECTIONS",
        help="Most sessions with the ESXi host, which has memory for 12 of all workers.",
        parse=_count,
        selects=False,
    )

    def faults(self) -> Iterator[str]:
        yield from staged.Staged.faults(self)
        if self.endpoint and not base.is_web(self.endpoint):
            text = "malformed URL of vCenter or ESXi ({}); expected https://host[:port]"
            yield fields.Fault(text, "IMPORTER_ENDPOINT", "SOURCE")
        if not self.uuid:
            yield fields.fault(self, "the vddk source needs the UUID of a virtual machine ({})", "uuid")
        if not self.backing_file:
            yield fields.fault(self, "the vddk source needs the path of a disk ({})", "backing_file")
