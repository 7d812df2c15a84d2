"""The routes UNPACK and EXTRACT: tar archives, and the clones of file systems."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from cdi_worker import errors, units
from cdi_worker.formats.tar import archive
from cdi_worker.images import directio, targets
from cdi_worker.images.disks import base as disks
from cdi_worker.images.disks import raw
from cdi_worker.images.engine import ahead
from cdi_worker.images.folder import staging, unpack
from cdi_worker.images.targets import file
from cdi_worker.importer import survey
from cdi_worker.importer.routes import delivery, reading
from cdi_worker.importer.routes.attempt import Attempt
from cdi_worker.sources import base

if TYPE_CHECKING:
    from cdi_worker.formats import clone

log = logging.getLogger(__name__)


def unpack_archive(attempt: Attempt) -> None:
    """UNPACK: unpack a tar archive into a staging folder; move it into place when complete and verified."""
    if attempt.request.room.mount:
        # The volume may have no room for the old and the new content. Only now is the source known to be an
        # archive.
        staging.empty(attempt.request.room.mount)
        found = survey.with_room(attempt.survey, attempt.request)
        attempt = dataclasses.replace(attempt, survey=found)
    attempt.progress.phase("transfer", attempt.image.transferred)
    with staging.Staging(attempt.claim, replace=attempt.request.existing != "refuse") as staged:
        with reading.folder(attempt) as folder:
            if folder is None:
                with reading.plain(attempt, attempt.progress.advance) as packed:
                    _unpack(attempt, packed, staged.path, attempt.survey.available)
            else:
                _unpack_folder(attempt, folder, staged.path)
        attempt.image.verify()
        attempt.accept()
        attempt.progress.phase("sync", None)
        staged.commit()


def _unpack(
    attempt: Attempt, packed: base.Reader, directory: pathlib.Path, limit: int, *, has_disk: bool = False
) -> None:
    entries = archive.Archive(packed, limit_bytes=limit, thin=attempt.survey.thin, has_disk=has_disk)
    unpack.unpack(entries, directory, advance=lambda count: _unpacked(attempt, count))


def _unpacked(attempt: Attempt, count: int) -> None:
    """Count bytes of an archive's files. Raises ``TargetLost`` if another run unpacks here now."""
    attempt.claim.guard()
    attempt.counts.size += count


def _unpack_folder(attempt: Attempt, folder: clone.FolderDecoder, directory: pathlib.Path) -> None:
    """Write the disk of a cloned file system, then unpack the archive of its other files."""
    limit = attempt.survey.available
    if folder.disk.size:
        limit -= _write_disk(attempt, folder, directory / file.DISK)
    if rest := folder.archive():
        with contextlib.closing(ahead.AheadReader(rest, attempt.scope)) as packed:
            _unpack(attempt, packed, directory, limit, has_disk=bool(folder.disk.size))


def _write_disk(attempt: Attempt, folder: clone.FolderDecoder, path: pathlib.Path) -> int:
    """Write the disk of a cloned file system to a new file; return the bytes that it occupies."""
    disk = folder.disk
    log.info("disk size=%d preallocated=%s", disk.size, disk.preallocated)
    preallocate = attempt.request.preallocation or disk.preallocated
    # The claim of the folder is checked for each run.
    options = delivery.options(attempt)._replace(claim=None, preallocate=preallocate)
    place = delivery.to_target(attempt, None)._replace(
        path=str(path), options=options, phase="", shortest_zero=directio.UNIT
    )
    runs = _counted(attempt, folder.runs())
    with delivery.delivered(attempt, lambda attempt: _as_runs(attempt, runs, disk.size), place) as (out, _):
        out.commit()
    with errors.on_target(path, "change the mode or time"):
        path.chmod(disk.mode)
        os.utime(path, (disk.mtime, disk.mtime))
        return path.stat().st_blocks * 512


def _as_runs(attempt: Attempt, runs: Iterator[disks.Run], size: int) -> disks.Disk:
    return raw.RunsDisk(lambda _advance: contextlib.nullcontext(runs), attempt.scope, size=size)


def _counted(attempt: Attempt, runs: Iterator[int | memoryview]) -> Iterator[disks.Run]:
    for run in runs:
        _unpacked(attempt, run if isinstance(run, int) else len(run))
        yield run


def extract_disk(attempt: Attempt) -> None:
    """EXTRACT: write the disk in a file system's clone to a device. Other entries are checked and skipped."""
    attempt.progress.phase("transfer", attempt.image.transferred)
    with contextlib.ExitStack() as stack:
        with reading.folder(attempt) as folder:
            if folder is None:
                with reading.plain(attempt, attempt.progress.advance) as packed:
                    found = _extract(attempt, packed, stack)
            else:
                found = _extract_from_folder(attempt, folder, stack)
        if found is None:
            raise errors.Unsupported(reason=f"the cloned file system contains no file named {file.DISK}")
        delivery.commit(attempt, *found)


def _extract(
    attempt: Attempt, packed: base.Reader, stack: contextlib.ExitStack
) -> tuple[targets.Target, int] | None:
    """Write the disk in an archive to the device; return the device and the size. None without a disk."""
    found: tuple[targets.Target, int] | None = None
    name = ""
    entries = archive.Archive(packed, limit_bytes=attempt.survey.available, thin=attempt.survey.thin)
    for entry in entries:
        path = "/".join(entry.path)
        if path == file.DISK != name:
            _check_disk(entry, name)
        if found is None and _is_disk(entry):
            log.info("disk entry=%r size=%d", path, entry.size)
            found, name = _copy(attempt, _runs(entries, entry), entry.size, stack), path
    return found


def _check_disk(entry: archive.Entry, earlier: str) -> None:
    """Refuse a hard link as the disk, and a disk that follows the file ``earlier`` that was taken for it."""
    if entry.kind == "hardlink":
        reason = f"is a hard link to {entry.link!r}, which a device cannot get; clone it to a file system"
        raise archive.refused("disk", entry.path, reason)
    if earlier:
        names = f"{earlier!r} and {file.DISK!r}"
        reason = f"{names} could both be the disk; rename the first, or clone it to a file system"
        raise errors.Refused(format="tar", rule="disk", reason=reason)


def _extract_from_folder(
    attempt: Attempt, folder: clone.FolderDecoder, stack: contextlib.ExitStack
) -> tuple[targets.Target, int] | None:
    """Do the same with our own clone stream. If the disk comes first, the archive after it is discarded."""
    found = _copy(attempt, folder.runs(), folder.disk.size, stack) if folder.disk.size else None
    if rest := folder.archive():
        if found is not None:
            reading.drain(rest, attempt.scope, max(attempt.survey.available, reading.SHORTEST_LIMIT))
        else:
            with contextlib.closing(ahead.AheadReader(rest, attempt.scope)) as packed:
                found = _extract(attempt, packed, stack)
    return found


def _copy(
    attempt: Attempt, runs: Iterator[disks.Run], size: int, stack: contextlib.ExitStack
) -> tuple[targets.Target, int]:
    """Write a disk of ``size`` bytes to the device, which ``stack`` closes; return both."""
    place = delivery.to_target(attempt, None)._replace(phase="")
    whole = units.whole_sectors(size)
    return stack.enter_context(
        delivery.delivered(attempt, lambda attempt: _as_runs(attempt, runs, whole), place)
    )


def _is_disk(entry: archive.Entry) -> bool:
    """Return whether an entry is the disk, and not the left-over of a killed import.

    The first whose name contains that of the disk is it (contract, Clone source).
    """
    path = "/".join(entry.path)
    return entry.kind == "file" and file.DISK in path and not file.is_reserved(path)


def _runs(entries: archive.Archive, entry: archive.Entry) -> Iterator[disks.Run]:
    """Yield the runs of the current entry, in order."""
    buffers, at = ahead.buffers(), 0
    for offset, length in entry.extents():
        if offset > at:
            yield offset - at
        at, end = offset, offset + length
        while at < end:
            buffer = next(buffers)[: end - at]
            count = entries.readinto(buffer)
            yield buffer[:count]
            at += count
    if entry.size > at:
        yield entry.size - at
