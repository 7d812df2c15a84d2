"""What object stores have in common: how an object is named, and keys that may lie around."""

from __future__ import annotations

import urllib.parse
from typing import Any, NamedTuple

from cdi_worker import errors
from cdi_worker.sources import wire
from cdi_worker.sources.web import pinned


class Name(NamedTuple):
    """An object. ``server``: scheme, host and port, or empty where the address has none."""

    server: str
    bucket: str
    key: str


def parse(endpoint: str, scheme: str, signed: str) -> Name:
    """Return what ``<scheme>://bucket/key`` or ``http(s)://host/bucket/key`` names.

    The key of an address of the store's own scheme is taken as it stands, as its own tools do; that of a
    URL is percent-decoded. ``signed``: what the store calls a URL that is for the http source.
    """
    shown = wire.safe_url(endpoint)
    if endpoint.startswith(f"{scheme}://"):
        bucket, _, key = endpoint.removeprefix(f"{scheme}://").partition("/")
        server = ""
    else:
        parts = pinned.checked(endpoint)
        if parts.query:
            raise errors.RequestError(f"{shown}: has a query; a {signed} is for the http source")
        bucket, _, key = (urllib.parse.unquote(item) for item in parts.path[1:].partition("/"))
        server = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
    if not bucket or not key:
        raise errors.RequestError(f"{shown}: wants {scheme}://bucket/key or http(s)://host/bucket/key")
    return Name(server, bucket, key)


class Keys:
    """The keys that were given, those that the surroundings offer, or none (false)."""

    def __init__(self, given: Any) -> None:
        self._keys = given
        self._looked = False

    def __bool__(self) -> bool:
        return self._keys is not None

    def look_around(self) -> bool:
        """Look for keys once, if none were given; tell whether there are some now."""
        if self or self._looked:
            return False
        self._looked = True
        self._keys = self._find()
        return bool(self)

    def _find(self) -> Any:
        """Return the keys that the surroundings offer, or None."""
        raise NotImplementedError
