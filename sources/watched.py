"""Digests of disks, for callers that watch whether a disk has changed."""

from __future__ import annotations

from cdi_worker import errors
from cdi_worker.images.engine import retry
from cdi_worker.sources import base, kind, trust
from cdi_worker.sources.trust import checksums


def digest(of: kind.Kind, location: base.Location, sums: str, patience: float, cancel: base.Cancel) -> str:
    """Return ``KIND:VALUE`` without blanks; it changes whenever the bytes change.

    ``sums``: URL or path of a file with checksums, whose line for the disk is the digest; empty: ask the
    source, or raise ``errors.SourceError``. ``patience``: seconds to retry transient failures.
    """
    faults = tuple(location.faults())
    if faults:
        raise errors.RequestError(*faults)
    if sums:
        if not of.accept(location).file_name:
            what = "the disk has no file name to look up in the checksum file"
            raise errors.RequestError(f"source {of.name!r}: {what}")
        reading = checksums.Reading(cancel, patience)
        found = checksums.look_up(trust.Demand(checksum_file=sums), of, location, reading).checksum or ""
        # The strongest one changes whenever the bytes do.
        return found.partition(",")[0]
    if not of.digests:
        reason = f"source {of.name!r} states nothing that tells whether a disk has changed"
        raise errors.SourceError(reason=reason, remedy=base.CHECKSUM_FILE)
    return retry.patiently(lambda: of.open(location, cancel).digest(), patience, cancel)
