"""Digests of disks, for callers that watch whether a disk has changed."""

from __future__ import annotations

from cdi_worker import errors
from cdi_worker.formats import checksum_file
from cdi_worker.sources import base, kind
from cdi_worker.sources.trust import document


def digest(of: kind.Kind, location: base.Location, sums: str, cancel: base.Cancel) -> str:
    """Return ``KIND:VALUE`` without blanks; it changes whenever the bytes change.

    ``sums``: URL or path of a file with checksums, whose line for the disk is the digest; empty: ask the
    source. Raises ``errors.RequestError`` for a kind of source without digests.
    """
    faults = tuple(location.faults())
    if faults:
        raise errors.RequestError(*faults)
    if not sums and not of.digests:
        raise errors.RequestError(
            f"source {of.name!r} states nothing that tells whether a disk has changed; "
            "give a file with its checksum (--checksum-file)"
        )
    if not sums:
        return of.open(location, cancel).digest()
    disk = of.accept(location)
    if not disk.file_name:
        raise errors.RequestError(
            f"source {of.name!r}: the disk has no file name to look up in --checksum-file"
        )
    place = document.place(sums, of, disk)
    data = place.read(checksum_file.LARGEST, cancel)
    try:
        # The strongest one changes whenever the bytes do.
        return checksum_file.find(data, disk.file_name).partition(",")[0]
    except errors.SourceError as err:
        raise errors.SourceError(reason=f"{place.name}: {err}") from err
