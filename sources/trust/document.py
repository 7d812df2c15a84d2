"""Small files beside a disk, read from any source that serves files: checksums, and their signatures."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import urllib.parse
from collections.abc import Iterator
from typing import Final

from cdi_worker import errors, sources
from cdi_worker.sources import base, kind, wire

#: Seconds for one file: a server that sends a byte now and then never stalls.
PATIENCE: Final = 60.0
#: The kinds of sources whose disks are files with names.
KINDS: Final = frozenset({"http", "s3", "gcs", "local"})


@dataclasses.dataclass(frozen=True, slots=True)
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
        with (
            _limit_time(cancel, self.name) as stop,
            base.open_image(self.kind.open(self.location, stop)) as image,
        ):
            facts = image.facts
            data = bytearray(facts.head)
            if facts.size is None or facts.size > len(facts.head):
                # A reader of ranges continues after the head; a stream begins with it.
                start = len(data) if image.source.ranges is not None else 0
                del data[start:]
                if facts.size is None or facts.size <= limit:
                    with contextlib.closing(image.source.stream(start)) as reader:
                        buffer = memoryview(bytearray(64 << 10))
                        while len(data) <= limit and (count := reader.readinto(buffer)):
                            data += buffer[:count]
            if len(data) > limit or (facts.size or 0) > limit:
                raise errors.SourceError(reason=f"{self.name}: is larger than {limit >> 20} MiB")
            image.verify()
            return bytes(data)


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
    """Return what servers are told apart by; the buckets of S3 and of Google are on one."""
    found = wire.origin(url)
    return (found[0], "", None) if found[0] in {"s3", "gs"} else found


@contextlib.contextmanager
def _limit_time(cancel: base.Cancel, name: str) -> Iterator[base.Cancel]:
    """Yield a cancel that is set after ``PATIENCE``. Raises ``errors.Unreachable`` then."""
    with cancel.child() as stop:
        timer = threading.Timer(PATIENCE, stop.set, ("timed out",))
        timer.daemon = True
        timer.start()
        try:
            yield stop
        except errors.Error as err:
            if stop.is_set() and not cancel.is_set():
                reason = f"not received within {PATIENCE:.0f} s"
                raise errors.Unreachable(url=name, reason=reason) from err
            raise
        finally:
            timer.cancel()
