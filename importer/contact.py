"""The contact to a source: its kind, the files that say what it must be, and the source itself, open."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from cdi_worker import errors, sources
from cdi_worker.images import image
from cdi_worker.images.engine import cancelling, retry
from cdi_worker.importer.progress import Progress
from cdi_worker.importer.request import Request
from cdi_worker.sources import base, trust

if TYPE_CHECKING:
    from cdi_worker.formats import signature

log = logging.getLogger(__name__)


class Contact(NamedTuple):
    """What an import begins with.

    ``request``: with the checksum that its checksum file lists, and its maps. ``details``, ``signatures``: of
    these files.
    """

    request: Request
    kind: sources.kind.Kind
    reads: cancelling.Reads
    details: Mapping[str, object]
    signatures: tuple[signature.Signature, ...]

    def source(self) -> base.Source:
        """Return the source, not open yet. It may consist of several files.

        Raises ``errors.Untrusted`` if signatures are demanded that it cannot verify.
        """
        request, reads = self.request, self.reads
        location = self.kind.accept(request.location)
        first = self.kind.open(location, reads)
        trust.check(request.demand, self.kind.name, location, first.name)
        if not request.layers and not (request.is_delta and request.location.of_files):
            return first
        # Imported when used: few imports are of several files (start-up time).
        from cdi_worker.sources import chained

        return chained.Files([first, *(self.kind.open(layer, reads) for layer in request.layers)])


@contextlib.contextmanager
def begun(
    request: Request, progress: Progress, cancel: cancelling.Cancel | cancelling.Event | None
) -> Iterator[Contact]:
    """Yield the contact for a request. Causes of errors in the block are masked, and a plug-in is blamed."""
    kind = sources.find(request.source)
    with (
        errors.masked_causes(),
        cancelling.adapted(cancel) as stop,
        cancelling.Reads(stop) as reads,
        sources.foreign(kind),
    ):
        start = Contact(request, kind, reads, {}, ())
        demand = request.demand
        yield _informed(start, progress) if demand.checksum_file or demand.map or request.have else start


def _informed(start: Contact, progress: Progress) -> Contact:
    """Return the contact with what files say: the checksum file, the map, that of the old disk."""
    # Imported when used: few imports need it (start-up time).
    from cdi_worker.sources.trust import checksums, maps

    request, kind, reads, details, signatures = start
    demand, location = request.demand, request.location
    reading = checksums.Reading(reads, request.connect_patience, progress.retry)
    if demand.checksum_file:
        listed = checksums.look_up(demand, kind, location, reading)
        details, signatures = listed.details, listed.signatures
        request = dataclasses.replace(request, checksum=listed.checksum)
    if demand.map:
        blocks = maps.read(demand.map, demand, kind, location, reading)
        details, signatures = {**details, **blocks.details()}, (*signatures, *blocks.signatures)
        request = dataclasses.replace(request, blocks=blocks)
    if demand.checksum_file or demand.map:
        request = dataclasses.replace(request, demand=demand.rest)
    if request.have:
        # It says what is here, which no signature can.
        had = maps.read(request.have, trust.NOTHING, kind, location, reading)
        request = dataclasses.replace(request, had=had)
    if signatures:
        details = {**details, "signatures": [dataclasses.asdict(each) for each in signatures]}
    return Contact(request, kind, reads, details, signatures)


@contextlib.contextmanager
def opened(
    source: base.Source,
    request: Request,
    progress: Progress,
    cancel: cancelling.Cancel,
    *,
    whole: bool = True,
) -> Iterator[base.Image]:
    """Yield the image of the source, opened and reached; close it after the block. ``whole``: as in Opening.

    Transient failures are retried for ``request.connect_patience`` seconds. Raises ``errors.Untrusted`` if
    its data does not have the demanded signatures, without reading it.
    """
    progress.phase("connect", None)
    try:
        yield _open(source, image.Engine(request.fetch, progress.retry), request, cancel, whole=whole)
    finally:
        source.close()


def _open(
    source: base.Source, engine: image.Engine, request: Request, cancel: cancelling.Cancel, *, whole: bool
) -> base.Image:
    def begin(judging: trust.Judging | None) -> base.Facts:
        opening = functools.partial(source.open, base.Opening(engine, judging, whole))
        attempts = request.connect_patience, cancel, engine.retried
        try:
            return retry.patiently(opening, *attempts)
        except errors.NoRanges as err:
            engine.do_without_ranges(err)
            return retry.patiently(opening, *attempts)

    try:
        return image.Image(source, trust.opened(begin, request.demand, request.source), engine)
    except errors.SourceError as err:
        if cancel.is_set() and cancel.failure is not err:
            # Interrupting a read makes it fail like any other.
            raise cancel.error() from err
        if isinstance(err, errors.TransferFailed):
            about = {name: value for name, value in err.fields.items() if name != "offset"}
            raise errors.Unreachable(**about) from err
        raise


def fall_back(engine: image.Engine, failure: errors.NoRanges, progress: Progress) -> None:
    """Read in order from now on. Raises ``failure`` if ranges were not used."""
    engine.do_without_ranges(failure)
    log.warning("falling back to one ordered stream reason=%s", failure)
    progress.retry(failure)
