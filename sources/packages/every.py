"""All disks of an OVA, in one pass where it is a stream."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable
from typing import Final

from cdi_worker import errors
from cdi_worker.formats import checksum, detect
from cdi_worker.formats.ova import descriptor
from cdi_worker.sources import base
from cdi_worker.sources.packages import ova, passing

#: Disks that are imported together: each keeps some files open until all are complete.
MOST: Final = 100


class PassingDisk(base.Source):
    """One of all disks of an OVA, imported as they pass."""

    once = True

    def __init__(self, whole: base.Image, file: passing.File) -> None:
        self.name = f"{whole.served.name}#{file.disk.file}"
        self.size, self.head = file.member.size, file.head
        self._file = file
        self._used = False

    def stream(self, offset: int = 0) -> base.Reader:
        if offset or self._used:
            raise errors.NoRanges(url=self.name, reason="it passes once")
        self._used = True
        return self._file

    def verify(self) -> None:
        """Verify the checksum if the manifest has passed; ``each`` does it otherwise. Safe to call twice."""
        self._file.rest()
        self._file.verify()


def each(
    whole: base.Image,
    expected: checksum.Checksum | None,
    cancel: base.Cancel,
    begin: Callable[[tuple[descriptor.Disk, ...]], list[Callable[[base.Source], None]]],
) -> None:
    """Import each disk of ``whole``, an open OVA. ``begin`` gets them all, and returns what imports each.

    When it returns, the whole is verified: none may be usable before.
    """
    if expected is None and whole.at_random(cancel) is not None:
        found = ova.disks(whole, cancel)
        _check_count(whole, found)
        for disk, run in zip(found, begin(found), strict=True):
            run(ova.OvaSource(whole, disk.file, None, cancel))
    else:
        with contextlib.closing(passing.Pass(whole, cancel, expected)) as stream:
            _each_passing(whole, stream, begin)
    whole.served.verify()


def _each_passing(
    whole: base.Image,
    stream: passing.Pass,
    begin: Callable[[tuple[descriptor.Disk, ...]], list[Callable[[base.Source], None]]],
) -> None:
    imports: list[Callable[[base.Source], None]] = []
    while (file := stream.next_disk()) is not None:
        if not imports:
            found = stream.package.disks
            ova.check(whole, *found)
            _check_count(whole, found)
            stream.package.check_listed()
            imports.extend(begin(found))
        imports[file.disk.index - 1](PassingDisk(whole, file))


def _check_count(whole: base.Image, disks: tuple[descriptor.Disk, ...]) -> None:
    if len(disks) > MOST:
        reason = f"{len(disks)} disks, at most {MOST} are imported together; choose each with --disk"
        raise errors.Unsupported(reason=f"{whole.served.name}: {reason}")


def image_name(disk: descriptor.Disk) -> str:
    """Return the name of the file for a disk: that in the OVA, without what says how it is packed."""
    name = pathlib.PurePosixPath(disk.file)
    if name.suffix.removeprefix(".").lower() in detect.COMPRESSIONS:
        name = name.with_suffix("")
    stem = name.stem.lstrip(".")
    return f"{stem or f'disk{disk.index}'}.img"
