"""Shared parts of object stores: object names, explicit and ambient credentials."""

from __future__ import annotations

import urllib.parse
from typing import Any, NamedTuple

from cdi_worker import errors, masking
from cdi_worker.sources import wire
from cdi_worker.sources.web import pinned


class Name(NamedTuple):
    """An object. ``server``: scheme, host and port; empty if the URL has the store's own scheme."""

    server: str
    bucket: str
    key: str


def parse(endpoint: str, scheme: str, signed: str) -> Name:
    """Parse ``<scheme>://bucket/key`` or ``http(s)://host/bucket/key``.

    The key of a ``<scheme>://`` URL is used as is, as the store's own tools do; that of an http URL is
    percent-decoded. ``signed``: the store's name for a URL with a signature, for the message that refuses it.
    """
    shown = wire.safe_url(endpoint)
    if endpoint.startswith(f"{scheme}://"):
        if masking.user_info(endpoint):
            remedy = errors.Remedy([("give them apart from the address", "user and password")])
            reason = f"{shown}: credentials in an address of {scheme}://"
            raise errors.RequestError(reason, remedy=remedy)
        bucket, _, key = endpoint.removeprefix(f"{scheme}://").partition("/")
        server = ""
    else:
        parts = pinned.parse(endpoint)
        if parts.query:
            raise errors.RequestError(f"{shown}: has a query; use the http source for a {signed}")
        if parts.fragment:
            raise errors.RequestError(f"{shown}: has a fragment; write %23 for a # in the key")
        bucket, _, key = (urllib.parse.unquote(item) for item in parts.path[1:].partition("/"))
        server = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
    if not bucket or not key:
        raise errors.RequestError(f"{shown}: expected {scheme}://bucket/key or http(s)://host/bucket/key")
    check_segments(shown, bucket, key)
    return Name(server, bucket, key)


def check_segments(shown: str, *parts: str) -> None:
    """Raise ``errors.RequestError`` for a path with . or .., which clients remove (RFC 3986, 5.2.4)."""
    if not {".", ".."}.isdisjoint(parts):
        raise errors.RequestError(f"{shown}: a part of its path is . or .., which HTTP does not keep")


class Keys:
    """Explicit or ambient credentials; false if there are none."""

    def __init__(self, given: Any) -> None:
        self._keys = given
        self._searched = False

    def __bool__(self) -> bool:
        return self._keys is not None

    def find_ambient(self) -> bool:
        """Search for ambient credentials, at most once. Return whether new ones were found."""
        if self or self._searched:
            return False
        self._searched = True
        self._keys = self._find()
        return bool(self)

    def _find(self) -> Any:
        """Return the ambient credentials, or None."""
        raise NotImplementedError
