"""Place what a disk shows of each file of a chain."""

from __future__ import annotations

from cdi_worker.formats.qcow2 import layers
from cdi_worker.images.engine import fetch
from cdi_worker.images.place import ranges
from cdi_worker.images.targets import journaled
from cdi_worker.importer import progress
from cdi_worker.importer.routes.job import Job
from cdi_worker.scratch import journal


def place(
    job: Job,
    fetcher: fetch.Fetcher,
    out: journaled.Flushable,
    noted: journal.Journal,
    counted: progress.Progress,
) -> None:
    """Place the disk, or what changed of it, and note how much comes from each file."""
    found = layers.Disk(job.content.chain, fetcher.read, is_base=not job.wanted.is_delta)
    ranges.from_ranges(found, fetcher, out, noted, counted, direct=job.wanted.direct)
    job.layers = tuple(zip((file.name for file in job.content.chain), found.shown, strict=True))
