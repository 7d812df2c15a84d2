"""The route UNPACK: archives."""

from __future__ import annotations

from cdi_worker import survey
from cdi_worker.formats.tar import archive
from cdi_worker.images.folder import staging, unpack
from cdi_worker.routes.job import Job


def unpack_archive(job: Job) -> None:
    """UNPACK: a tar archive into a staging folder, moved into place when it is whole and verified."""
    if job.wanted.volume:
        # Not before it is known to be an archive. There may be no room for it and an earlier one.
        staging.empty(job.wanted.volume)
        job.limit = survey.room(job.wanted).available
    job.progress.phase("transfer", job.source.size)
    with staging.Staging(job.wanted.target) as staged:
        with job.plain() as packed:
            unpack.unpack(archive.Archive(packed, limit_bytes=job.limit), staged.path, advance=job.wrote)
        job.source.verify()
        job.progress.phase("sync", None)
        staged.commit()
