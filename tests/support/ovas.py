"""OVAs as DSP0243 describes them: a tar archive of an OVF descriptor, disks and a manifest."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import tarfile
from collections.abc import Iterable

FORMAT = "http://www.vmware.com/interfaces/specifications/vmdk.html#streamOptimized"
ENVELOPE = """<?xml version="1.0" encoding="UTF-8"?>
<Envelope xmlns="http://schemas.dmtf.org/ovf/envelope/1" xmlns:ovf="http://schemas.dmtf.org/ovf/envelope/1">
  <References>
{files}
  </References>
  <DiskSection>
    <Info>Virtual disk information</Info>
{disks}
  </DiskSection>
  <VirtualSystem ovf:id="vm"><Info>A virtual machine</Info><Name>vm</Name></VirtualSystem>
</Envelope>
"""


@dataclasses.dataclass(frozen=True)
class Disk:
    """A disk: its file, and attributes of its elements in the descriptor; None leaves one out."""

    data: bytes
    name: str = "vm-disk1.vmdk"
    capacity: int = 8
    units: str = "byte * 2^20"
    file: dict[str, str | None] = dataclasses.field(default_factory=dict)
    disk: dict[str, str | None] = dataclasses.field(default_factory=dict)


def descriptor(disks: Iterable[Disk]) -> bytes:
    """Return a descriptor of disks."""
    files, sections = [], []
    for number, disk in enumerate(disks, 1):
        file = {"href": disk.name, "id": f"file{number}", "size": str(len(disk.data)), **disk.file}
        section = {
            "capacity": str(disk.capacity),
            "capacityAllocationUnits": disk.units,
            "diskId": f"vmdisk{number}",
            "fileRef": f"file{number}",
            "format": FORMAT,
            **disk.disk,
        }
        files.append(f"    <File {_attributes(file)}/>")
        sections.append(f"    <Disk {_attributes(section)}/>")
    return ENVELOPE.format(files="\n".join(files), disks="\n".join(sections)).encode()


def manifest(members: Iterable[tuple[str, bytes]], algorithm: str = "sha256", end: str = "\n") -> bytes:
    """Return a manifest of files."""
    lines = [
        f"{algorithm.upper()}({name})= {hashlib.new(algorithm, data, usedforsecurity=False).hexdigest()}{end}"
        for name, data in members
    ]
    return "".join(lines).encode()


def ova(*disks: Disk, listed: str = "first", algorithm: str = "sha256") -> bytes:
    """Return an OVA. ``listed``: the manifest comes ``first``, behind the descriptor, or ``last``, or not."""
    members = [("vm.ovf", descriptor(disks)), *((disk.name, disk.data) for disk in disks)]
    stated = ("vm.mf", manifest(members, algorithm))
    place = {"first": 1, "last": len(members)}
    if listed in place:
        members.insert(place[listed], stated)
    return packed(*members)


def packed(*members: tuple[str, bytes]) -> bytes:
    """Return a tar archive of files, as programs write an OVA."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return file.getvalue()


def _attributes(values: dict[str, str | None]) -> str:
    return " ".join(f'ovf:{name}="{value}"' for name, value in values.items() if value is not None)
