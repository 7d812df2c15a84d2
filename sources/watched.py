"""Digests of disks, for callers that watch whether a disk has changed."""

from __future__ import annotations

import dataclasses
import posixpath
import urllib.parse
from pathlib import Path

from cdi_worker import errors, lazy
from cdi_worker.formats import checksum_file
from cdi_worker.sources import base, kind, wire


def digest(of: kind.Kind, location: base.Location, sums: str, cancel: base.Cancel) -> str:
    """Return ``KIND:VALUE`` without blanks, which is another one if the bytes are others.

    ``sums``: URL or path of a file with checksums, whose line for the disk is the digest; empty: the source
    itself is asked. Raises ``errors.RequestError`` for a kind of source that knows none.
    """
    faults = tuple(location.faults())
    if faults:
        raise errors.RequestError(*faults)
    if sums:
        return _listed(location, sums, cancel)
    if not of.digest:
        raise errors.RequestError(f"source {of.name!r} states nothing that tells whether a disk has changed")
    found: str = lazy.load(of.digest)(of.accept(location), cancel)
    return found


def _listed(location: base.Location, sums: str, cancel: base.Cancel) -> str:
    """Return the checksum of the disk in a file with checksums."""
    try:
        path = urllib.parse.urlsplit(location.endpoint).path
    except ValueError as err:
        raise errors.RequestError(f"{wire.safe_url(location.endpoint)}: malformed URL") from err
    name = posixpath.basename(urllib.parse.unquote(path))
    data, shown = _file(location, sums, cancel)
    try:
        return checksum_file.find(data, name)
    except errors.SourceError as err:
        raise errors.SourceError(reason=f"{shown}: {err}") from err


def _file(location: base.Location, sums: str, cancel: base.Cancel) -> tuple[bytes, str]:
    """Return the content of a file with checksums, and its name for messages."""
    limit = checksum_file.LARGEST
    if "://" not in sums:
        try:
            with Path(sums).open("rb") as file:
                data, shown = file.read(limit + 1), sums
        except OSError as err:
            raise errors.RequestError(f"{sums}: {errors.words(err)}") from err
    else:
        # Imported when used (start-up time).
        from cdi_worker.sources.web import documents, pinned

        access = location.access
        pinned.checked(sums)
        if wire.origin(sums) != wire.origin(location.endpoint):
            access = dataclasses.replace(access, user="", password="", session_token="", headers=())
        data, shown = documents.read(sums, access, limit, cancel), wire.safe_url(sums)
    if len(data) > limit:
        raise errors.SourceError(
            reason=f"{shown}: is larger than {limit >> 20} MiB, not a file with checksums"
        )
    return data, shown
