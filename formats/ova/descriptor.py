"""Read an OVF descriptor (DMTF DSP0243): which files of a virtual machine are its disks."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Final

from cdi_worker import errors, masking
from cdi_worker.formats import facts, smallxml
from cdi_worker.formats.tar import archive

#: Bytes of a descriptor. Real ones have up to some hundred KiB, most of it licence texts.
LARGEST: Final = 4 << 20
#: Files and disks. vSphere attaches at most 256 disks to a virtual machine.
_MOST: Final = 1024
#: ``byte * 2^30``, and the names of OVF 0.9, which oVirt still writes.
_UNITS = re.compile(r"byte(?:s)?(?: *\* *2\^([0-9]{1,2}))?", re.IGNORECASE)
_OLD_UNITS = {"kilobytes": 10, "megabytes": 20, "gigabytes": 30, "terabytes": 40}
#: The namespaces of OVF 1 and 2 (DSP0243), of OVF 0.9, and of oVirt; not those of vendors, as VirtualBox's
#: ``http://www.virtualbox.org/ovf/machine``.
_NAMESPACE = re.compile(r"[a-z]+://[^ ]*/ovf/(?:envelope/[0-9]+|[0-9]+/envelope)/?", re.IGNORECASE)
_ENCODED = re.compile(rb"%([0-9A-Fa-f]{2})")
_COMPRESSIONS = {"gzip": "gz", "bzip2": "bz2"}


@dataclasses.dataclass(frozen=True)
class OvfDisk:
    """A disk. ``file``: its name, relative to the descriptor. ``index``: its place there, from 1.

    ``capacity``: in bytes, None if it is not a number. ``size``: of the file, if stated. ``compression``: our
    name for it. ``obstacle``: why it cannot be imported although the others can.
    """

    index: int
    file: str
    id: str
    capacity: int | None = None
    size: int | None = None
    compression: str = ""
    obstacle: str = ""

    def describe(self) -> dict[str, object]:
        """Return what ``inspect`` shows."""
        facts = {"index": self.index, "file": self.file, "id": self.id, "capacity": self.capacity}
        return {name: value for name, value in facts.items() if value not in {None, ""}}


def parse(data: bytes) -> tuple[OvfDisk, ...]:
    """Return the disks that have a file, in order. Raises ``errors.Refused`` and ``errors.Corrupt``."""
    files: dict[str, Mapping[str, str]] = {}
    disks: list[Mapping[str, str]] = []

    def start(name: str, attributes: Mapping[str, str], path: list[str]) -> None:
        name, above = _local(name), _local(path[-1]) if path else ""
        if not path and name != "Envelope":
            reason = f"the document is a {masking.quoted(name)!r}"
            raise errors.Corrupt(format="OVF descriptor", reason=reason)
        if len(files) + len(disks) >= _MOST:
            raise refused("size", "the descriptor has too many elements")
        if (above, name) == ("References", "File"):
            file = _own(attributes)
            if (identity := file.get("id", "")) in files:
                raise refused("duplicate", f"two files with the id {identity!r}")
            files[identity] = file
        elif name == "Disk" and above in {"DiskSection", "Section"}:  # in OVF 0.9
            disks.append(_own(attributes))

    smallxml.parse(data, "OVF descriptor", refused, start=start)
    found: list[OvfDisk] = []
    used: dict[str, str] = {}
    for disk in disks:
        reference = disk.get("fileRef", "")
        if not reference:
            continue  # a blank disk
        if reference not in files:
            raise refused("reference", f"disk {disk.get('diskId', '')!r} names no file ({reference!r})")
        found.append(_disk(len(found) + 1, disk, files[reference]))
        used[reference] = found[-1].file
    possible = [name for file in used.values() for name in names(file)]
    if len(set(possible)) < len(possible):
        raise refused("duplicate", "two disks have the same file")
    return tuple(found)


def refused(rule: str, reason: str, *ways: errors.Way) -> errors.Refused:
    """Return the error of a safety rule for an OVA; ``ways``: what to do."""
    return facts.refuse("OVA", rule, reason, *ways)


def _disk(index: int, disk: Mapping[str, str], file: Mapping[str, str]) -> OvfDisk:
    href = file.get("href", "")
    compression = file.get("compression", "").lower()
    obstacle = ""
    if re.match(r"[a-z][a-z0-9+.-]+:", href, re.IGNORECASE):
        obstacle = "is not in the archive but at a URL; import it from there"
    elif file.get("chunkSize"):
        obstacle = "is split into chunks (ovf:chunkSize); pack it again in one piece"
    elif disk.get("parentRef"):
        obstacle = "holds only the changes to another disk (ovf:parentRef)"
    elif compression not in {"", "identity", *_COMPRESSIONS}:
        obstacle = f"has the unknown compression {masking.quoted(compression)!r}"
    if not obstacle or "://" not in href:
        # A name that leads outside the archive is an attack: the whole package is refused.
        href = "/".join(archive.archive_path(href))
    if not href:
        raise refused("reference", f"disk {disk.get('diskId', '')!r} has a file without a name")
    units = disk.get("capacityAllocationUnits", "byte").strip()
    match = _UNITS.fullmatch(units)
    shift = int(match[1] or 0) if match else _OLD_UNITS.get(units.lower())
    number = _number(disk.get("capacity", ""))
    return OvfDisk(
        index,
        href,
        disk.get("diskId", ""),
        None if number is None or shift is None else number << shift,
        _number(file.get("size", "")),
        _COMPRESSIONS.get(compression, ""),
        obstacle,
    )


def _own(attributes: Mapping[str, str]) -> dict[str, str]:
    """Return the attributes of OVF by local name, without those in the namespace of a vendor.

    Raises ``errors.Refused`` for one with two values: readers differ in which they use.
    """
    own: dict[str, str] = {}
    for name, value in attributes.items():
        namespace, _, local = name.rpartition(" ")
        if _is_ovf(namespace) and own.setdefault(local, value) != value:
            both = f"{masking.quoted(own[local])!r} and {masking.quoted(value)!r}"
            raise refused("duplicate", f"the attribute {local!r} is both {both}, in two namespaces")
    return own


def _local(name: str) -> str:
    """Return the name of an element of OVF without its namespace; others keep theirs."""
    namespace, _, local = name.rpartition(" ")
    return local if _is_ovf(namespace) else name


def _is_ovf(namespace: str) -> bool:
    return not namespace or _NAMESPACE.fullmatch(namespace) is not None


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[0-9]{1,19}", text.strip()) else None


def names(file: str) -> tuple[str, ...]:
    """Return the names that the member of ``ovf:href`` may have: as it is, and percent-decoded.

    Programs write either; a package with files of both names is refused.
    """
    decoded = _ENCODED.sub(lambda found: bytes.fromhex(found[1].decode()), file.encode())
    return tuple(dict.fromkeys((file, decoded.decode(errors="surrogateescape"))))
