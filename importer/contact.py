"""The contact to a source: its kind, its checksum file, and the source itself, open."""

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

    ``request``: with the checksum that its checksum file lists. ``details``, ``signatures``: of that file.
    """

    request: Request
    kind: sources.kind.Kind
    reads: cancelling.Reads
    details: Mapping[str, object]
    signatures: tuple[signature.Signature, ...]

    def source(self) -> base.Source:
        """Return the source, not open yet. It may consist of several files."""
        request, reads = self.request, self.reads
        first = self.kind.open(request.location, reads)
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
        if not request.demand.checksum_file:
            yield Contact(request, kind, reads, {}, ())
            return
        # Imported when used: few imports need it (start-up time).
        from cdi_worker.sources.trust import checksums

        reading = checksums.Reading(reads, request.connect_patience, progress.retry)
        listed = checksums.look_up(request.demand, kind, request.location, reading)
        request = dataclasses.replace(request, checksum=listed.checksum, demand=request.demand.rest)
        yield Contact(request, kind, reads, listed.details, listed.signatures)


@contextlib.contextmanager
def opened(
    source: base.Source,
    engine: image.Engine,
    request: Request,
    progress: Progress,
    cancel: cancelling.Cancel,
) -> Iterator[base.Source]:
    """Yield the source, opened and reached; close it after the block.

    Transient failures are retried for ``request.connect_patience`` seconds. Raises ``errors.Untrusted`` if
    its data does not have the demanded signatures, without reading it.
    """
    progress.phase("connect", None)
    try:
        _open(source, engine, request, cancel)
        yield source
    finally:
        source.close()


def _open(source: base.Source, engine: image.Engine, request: Request, cancel: cancelling.Cancel) -> None:
    try:
        with trust.opening(source, request.demand, request.source) as judging:
            opening = functools.partial(source.open, base.Opening(engine, judging))
            begin = functools.partial(
                retry.patiently, opening, request.connect_patience, cancel, engine.retried
            )
            try:
                begin()
            except errors.NoRanges as err:
                engine.do_without_ranges(err)
                begin()
    except errors.SourceError as err:
        if cancel.is_set():
            # Interrupting a read makes it fail like any other.
            raise errors.Cancelled from err
        if isinstance(err, errors.TransferFailed):
            about = {name: value for name, value in err.fields.items() if name != "offset"}
            raise errors.Unreachable(**about) from err
        raise


def images(source: base.Source, engine: image.Engine) -> tuple[base.Image, ...]:
    """Return the files of a source that is open, with nothing known of them but their heads."""
    return tuple(image.Image(file, engine) for file in source.files)


def fall_back(engine: image.Engine, failure: errors.NoRanges, progress: Progress) -> None:
    """Read in order from now on. Raises ``failure`` if ranges were not used."""
    engine.do_without_ranges(failure)
    log.warning("falling back to one ordered stream reason=%s", failure)
    progress.retry(failure)
