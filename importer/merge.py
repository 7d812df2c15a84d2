"""MERGE: what has changed since the previous checkpoint, put onto the disk of an earlier stage."""

from __future__ import annotations

from formats import detect, safety
from images import process, qemu_img, target
from importer import errors, route_convert
from importer.job import Job


def merge(job: Job) -> None:
    """MERGE: a qcow2 delta into scratch, checked there, committed onto the disk that is there.

    The disk is not one until the commit has ended. One that was interrupted, however, is done again
    from its start: it writes the same bytes to the same places, whatever it had written before.
    """
    check_disk(job)
    with route_convert.scratch(job) as kept:
        path = kept.path("delta")
        size = route_convert.download(job, path)
        # The transfer ends here: the disk at the other end is not held while this one is written.
        job.source.verify()
        _check_delta(job, path, size)
        _commit(job, path)


def check_disk(job: Job) -> None:
    """Refuse what cannot be changed, before anything is done with it."""
    path, size = job.wanted.target, job.plan.virtual_size or 0
    present = target.facts(path).size
    if not present:
        raise errors.TargetError(
            path=path, reason="no disk of an earlier stage, which the delta would change"
        )
    if size > present:
        # Where a disk is grown is the first stage.
        raise errors.TooLarge(virtual_size=size, available=present)


def _check_delta(job: Job, path: str, size: int) -> None:
    previous = job.wanted.location.previous
    with open(path, "rb") as stream:
        read = route_convert.reader(stream.fileno())
        found = safety.check("qcow2", read(0, detect.HEAD), read=read, size=size, allow_backing=previous)
        safety.check_length("qcow2", read, size)
    before, now = (previous, job.plan.virtual_size), (found.backing, found.virtual_size)
    if found.backing is None or found.virtual_size != job.plan.virtual_size:
        raise errors.SourceChanged(url=job.source.name, what="delta", before=before, now=now)


def _commit(job: Job, path: str) -> None:
    size = job.plan.virtual_size or 0
    job.progress.phase("merge", size)
    watch = process.Watch("qemu-img", job.wanted.fetch.no_progress)
    follow = qemu_img.Follow(job.progress.advance, job.cancel, watch)
    direct = target.facts(job.wanted.target).direct
    with target.open(job.wanted.target, None, target.Options(mode="update")) as out:
        qemu_img.commit(path, out.written_path, size, direct=direct, follow=follow)
        job.commit(out, out.size or size)
