"""The routes UNPACK and EXTRACT: tar archives."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from cdi_worker import errors, survey, units
from cdi_worker.formats.tar import archive
from cdi_worker.images import target
from cdi_worker.images.engine import ahead
from cdi_worker.images.folder import staging, unpack
from cdi_worker.images.target import copy, file
from cdi_worker.routes.job import Job
from cdi_worker.sources import base

log = logging.getLogger(__name__)

#: Part of the name of the disk's entry; the first match is the disk (contract, Clone source).
DISK = "disk.img"


def unpack_archive(job: Job) -> None:
    """UNPACK: unpack a tar archive into a staging folder; move it into place when complete and verified."""
    if job.wanted.volume:
        # There may be no room for the old and the new content. Not done earlier: only now the source is known
        # to be an archive.
        staging.empty(job.wanted.volume)
        job.limit = survey.room(job.wanted).available
    job.progress.phase("transfer", job.source.size)
    with staging.Staging(job.claim, replace=job.wanted.existing != "refuse") as staged:
        with job.plain() as packed:
            unpack.unpack(
                archive.Archive(packed, limit_bytes=job.limit, thin=job.thin),
                staged.path,
                advance=job.unpacked,
            )
        job.source.verify()
        job.accept()
        job.progress.phase("sync", None)
        staged.commit()


def extract_disk(job: Job) -> None:
    """EXTRACT: write the disk in a file system's clone to a device. Other entries are checked and skipped."""
    job.progress.phase("transfer", job.source.size)
    with contextlib.ExitStack() as stack:
        out: target.Target | None = None
        size = 0
        with job.plain() as packed:
            entries = archive.Archive(packed, limit_bytes=job.limit, thin=job.thin)
            for entry in entries:
                if out is None and _is_disk(entry):
                    log.info("disk entry=%r size=%d", "/".join(entry.path), entry.size)
                    out = stack.enter_context(job.open_target(units.whole_sectors(entry.size)))
                    runs = _runs(entries, entry)
                    size = copy.copy_runs(runs, out, limit=job.limit, scope=job.scope, thin=job.thin)
        if out is None:
            raise errors.Unsupported(reason=f"the cloned file system contains no file named {DISK}")
        job.commit(out, size)


def _is_disk(entry: archive.Entry) -> bool:
    """Return whether an entry is the disk, and not what a killed import has left of one."""
    path = "/".join(entry.path)
    return entry.kind == "file" and DISK in path and not file.is_reserved(path)


def _runs(entries: archive.Archive, entry: archive.Entry) -> Iterator[base.Run]:
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
