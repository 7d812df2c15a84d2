"""Run wipefs, which lists the signatures on a device. It is part of util-linux, like prlimit."""

from __future__ import annotations

import os
from typing import Final

from cdi_worker.formats import smalljson
from cdi_worker.images.tools import process

#: Names of libblkid for swap and for parts of something larger. LVM and RAID: ``LVM2_member``,
#: ``linux_raid_member``, …
_IN_USE: Final = frozenset({"swap", "swsuspend", "bcache", "drbd", "ceph_bluestore", "stratis"})


def in_use(path: str) -> list[str]:
    """Return the signatures of swap, LVM, RAID and the like on a device, which is not changed.

    Such a device may belong to a volume group or an array that is not active now. File systems and
    partition tables are not listed: a disk that was imported before has them.
    """
    output = bytearray()
    # A program runs in a folder of its own.
    command = ("wipefs", "--json", "--no-act", os.path.abspath(path))  # noqa: PTH100  (a link stays one)
    process.run(process.Command(command, package="util-linux"), output.extend)
    # Nothing is printed for a device without signatures.
    found = smalljson.parse(output)["signatures"] if output.strip() else []
    names = {str(each["type"]) for each in found}
    return sorted(name for name in names if name in _IN_USE or name.endswith("_member"))
