"""The locations of VMware machines and disks, and of the VDDK library."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import ClassVar, Final

from cdi_worker.sources import base, fields, staged

SCHEME: Final = "vsphere"
#: Values of ``Vddk.read_by``.
AUTO, VDDK, LEASE = "auto", "vddk", "lease"
LIBRARY = "/opt/vmware-vix-disklib-distrib"
#: Sessions of one worker: 48 MB of buffers that an ESXi host has for all, and 4 MB for each (VDDK guide, NFC
#: Session Limits).
MOST_CONNECTIONS = 12


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST_CONNECTIONS:
        raise ValueError(f"{text!r}; supported: 1 to {MOST_CONNECTIONS}")
    return int(text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vsphere(staged.Staged):
    """A virtual machine: the URL of a vCenter or ESXi host and a UUID, or ``vsphere://HOST[:PORT]/UUID``.

    Checkpoints are snapshots, by their reference or name. ``quiesce``: of the snapshot of a running machine.
    """

    variables: ClassVar[Mapping[str, str]] = {
        "user": "GOVC_USERNAME",
        "password": "GOVC_PASSWORD",
        "ca_file": "GOVC_TLS_CA_CERTS",
    }

    uuid: str = fields.field(
        env="IMPORTER_UUID", option="--uuid", help="UUID of the VMware virtual machine.", key="uuid"
    )
    thumbprint: str = fields.field(
        env="IMPORTER_THUMBPRINT",
        option="--thumbprint",
        help="Thumbprint of the vCenter or ESXi certificate, of SHA-1 or SHA-256.",
        key="thumbprint",
        selects=False,
    )
    snapshot: str = fields.field(
        option="--snapshot",
        env="CDI_WORKER_SNAPSHOT",
        help="Snapshot of the VMware machine: reference or name.",
        key="snapshot",
        verbs=fields.READ,
    )
    quiesce: bool = fields.field(
        default=False,
        env="CDI_WORKER_QUIESCE",
        option="--quiesce",
        help="Let VMware Tools flush a running machine before the snapshot that is taken of it.",
        key="quiesce",
        verbs=fields.READ,
        selects=False,
    )

    @property
    def url(self) -> str:
        """The URL of the API."""
        host, _ = self._parts
        return f"https://{host}/sdk" if host else self.endpoint

    @property
    def machine(self) -> str:
        """The UUID of the machine."""
        _, path = self._parts
        return self.uuid or path.strip("/")

    @property
    def _parts(self) -> tuple[str, str]:
        """The host and the path of ``vsphere://``; both empty for any other URL."""
        scheme, _, rest = self.endpoint.partition("://")
        host, _, path = rest.partition("/")
        return (host, path) if scheme.lower() == SCHEME else ("", "")

    @property
    def moment(self) -> str:
        """The snapshot that is read, also that of a stage; empty: the machine as it is."""
        return self.current or self.snapshot

    @property
    def chosen(self) -> str:
        """The disk that the location names; empty: none."""
        return ""

    def faults(self) -> Iterator[str]:
        yield from staged.Staged.faults(self)
        if self.current and self.snapshot:
            yield fields.fault(self, "a checkpoint is a snapshot: give no other one ({})", "snapshot")
        if self.endpoint and not base.is_web(self.url):
            text = "malformed URL of vCenter or ESXi ({}); expected https://host[:port] or vsphere://host[:port]/UUID"
            yield fields.Fault(text, "IMPORTER_ENDPOINT", "SOURCE")
        elif not self.machine:
            yield fields.fault(self, "the UUID of a virtual machine is missing ({})", "uuid")
        elif "@" in self._parts[0]:
            text = "the URL ({}) contains a user or a password; give them apart from it"
            yield fields.Fault(text, "IMPORTER_ENDPOINT", "SOURCE")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vddk(Vsphere):
    """The disk of a machine, by its path. ``read_by``: ``vddk``, ``lease``, or the first that is possible.

    Checkpoints: see the contract. ``vddk_libdir``: folder of the VDDK library. ``vddk_config``: its optional
    configuration file. ``vddk_connections``: sessions with the host, at most.
    """

    backing_file: str = fields.field(
        env="IMPORTER_BACKING_FILE",
        option="--backing-file",
        help="Path of the VMware disk: '[datastore] dir/disk.vmdk'.",
        key="backingFile",
    )
    read_by: str = fields.field(
        AUTO,
        env="CDI_WORKER_READ_BY",
        option="--read-by",
        help="How a VMware disk is read: by VDDK, by an export lease, or by VDDK if its library is there.",
        choices=(AUTO, VDDK, LEASE),
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

    @property
    def chosen(self) -> str:
        return self.backing_file

    def faults(self) -> Iterator[str]:
        yield from Vsphere.faults(self)
        if not self.backing_file:
            yield fields.fault(self, "the vddk source needs the path of a disk ({})", "backing_file")
        if self.read_by not in {AUTO, VDDK, LEASE}:
            text = f"unknown way to read {self.read_by!r} ({{}}); supported: {AUTO}, {VDDK}, {LEASE}"
            yield fields.fault(self, text, "read_by")
