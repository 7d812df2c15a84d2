"""Small files beside a disk, read from any source that serves files: checksums, and their signatures."""

from __future__ import annotations

import contextlib
import dataclasses
import urllib.parse
from typing import Final

from cdi_worker import errors, sources
from cdi_worker.formats import readers
from cdi_worker.images import image
from cdi_worker.images.engine import fetch
from cdi_worker.sources import base, kind, wire

#: The kinds of sources whose disks are files with names.
KINDS: Final = frozenset({"http", "s3", "gcs", "local"})


@dataclasses.dataclass(frozen=True)
class Place:
    """Where files are: a kind of source, and a location whose endpoint is one of them."""

    kind: kind.Kind
    location: base.Location

    @property
    def name(self) -> str:
        """The address without secrets, for messages."""
        return wire.safe_url(self.location.endpoint)

    def beside(self, ending: str) -> Place:
        """Return the place of the file whose name is longer by ``ending``."""
        endpoint = self.location.endpoint
        if self.kind.name != "local" and endpoint.startswith("http"):
            parts = urllib.parse.urlsplit(endpoint)
            endpoint = urllib.parse.urlunsplit(parts._replace(path=parts.path + ending, fragment=""))
        else:
            endpoint += ending
        return dataclasses.replace(self, location=dataclasses.replace(self.location, endpoint=endpoint))

    def read(self, limit: int, cancel: base.Cancel) -> bytes:
        """Return the file. Raises ``errors.SourceError``, also for one of more than ``limit`` bytes."""
        access = self.location.access
        # The limits of the disk's transfer: a server that sends a byte now and then cannot hold the import.
        engine = image.Engine(fetch.FetchOptions(no_progress=access.patience, min_speed=access.min_speed))
        with base.open_image(self.kind.open(self.location, cancel), base.Opening(engine)) as opened:
            data, size = b"", opened.facts.size
            if size is None or size <= limit:
                with cancel.child() as reads, contextlib.closing(opened.rest(reads, 0)) as reader:
                    into = memoryview(bytearray(limit + 1 if size is None else size))
                    data = bytes(into[: readers.fill(reader, into)])
            if (size or len(data)) > limit:
                raise errors.SourceError(reason=f"{self.name}: is larger than {limit >> 20} MiB")
            opened.verify()
            return data


def place(url: str, disk: kind.Kind, location: base.Location) -> Place:
    """Return the place of the file at ``url``, a URL or a path, that is about the disk at ``location``.

    On the disk's server, it is read as the disk is. Other servers get no credentials. Raises
    ``errors.RequestError``.
    """
    try:
        scheme = urllib.parse.urlsplit(url).scheme
        is_same = "://" in url and _server(url) == _server(location.endpoint)
    except ValueError as err:
        raise wire.malformed(url) from err
    if is_same:
        return Place(disk, dataclasses.replace(location, endpoint=url))
    found = sources.find_scheme(scheme if "://" in url or scheme == "file" else "")
    if found.name not in KINDS or url == "-":
        what = "a file about a disk has an http, https, s3, gs or file URL"
        raise errors.RequestError(f"{wire.safe_url(url)}: {what}")
    access = dataclasses.replace(location.access, user="", password="", session_token="", headers=())
    return Place(found, found.accept(base.Location(url, access)))


def _server(url: str) -> tuple[str, str, int | None]:
    """Return scheme, host and port of a server; all buckets of S3 are on one, and those of Google."""
    found = wire.origin(url)
    return (found[0], "", None) if found[0] in {"s3", "gs"} else found
