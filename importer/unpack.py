"""The routes UNPACK and EXTRACT: tar archives, and the clones of file systems."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pathlib
from typing import TYPE_CHECKING

from cdi_worker import errors
from cdi_worker.formats.tar import archive, sparse
from cdi_worker.images import directio, targets
from cdi_worker.images.disks import base as disks
from cdi_worker.images.disks import raw
from cdi_worker.images.engine import ahead
from cdi_worker.images.folder import staging, unpack
from cdi_worker.images.sinks import delivery
from cdi_worker.images.targets import file
from cdi_worker.importer import plan as plans
from cdi_worker.importer import reading, survey
from cdi_worker.importer.attempt import Attempt
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

    def advance(count: int) -> None:
        # Another run may unpack here now.
        attempt.claim.guard()
        attempt.counts.size += count

    unpack.unpack(entries, directory, advance=advance)


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
    disk, request, room = folder.disk, attempt.request, attempt.survey
    log.info("disk size=%d preallocated=%s", disk.size, disk.preallocated)
    # The claim of the folder is checked for each run.
    options = targets.TargetOptions(
        preallocate=request.preallocation or disk.preallocated,
        direct=request.direct,
        cancel=attempt.scope,
        permissions=request.permissions,
    )
    with targets.open(str(path), disk.size, options) as out:
        sink = delivery.DeliverySink(out, room.available, thin=room.thin, shortest_zero=directio.UNIT)
        meter = disks.DeliveryMeter(moved=lambda _: attempt.claim.guard())
        attempt.counts.size += raw.copy(folder.runs(), sink, meter, attempt.scope)
        out.commit()
    with errors.on_target(path, "change the mode or time"):
        path.chmod(disk.mode)
        os.utime(path, (disk.mtime, disk.mtime))
        return path.stat().st_blocks * 512


class ExtractedDisk(disks.Disk):
    """EXTRACT: the disk in the clone of a file system. Other entries are checked and skipped."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt

    def deliver(self, sink: disks.Sink, missing: disks.Missing, meter: disks.DeliveryMeter) -> int:
        attempt, size = self._attempt, None
        with reading.folder(attempt) as folder:
            if folder is None:
                with reading.plain(attempt, meter.advance) as packed:
                    size = self._extract(packed, sink, meter)
            else:
                # If the disk comes first, the archive after it is discarded.
                if folder.disk.size:
                    plans.check_room(folder.disk.size, attempt.request, attempt.survey)
                    size = raw.copy(folder.runs(), sink, meter, attempt.scope)
                if (rest := folder.archive()) and size is not None:
                    reading.drain(attempt, rest)
                elif rest:
                    with contextlib.closing(ahead.AheadReader(rest, attempt.scope)) as packed:
                        size = self._extract(packed, sink, meter)
        if size is None:
            raise errors.Unsupported(reason=f"the cloned file system contains no file named {file.DISK}")
        return size

    def _extract(self, packed: base.Reader, sink: disks.Sink, meter: disks.DeliveryMeter) -> int | None:
        """Deliver the disk in an archive; return its size. None without a disk.

        The first file whose name contains that of the disk is it (contract, Clone source), if it is not the
        left-over of a killed import.
        """
        survey, size, earlier = self._attempt.survey, None, ""
        entries = archive.Archive(packed, limit_bytes=survey.available, thin=survey.thin)
        for entry in entries:
            path = "/".join(entry.path)
            if path == file.DISK != earlier and entry.kind == "hardlink":
                reason = (
                    f"is a hard link to {entry.link!r}, which a device cannot get; clone it to a file system"
                )
                raise archive.refused("disk", entry.path, reason)
            if path == file.DISK != earlier and earlier:
                names = f"{earlier!r} and {file.DISK!r}"
                reason = f"{names} could both be the disk; rename the first, or clone it to a file system"
                raise errors.Refused(format="tar", rule="disk", reason=reason)
            is_disk = entry.kind == "file" and file.DISK in path and not file.is_reserved(path)
            if size is None and is_disk:
                log.info("disk entry=%r size=%d", path, entry.size)
                runs = sparse.runs(entries, entry.map, entry.size, ahead.buffers())
                size, earlier = raw.copy(runs, sink, meter, self._attempt.scope), path
        return size
