"""ovirt-imageio's client library, with responses that end. Importing this loads the library."""

from __future__ import annotations

import functools
import urllib.parse
from collections.abc import Iterator
from typing import Any, ClassVar, Final

import ovirt_imageio.client
from ovirt_imageio._internal.backends import http

from cdi_worker.sources import responses, sockets

#: Bytes of the longest list of extents. An extent has 72 bytes in JSON and 330 once parsed: 580,000 extents
#: in 190 MiB, below the 256 MiB that a worker may have. Every other MiB of a disk of 1 TiB is as many; lists
#: of real disks have some thousand.
LONGEST: Final = 40 << 20


class _Response(responses.Bounded):
    most = LONGEST


class _Backend(http.Backend):  # type: ignore[misc]  # without types
    """The library's connection. It reads lists, options and errors whole, whatever their length."""

    #: Bytes per second. The library clones the class.
    slowest: ClassVar[float]

    def extents(self, context: str = "zero") -> Iterator[Any]:
        """Yield the extents. The library keeps them, and copies them for each connection."""
        yield from self._get_extents(context) if self._can_extents else super().extents(context)

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

    def __init__(
        self, url: str, *, cafile: str | None, secure: bool, buffer_size: int, slowest: float
    ) -> None:
        backend = type("_Backend", (_Backend,), {"slowest": slowest})
        self._backend = backend(urllib.parse.urlparse(url), cafile=cafile, secure=secure)
        self._buf = bytearray(buffer_size)
