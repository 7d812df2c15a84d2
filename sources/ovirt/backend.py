"""ovirt-imageio's client library, with responses that end and are those of the requested range.

Importing this loads the library.
"""

from __future__ import annotations

import functools
import operator
import re
import urllib.parse
from collections.abc import Iterator
from typing import Any, ClassVar, Final

import ovirt_imageio.client
from ovirt_imageio._internal.backends import http

from cdi_worker import errors
from cdi_worker.sources import responses, sockets, wire

#: Bytes of the longest list of extents. An extent has 72 bytes in JSON and 330 once parsed: 580,000 extents
#: in 190 MiB, below the 256 MiB that a worker may have. Every other MiB of a disk of 1 TiB is as many; lists
#: of real disks have some thousand.
LONGEST: Final = 40 << 20
_CONTENT_RANGE: Final = re.compile(r"bytes (\d{1,19})-\d{1,19}/(\d{1,19}|\*)")


class _Response(responses.Bounded):
    most = LONGEST


class _Backend(http.Backend):  # type: ignore[misc]  # without types
    """The library's connection. It reads lists, options and errors whole, whatever their length."""

    #: Bytes per second, and the disk in messages. The library clones the class.
    slowest: ClassVar[float]
    disk: ClassVar[str]

    def extents(self, context: str = "zero") -> Iterator[Any]:
        """Yield the extents. The library keeps them, and copies them for each connection."""
        yield from self._get_extents(context) if self._can_extents else super().extents(context)

    def _options(self) -> Any:
        """Return the options of the server. Raises ``TypeError`` unless the limit of readers is a number."""
        found = super()._options()
        operator.index(found.get("max_readers", 1))
        return found

    def _get(self, length: int) -> Any:
        """Request ``length`` bytes. The library compares only the length of the response."""
        response = super()._get(length)
        if response.length != length:
            raise RuntimeError(f"a range of {length} bytes is sent in chunks")
        if response.getheader("Content-Encoding", "identity").lower() != "identity":
            raise errors.Unsupported(reason=f"{self.disk}: a range is sent with a content encoding")
        stated = response.getheader("Content-Range")
        found = _CONTENT_RANGE.fullmatch(stated or "")
        # Old daemons leave it out behind the middle of a disk, or state a wrong end (webob's content_range).
        if stated is not None and (found is None or int(found[1]) != self._position):
            received = wire.printable(stated[:80])
            reason = f"requested byte {self._position}, received {received}"
            raise errors.WrongRanges(url=self.disk, reason=reason)
        return response

    def read_into(self, offset: int, into: memoryview) -> Iterator[int]:
        """Request a range; yield the bytes of each read. The library's reads lose those before a reset."""
        self.seek(offset)
        response = self._get(len(into))
        count = 0
        while count < len(into) and (received := response.receive(into[count:])):
            count += received
            yield received
        if response.length:
            raise http.http_client.IncompleteRead(b"", response.length)
        response.reset()
        response.close()

    def _create_ssl_context(self) -> Any:
        return sockets.separated(super()._create_ssl_context())

    def _create_tcp_connection(self) -> Any:
        return self._bounded(super()._create_tcp_connection())

    def _create_unix_connection(self, unix_socket: str) -> Any:
        return self._bounded(super()._create_unix_connection(unix_socket))

    def _bounded(self, connection: Any) -> Any:
        connection.response_class = functools.partial(_Response, slowest=self.slowest)
        return connection


class Client(ovirt_imageio.client.ImageioClient):  # type: ignore[misc]  # without types
    """The library's client, with ``_Backend``, which its constructor cannot be given."""

    def __init__(self, url: str, *, disk: str, cafile: str | None, secure: bool, slowest: float) -> None:
        backend = type("_Backend", (_Backend,), {"slowest": slowest, "disk": disk})
        self._backend = backend(urllib.parse.urlparse(url), cafile=cafile, secure=secure)

    def read_into(self, offset: int, into: memoryview) -> Iterator[int]:
        """Read a range; yield the bytes of each read, which follow one another from the start of ``into``."""
        received: Iterator[int] = self._backend.read_into(offset, into)
        return received
