"""The routes UNPACK and EXTRACT: tar archives."""

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
from cdi_worker.images.engine import ahead
from cdi_worker.images.folder import staging, unpack
from cdi_worker.images.targets import copy, file
from cdi_worker.importer import survey
from cdi_worker.importer.routes.job import SHORTEST_LIMIT, Job
from cdi_worker.sources import base

if TYPE_CHECKING:
    from cdi_worker.formats import clone

log = logging.getLogger(__name__)


def unpack_archive(job: Job) -> None:
    """UNPACK: unpack a tar archive into a staging folder; move it into place when complete and verified."""
    if job.wanted.room.mount:
        # There may be no room for the old and the new content. Not done earlier: only now the source is known
        # to be an archive.
        staging.empty(job.wanted.room.mount)
        job.limit = survey.room(job.wanted).available
    job.progress.phase("transfer", job.source.transferred)
    with staging.Staging(job.claim, replace=job.wanted.existing != "refuse") as staged:
        with job.folder() as folder:
            if folder is None:
                with job.plain() as packed:
                    _unpack(job, packed, staged.path)
            else:
                _unpack_folder(job, folder, staged.path)
        job.source.verify()
        job.accept()
        job.progress.phase("sync", None)
        staged.commit()


def _unpack(job: Job, packed: base.Reader, directory: pathlib.Path, *, has_disk: bool = False) -> None:
    entries = archive.Archive(packed, limit_bytes=job.limit, thin=job.thin, has_disk=has_disk)
    unpack.unpack(entries, directory, advance=job.unpacked)


def _unpack_folder(job: Job, folder: clone.Folder, directory: pathlib.Path) -> None:
    """Write the disk of a cloned file system, then unpack the archive of its other files."""
    if folder.disk.size:
        job.limit -= _write_disk(job, folder, directory / file.DISK)
    if rest := folder.archive():
        with contextlib.closing(ahead.Reader(rest, job.scope)) as packed:
            _unpack(job, packed, directory, has_disk=bool(folder.disk.size))


def _write_disk(job: Job, folder: clone.Folder, path: pathlib.Path) -> int:
    """Write the disk of a cloned file system to a new file; return the bytes that it occupies."""
    disk = folder.disk
    log.info("disk size=%d preallocated=%s", disk.size, disk.preallocated)
    preallocate = job.wanted.preallocation or disk.preallocated
    # The claim of the folder is checked for each run.
    options = dataclasses.replace(job.options, claim=None, preallocate=preallocate)
    with targets.open(path, disk.size, options) as out:
        copy.copy_runs(
            _counted(job, folder.runs()),
            out,
            limit=job.limit,
            scope=job.scope,
            thin=job.thin,
            shortest_zero=directio.UNIT,
        )
        out.commit()
    try:
        path.chmod(disk.mode)
        os.utime(path, (disk.mtime, disk.mtime))
        return path.stat().st_blocks * 512
    except OSError as err:
        raise errors.target_error(path, err, "change the mode or time") from err


def _counted(job: Job, runs: Iterator[int | memoryview]) -> Iterator[int | memoryview]:
    for run in runs:
        job.unpacked(run if isinstance(run, int) else len(run))
        yield run


def extract_disk(job: Job) -> None:
    """EXTRACT: write the disk in a file system's clone to a device. Other entries are checked and skipped."""
    job.progress.phase("transfer", job.source.transferred)
    with contextlib.ExitStack() as stack:
        with job.folder() as folder:
            if folder is None:
                with job.plain() as packed:
                    found = _extract(job, packed, stack)
            else:
                found = _extract_from_folder(job, folder, stack)
        if found is None:
            raise errors.Unsupported(reason=f"the cloned file system contains no file named {file.DISK}")
        job.commit(*found)


def _extract(job: Job, packed: base.Reader, stack: contextlib.ExitStack) -> tuple[targets.Target, int] | None:
    """Write the disk in an archive to the device; return the device and the size. None without a disk."""
    found: tuple[targets.Target, int] | None = None
    name = ""
    entries = archive.Archive(packed, limit_bytes=job.limit, thin=job.thin)
    for entry in entries:
        path = "/".join(entry.path)
        if path == file.DISK != name:
            _check_disk(entry, name)
        if found is None and _is_disk(entry):
            log.info("disk entry=%r size=%d", path, entry.size)
            found, name = _copy(job, _runs(entries, entry), entry.size, stack), path
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
    job: Job, folder: clone.Folder, stack: contextlib.ExitStack
) -> tuple[targets.Target, int] | None:
    """Do the same with our own clone stream. If the disk comes first, the archive after it is discarded."""
    found = _copy(job, folder.runs(), folder.disk.size, stack) if folder.disk.size else None
    if rest := folder.archive():
        if found is not None:
            copy.drain(rest, job.scope, max(job.limit, SHORTEST_LIMIT))
        else:
            with contextlib.closing(ahead.Reader(rest, job.scope)) as packed:
                found = _extract(job, packed, stack)
    return found


def _copy(
    job: Job, runs: Iterator[int | memoryview], size: int, stack: contextlib.ExitStack
) -> tuple[targets.Target, int]:
    """Write a disk of ``size`` bytes to the device, which ``stack`` closes; return both."""
    out = stack.enter_context(job.open_target(units.whole_sectors(size)))
    return out, copy.copy_runs(runs, out, limit=job.limit, scope=job.scope, thin=job.thin)


def _is_disk(entry: archive.Entry) -> bool:
    """Return whether an entry is the disk, and not what a killed import has left of one.

    The first whose name contains that of the disk is it (contract, Clone source).
    """
    path = "/".join(entry.path)
    return entry.kind == "file" and file.DISK in path and not file.is_reserved(path)


def _runs(entries: archive.Archive, entry: archive.Entry) -> Iterator[int | memoryview]:
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
