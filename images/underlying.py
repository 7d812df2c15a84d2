"""The storage below a file or device, to tell whether two names are one disk.

Linux shows in sysfs what a block device is made of (Documentation/ABI/testing/sysfs-block): a partition has
its ``start`` on the device of its parent directory, a loop device a ``backing_file``, device mapper and md
have ``slaves``.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import stat
from collections.abc import Iterator
from typing import Final, NamedTuple

from cdi_worker.images import kernel

#: Bytes of the unit of sysfs, whatever the sectors of a device are.
_SECTOR: Final = 512
#: Devices on devices that are followed; the kernel allows fewer.
_DEEPEST: Final = 16
_END: Final = 1 << 63
_SYS: Final = "/sys"


class Region(NamedTuple):
    """A part of a file or device, in bytes.

    ``storage``: the numbers of a device, or device and inode of a file. ``mapped``: somewhere within the
    part, because only root can read the tables of device mapper.
    """

    storage: tuple[str, int, int]
    start: int
    end: int
    mapped: bool = False

    def meets(self, other: Region) -> bool:
        """Return whether two regions share a byte; two logical volumes on one device do not."""
        is_apart = self.end <= other.start or other.end <= self.start
        return self.storage == other.storage and not (is_apart or (self.mapped and other.mapped))


def share(one: os.stat_result, other: os.stat_result, sys: str = _SYS) -> bool:
    """Return whether two files or devices have storage in common, under whatever names.

    ``sys``: where sysfs is mounted. Storage that it does not show is not found, such as the file of a
    loop device in another mount namespace.
    """
    if stat.S_ISREG(one.st_mode) and stat.S_ISREG(other.st_mode):
        return os.path.samestat(one, other)
    found = list(regions(other, sys))
    return any(each.meets(region) for each in regions(one, sys) for region in found)


def regions(status: os.stat_result, sys: str = _SYS) -> Iterator[Region]:
    """Yield what a file or device consists of: itself, and everything below it."""
    if stat.S_ISBLK(status.st_mode):
        yield from _device(status.st_rdev, Region(("", 0, 0), 0, _END), sys, _DEEPEST)
    else:
        yield Region(("file", status.st_dev, status.st_ino), 0, _END)


def _device(number: int, part: Region, sys: str, depth: int) -> Iterator[Region]:
    """Yield ``part`` of a device, and the storage below it."""
    yield part._replace(storage=("device", os.major(number), os.minor(number)))
    try:
        folder = pathlib.Path(sys, "dev/block", f"{os.major(number)}:{os.minor(number)}").resolve(strict=True)
    except OSError:
        return
    if not depth:
        return
    if (folder / "partition").exists():
        below = _shifted(part, _SECTOR * _number(folder / "start"), _SECTOR * _number(folder / "size"))
        yield from _device(_numbers(folder.parent / "dev"), below, sys, depth - 1)
    with contextlib.suppress(OSError):
        backing = pathlib.Path(os.fsdecode((folder / "loop/backing_file").read_bytes()).rstrip("\n")).stat()
        if not _is_backing(folder.name, number, backing):
            return
        limit = _number(folder / "loop/sizelimit") or _END
        below = _shifted(part, _number(folder / "loop/offset"), limit)
        if stat.S_ISBLK(backing.st_mode):
            yield from _device(backing.st_rdev, below, sys, depth - 1)
        else:
            yield below._replace(storage=("file", backing.st_dev, backing.st_ino))
    for slave in sorted((folder / "slaves").glob("*/dev")):
        whole = Region(part.storage, 0, _END, mapped=True)
        yield from _device(_numbers(slave), whole, sys, depth - 1)


def _is_backing(name: str, number: int, backing: os.stat_result) -> bool:
    """Return whether a file is that of a loop device, if its node is here to be asked.

    The path in sysfs is that of the mount namespace in which the device was set up.
    """
    try:
        with kernel.open_fd(f"/dev/{name}", os.O_NONBLOCK) as fd:
            return os.fstat(fd).st_rdev != number or kernel.loop_file(fd) == (backing.st_dev, backing.st_ino)
    except OSError:
        return True


def _shifted(part: Region, start: int, size: int) -> Region:
    """Return ``part`` of what begins at ``start`` of the storage below and has ``size`` bytes."""
    return part._replace(start=start + part.start, end=start + min(part.end, size))


def _number(path: pathlib.Path) -> int:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


def _numbers(path: pathlib.Path) -> int:
    major, minor = path.read_text(encoding="ascii").split(":")
    return os.makedev(int(major), int(minor))
