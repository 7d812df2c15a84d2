"""The contact to a source: what it must be, as its checksum file says, and the source itself, open."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator

from cdi_worker import errors, sources
from cdi_worker.images import image
from cdi_worker.images.engine import cancelling, retry
from cdi_worker.importer.progress import Progress
from cdi_worker.importer.request import Request
from cdi_worker.sources import base, trust
from cdi_worker.sources.trust import Demanded

log = logging.getLogger(__name__)


@contextlib.contextmanager
def begin(
    request: Request, progress: Progress, cancel: cancelling.Cancel | cancelling.Event | None
) -> Iterator[tuple[cancelling.Reads, Demanded]]:
    """Yield the reads of a run, and what its source must be, as a checksum file says, if there is one.

    Causes of errors in the block are masked, and a plug-in is blamed.
    """
    kind, demand = sources.find(request.source), request.demand
    with (
        errors.masked_causes(),
        cancelling.adapt(cancel) as stop,
        cancelling.Reads(stop) as reads,
        sources.blame_plugin(kind),
    ):
        demanded = Demanded(request.checksum, demand.signed_by or "")
        if demand.checksum_file:
            # Imported when used: few imports need it (start-up time).
            from cdi_worker.sources.trust import checksums

            reading = checksums.Reading(reads, request.connect_patience, progress.retry)
            demanded = checksums.look_up(demand, kind, request.location, reading)
        yield reads, demanded


def source(request: Request, demanded: Demanded, reads: cancelling.Reads) -> base.Source:
    """Return the source of a request, not open yet. It may consist of several files.

    Raises ``errors.Untrusted`` if signatures are demanded that it cannot verify.
    """
    kind = sources.find(request.source)
    location = kind.accept(request.location)
    first = kind.open(location, reads)
    trust.check(demanded, kind.name, location, first.name)
    if not request.layers and not (request.is_delta and request.location.of_files):
        return first
    # Imported when used: few imports are of several files (start-up time).
    from cdi_worker.sources import chained

    return chained.Files([first, *(kind.open(layer, reads) for layer in request.layers)])


@contextlib.contextmanager
def open_source(
    source: base.Source,
    request: Request,
    demanded: Demanded,
    progress: Progress,
    cancel: cancelling.Cancel,
    *,
    whole: bool = True,
) -> Iterator[base.Image]:
    """Open the source and yield its image; close it after the block. ``whole``: as in ``base.Opening``.

    Transient failures are retried for ``request.connect_patience`` seconds. Raises ``errors.Untrusted`` if
    its data does not have the demanded signatures, without reading it.
    """
    progress.phase("connect", None)
    engine = image.Engine(request.fetch, progress.retry)
    owner = f"{request.room.owner or os.uname().nodename} {os.path.realpath(request.target)}"
    opening = functools.partial(source.open, base.Opening(engine, demanded.signed_by, whole, owner))
    attempts = request.connect_patience, cancel, engine.retried
    with contextlib.closing(source):
        try:
            try:
                facts = retry.patiently(opening, *attempts)
            except errors.NoRanges as err:
                engine.do_without_ranges(err)
                facts = retry.patiently(opening, *attempts)
            trust.confirm(demanded, request.source, facts)
        except errors.SourceError as err:
            if cancel.is_set() and cancel.failure is not err:
                # Interrupting a read makes it fail like any other.
                raise cancel.error() from err
            if isinstance(err, errors.TransferFailed):
                about = {name: value for name, value in err.fields.items() if name != "offset"}
                raise errors.Unreachable(**about) from err
            raise
        yield image.Image(source, facts, engine)


def fall_back(engine: image.Engine, failure: errors.NoRanges, progress: Progress) -> None:
    """Read in order from now on. Raises ``failure`` if ranges were not used."""
    engine.do_without_ranges(failure)
    log.warning("falling back to one ordered stream reason=%s", failure)
    progress.retry(failure)
