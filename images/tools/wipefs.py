"""Run wipefs, which lists the signatures on a device. It is part of util-linux, like prlimit and partx."""

from __future__ import annotations

import contextlib
import os
from typing import Final

from cdi_worker import errors, masking
from cdi_worker.formats import detect, smalljson
from cdi_worker.images.tools import process

#: Names of libblkid for partition tables. A GPT has a protective MBR as well.
_TABLES: Final = {"gpt": "GPT", "dos": "MBR", "PMBR": "protective MBR"}
#: Names for swap and for parts of something larger. LVM and RAID: ``LVM2_member``, ``linux_raid_member``, …
_IN_USE: Final = frozenset({"swap", "swsuspend", "bcache", "drbd", "ceph_bluestore", "stratis"})
_SECTOR: Final = 512
_BOOT: Final = b"\x55\xaa"


def contents(path: str) -> list[str]:
    """Return what a device holds, by its signatures, such as ``GPT``, ``2 partitions`` and ``ext4 'root'``.

    It may not be mounted now, or belong to an LVM volume group or an array that is not active. The left-over
    of an interrupted import is nothing. Nothing is changed.
    """
    path = os.path.abspath(path)  # noqa: PTH100  (a program runs in a folder of its own; a link stays one)
    with errors.on_target(path, "read"), open(path, "rb", buffering=0) as device:
        first = device.read(_SECTOR)
    if first.startswith(detect.CLAIM):
        return []
    # A label may be in any encoding.
    output = _run("wipefs", "--json", "--no-act", path).decode("utf-8", "replace")
    # Nothing is printed for some devices without signatures.
    listed = smalljson.parse(output)["signatures"] if output.strip() else []
    labels = {str(each["type"]): masking.quoted(str(each["label"] or "")) for each in listed}
    if "gpt" in labels:
        labels.pop("PMBR", None)
    found = [
        f"{_TABLES.get(name, name)} {label!r}" if label else _TABLES.get(name, name)
        for name, label in labels.items()
    ]
    if not _TABLES.keys().isdisjoint(labels) and (count := _partitions(path)):
        found.append("1 partition" if count == 1 else f"{count} partitions")
    # libblkid wants a valid partition table behind it.
    return found or ["boot sector"] * first.endswith(_BOOT)


def in_use(found: list[str]) -> list[str]:
    """Return which ``contents`` another machine or a storage system may use, such as swap, LVM and RAID."""
    return [each for each in found if (name := each.split()[0]) in _IN_USE or name.endswith("_member")]


def _partitions(path: str) -> int:
    """Return the number of partitions in the table; 0 if it is damaged."""
    with contextlib.suppress(errors.ToolFailed):
        return len(_run("partx", "--show", "--noheadings", "--output", "NR", path).splitlines())
    return 0


def _run(*argv: str) -> bytearray:
    output = bytearray()
    process.run(process.Command(argv, package="util-linux"), output.extend)
    return output
