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
from cdi_worker.sources.ova import passing, source

#: Disks that pass: each is imported within the one before it, which takes about thirty frames of the stack.
MOST: Final = 20


class PassingDisk(base.Source):
    """One of all disks of an OVA, imported as they pass. ``follow``: imports the disks after it."""

    once = True

    def __init__(self, whole: base.Source, file: passing.File, follow: Callable[[], None]) -> None:
        self.name = f"{whole.name}#{file.disk.file}"
        self.size, self.head = file.member.size, file.head
        self._file = file
        self._follow = follow
        self._used = self._verified = False

    def stream(self, offset: int = 0) -> base.Reader:
        if offset or self._used:
            raise errors.NoRanges(url=self.name, reason="it passes once")
        self._used = True
        return self._file

    def verify(self) -> None:
        """Import the disks after this one first: the manifest may come last."""
        if not self._verified:
            self._file.rest()
            # If the manifest has passed, the disks after a wrong one need not.
            self._file.verify()
            self._follow()
            self._verified = True


def each(
    whole: base.Source,
    expected: checksum.Checksum | None,
    cancel: base.Cancel,
    begin: Callable[[tuple[descriptor.Disk, ...]], list[Callable[[base.Source], None]]],
) -> None:
    """Import each disk of ``whole``, an open OVA. ``begin`` gets them all, and returns what imports each.

    In a stream, each is verified by importing those after it: the calls are nested.
    """
    if expected is None and whole.engine.at_random(whole, cancel) is not None:
        found = source.disks(whole, cancel)
        source.check(whole, *found)
        for disk, run in zip(found, begin(found), strict=True):
            run(source.OvaSource(whole, disk.file, None, cancel))
        return
    stream = passing.Pass(whole, cancel, expected)
    imports: list[Callable[[base.Source], None]] = []

    def follow() -> None:
        if (file := stream.next_disk()) is None:
            return
        if not imports:
            source.check(whole, *stream.package.disks)
            _check_count(whole, stream.package.disks)
            imports.extend(begin(stream.package.disks))
        imports[file.disk.index - 1](PassingDisk(whole, file, follow))

    with contextlib.closing(stream):
        follow()


def _check_count(whole: base.Source, disks: tuple[descriptor.Disk, ...]) -> None:
    if len(disks) > MOST:
        reason = (
            f"{len(disks)} disks, at most {MOST} of a stream are imported together; choose each with --disk"
        )
        raise errors.Unsupported(reason=f"{whole.name}: {reason}")


def image_name(disk: descriptor.Disk) -> str:
    """Return the name of the file for a disk: that in the OVA, without what says how it is packed."""
    name = pathlib.PurePosixPath(disk.file)
    if name.suffix.removeprefix(".").lower() in detect.COMPRESSIONS:
        name = name.with_suffix("")
    stem = name.stem.lstrip(".")
    return f"{stem or f'disk{disk.index}'}.img"
