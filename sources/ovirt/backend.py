"""The backend of ovirt-imageio's client, with responses that end and are those of the requested range.

Importing this loads the library.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import re
import urllib.parse
from collections.abc import Iterator
from typing import Any, ClassVar, Final

from ovirt_imageio._internal.backends import http

from cdi_worker import errors, masking
from cdi_worker.sources import base, responses, sockets, wire

#: Bytes of the longest list of extents. An extent has 72 bytes in JSON and 330 once parsed: 580,000 extents
#: in 190 MiB, below the 256 MiB that a worker may have. Every other MiB of a disk of 1 TiB is as many; lists
#: of real disks have some thousand.
LONGEST: Final = 40 << 20
_CONTENT_RANGE: Final = re.compile(r"bytes (\d{1,19})-\d{1,19}/(\d{1,19}|\*)")


class _Response(responses.Bounded):
    most = LONGEST


class Backend(http.Backend):  # type: ignore[misc]  # without types
    """The library's connection. It reads lists, options and errors whole, whatever their length."""

    #: ``disk``: in messages. ``clone`` makes another object of the same class.
    access: ClassVar[base.Access]
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
            received = masking.quoted(stated)
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

    def whole_size(self) -> int:
        """Return the size of the disk: the length of a response that is broken off."""
        size: int = self._emulate_head()
        return size

    def abort(self) -> None:
        """Shut the socket down, which ends a read of another thread: the library has no call for that."""
        # A connection that was closed meanwhile has no socket, or raises ValueError.
        with contextlib.suppress(AttributeError, TypeError, ValueError):
            sockets.shut(self._con.sock)

    def _create_ssl_context(self) -> Any:
        return wire.tls_context(self.access)

    def _create_tcp_connection(self) -> Any:
        return self._bounded(super()._create_tcp_connection())

    def _create_unix_connection(self, unix_socket: str) -> Any:
        return self._bounded(super()._create_unix_connection(unix_socket))

    def _bounded(self, connection: Any) -> Any:
        connection.response_class = functools.partial(_Response, min_speed=self.access.min_speed)
        return connection


def connect(url: str, access: base.Access, disk: str) -> Any:
    """Connect to the ticket at ``url``."""
    return type("Backend", (Backend,), {"access": access, "disk": disk})(urllib.parse.urlparse(url))
