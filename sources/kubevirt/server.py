"""Requests to KubeVirt's export server (virt-exportserver), with the token of the export."""

from __future__ import annotations

import logging
import re
import threading
import urllib.parse
from collections.abc import Mapping
from typing import ClassVar, Final

import requests
import requests.auth

from cdi_worker import errors, masking
from cdi_worker.sources import base, fields, smallfile
from cdi_worker.sources.kubevirt import locations
from cdi_worker.sources.web import http, pinned, session

log = logging.getLogger(__name__)

#: The form of the ranges that ``sources.web.http`` asks for.
_RANGE: Final = re.compile(r"bytes=(\d+)-(\d*)")


class Token:
    """The token of an export, which a file may renew. Thread-safe. ``value``: as it is sent, may be empty."""

    def __init__(self, location: locations.KubeVirt) -> None:
        self._path = location.token_file
        self._lock = threading.Lock()
        self.value = self._read() if self._path else session.on_the_wire(location.token)

    def renew(self, refused: str) -> bool:
        """Read the file again; return whether the token is another one than ``refused``."""
        with self._lock:
            if self._path and self.value == refused:
                self.value = self._read()
            return bool(self.value) and self.value != refused

    def _read(self) -> str:
        try:
            text = smallfile.read(self._path).decode()
        except UnicodeDecodeError as err:
            raise errors.RequestError(f"{self._path}: cannot read the token") from err
        text = fields.named(fields.token, text, self._path)
        if not text:
            raise errors.RequestError(f"{self._path}: is empty; expected the token of the export")
        masking.register(self, text)
        return session.on_the_wire(text)


class Resource(pinned.Resource):
    """A URL of the export server. ``connection``: shared with others, and left open."""

    reasons: ClassVar[Mapping[int, str]] = {
        401: "the export refuses the token; check it, and whether its Secret was replaced",
        404: "no such export or volume; check the URL, and whether the export or backup has expired",
    }

    def __init__(
        self,
        url: str,
        access: base.Access,
        token: Token,
        connection: requests.Session | None = None,
        *,
        cancel: base.Cancel,
    ) -> None:
        super().__init__(url, access, connection, cancel=cancel)
        self._token = token

    def authorization(self) -> requests.auth.AuthBase:
        return pinned.Header(locations.TOKEN, self._token.value)

    def renew(self, refused: requests.Response) -> bool:
        # The target of a redirect got no token.
        token = refused.request.headers.get(locations.TOKEN)
        return bool(token) and self._token.renew(str(token))


class Data(Resource):
    """The bytes of a disk in a backup, which are selected by the query: ``…/data?offset=O&length=L``.

    Translates between that and HTTP's ranges, so that everything above reads it like a file on a web server.
    The response has status 200, no identity and, as the server sends chunks, no length; offset 0 and length 0
    are the defaults, length 0 is the rest of the disk (``backupDataHandler`` of virt-exportserver).
    ``size``: of the disk, in bytes; set before the first request.
    """

    size = 0

    def send(self, method: str, url: str, headers: dict[str, str]) -> requests.Response:
        wanted = _RANGE.fullmatch(headers.get("Range", ""))
        if wanted is None:
            return super().send(method, with_query(url, offset=0, length=0), headers)
        headers = {name: value for name, value in headers.items() if name != "Range"}
        offset = int(wanted[1])
        end = min(int(wanted[2]) + 1 if wanted[2] else self.size, self.size)
        response = super().send(method, with_query(url, offset=offset, length=end - offset), headers)
        length = response.headers.get("Content-Length", "")
        # A longer body is not the range that was asked for.
        is_longer = http.LENGTH.fullmatch(length) is not None and int(length) > end - offset
        if response.status_code == 200 and not is_longer:
            response.status_code = 206
            response.headers["Content-Range"] = f"bytes {offset}-{end - 1}/{self.size}"
        return response


def with_query(url: str, **values: int) -> str:
    """Return ``url`` with these values in its query, instead of earlier ones of the same names."""
    parts = urllib.parse.urlsplit(url)
    kept = [(name, value) for name, value in urllib.parse.parse_qsl(parts.query) if name not in values]
    query = urllib.parse.urlencode([*kept, *values.items()])
    return urllib.parse.urlunsplit(parts._replace(query=query))
