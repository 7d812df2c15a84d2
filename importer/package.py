"""Find the disk in a package that holds disks. The bytes show that a source is one, not its name."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator

from cdi_worker import engine, errors, request
from cdi_worker.formats import checksum, detect
from cdi_worker.images.engine import cancelling
from cdi_worker.sources import base

log = logging.getLogger(__name__)


@contextlib.contextmanager
def unpacked(
    source: base.Source, reading: engine.Engine, wanted: request.Request, cancel: cancelling.Cancel
) -> Iterator[tuple[base.Source, request.Request]]:
    """Yield the disk in ``source``, which is open, and the request for it; any other source as it is.

    A checksum in the request is of the whole package, whose source verifies it.
    """
    if not _is_ova(source, wanted):
        if wanted.disk:
            raise errors.RequestError(f"{source.name}: not an OVA: it has no disk {wanted.disk!r} to choose")
        yield source, wanted
        return
    # Imported when used: few sources are packages (start-up time).
    from cdi_worker.sources import ova

    expected = None if wanted.checksum is None else checksum.parse(wanted.checksum)
    found = ova.OvaSource(source, wanted.disk, expected, cancel)
    with contextlib.closing(found):
        try:
            found.__enter__()
        except errors.NoRanges as err:
            log.warning("falling back to one ordered stream reason=%s", err)
            reading.do_without_ranges(err)
            found.__enter__()
        yield found, dataclasses.replace(wanted, checksum=None)


def _is_ova(source: base.Source, wanted: request.Request) -> bool:
    if source.blank or source.format is not None or wanted.is_archive:
        return False
    if detect.detect(source.head) != "tar":
        return False
    from cdi_worker.formats.ova import package

    return package.is_ova(source.head)
