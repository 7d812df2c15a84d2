"""The way to standard output of a disk whose format is not in its order: through a file in scratch."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable

from cdi_worker import errors
from cdi_worker.images import targets
from cdi_worker.images.targets import copy
from cdi_worker.importer.routes.job import Job

#: The file in scratch. One run at a time uses it; after a kill, the next run resumes it or replaces it.
NAME = "cdi-worker-output.img"
_PIECE = 1 << 20


def relay(job: Job, route: Callable[[Job], None]) -> None:
    """Complete and verify the disk in scratch by ``route``, then write it to the target in order."""
    path = f"{job.wanted.scratch}/{NAME}"
    with targets.take(path, targets.Terms(job.wanted.wait, job.scope)) as held:
        wanted = dataclasses.replace(job.wanted, target=path, existing="remove", preallocation=False)
        planned = dataclasses.replace(job.plan, compared=False)
        inner = dataclasses.replace(job, wanted=wanted, claim=held, plan=planned, group=None)
        with inner.attempt():
            # A route may end its reads by its scope.
            route(inner)
        job.read, job.size, job.resumed = inner.read, inner.size, inner.resumed
        job.refetched = inner.refetched
        try:
            _write(job, path)
        finally:
            held.check()
            pathlib.Path(path).unlink()


def _write(job: Job, path: str) -> None:
    job.progress.phase("output", job.size)
    offset = 0
    with open(path, "rb", buffering=0) as stream, job.open_target(job.size) as out:
        while True:
            try:
                piece = stream.read(_PIECE)
            except OSError as err:
                raise errors.target_error(path, err, "read scratch") from err
            if not piece:
                break
            copy.write(out, offset, memoryview(piece))
            offset += len(piece)
            job.progress.advance(len(piece))
        job.settle(out)
        job.publish(out)
