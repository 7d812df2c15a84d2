"""All disks of an OVA, in one pass where it is a stream."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable
from typing import Final, TypeAlias

from cdi_worker import errors
from cdi_worker.formats import checksum, detect
from cdi_worker.formats.ova import descriptor
from cdi_worker.sources import base
from cdi_worker.sources.packages import ova

#: Disks that are imported together: each keeps some files open until all are complete.
MOST: Final = 100

#: Called with all disks; returns a function for each that imports it.
Begin: TypeAlias = Callable[[tuple[descriptor.OvfDisk, ...]], list[Callable[[base.Source], None]]]


class _Member(ova.OvaSource):
    """One of several disks. Its source is notified once, when all are on storage."""

    def finish(self) -> base.Provenance:
        return base.Provenance()


def each(whole: base.Image, expected: checksum.Checksum | None, cancel: base.Cancel, begin: Begin) -> None:
    """Import each disk of ``whole``, an open OVA.

    When it returns, the whole is verified: none may be usable before.
    """
    if expected is None and whole.at_random(cancel) is not None:
        disks = ova.disks(whole, cancel)
        _check_count(whole, disks)
        for disk, run in zip(disks, begin(disks), strict=True):
            run(_Member(whole, disk.file, None, cancel))
        whole.verify()
        return
    imports: list[Callable[[base.Source], None]] = []
    with contextlib.closing(ova.Pass(whole, cancel, expected)) as stream:
        for file in stream.files():
            if not imports:
                disks = stream.archive.disks
                ova.check(whole, *disks)
                _check_count(whole, disks)
                stream.archive.check_listed()
                imports.extend(begin(disks))
            imports[file.disk.index - 1](file)
    whole.verify()


def _check_count(whole: base.Image, disks: tuple[descriptor.OvfDisk, ...]) -> None:
    if len(disks) > MOST:
        reason = f"{len(disks)} disks, at most {MOST} are imported together; choose each with --disk"
        raise errors.Unsupported(reason=f"{whole.facts.name}: {reason}")


def image_name(disk: descriptor.OvfDisk) -> str:
    """Return the name of the file for a disk: its name in the OVA, without that of a compression."""
    name = pathlib.PurePosixPath(disk.file)
    if name.suffix.removeprefix(".").lower() in detect.COMPRESSIONS:
        name = name.with_suffix("")
    stem = name.stem.lstrip(".")
    return f"{stem or f'disk{disk.index}'}.img"
