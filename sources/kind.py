"""The description of a kind of source, available without importing its protocol."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from cdi_worker import errors
from cdi_worker.sources import base, fields


class Kind(NamedTuple):
    """A kind of source. ``name``: its value of ``IMPORTER_SOURCE``.

    ``source``, ``location``: a callable ``(location, Cancel) -> Source``, such as a class, and the location's
    dataclass, or references to them (``MODULE:NAME``, as of entry points), which are imported when used.
    ``schemes``: its URL schemes; ``""`` stands for a path. ``archives``: whether it supports content type
    ``archive``. ``example``: a command line with its options. ``digests``: whether its disks have digests
    (``Source.digest``).
    """

    name: str
    source: str | Callable[[Any, base.Cancel], base.Source]
    location: str | type[base.Location] = base.Location
    schemes: tuple[str, ...] = ()
    archives: bool = False
    example: str = ""
    digests: bool = False

    @property
    def location_type(self) -> type[base.Location]:
        """The dataclass of the location."""
        found: type[base.Location] = _load(self.location)
        return found

    @property
    def table(self) -> Mapping[str, tuple[fields.Field, Any]]:
        """The fields of the location with their defaults, by attribute name."""
        return fields.table(self.location_type)

    def accept(self, location: base.Location) -> base.Location:
        """Return ``location`` as the dataclass of this source; a plain ``Location`` is converted.

        Raises ``RequestError`` for the location of another source.
        """
        wanted = self.location_type
        if isinstance(location, wanted):
            return location
        if type(location) is not base.Location:
            there, given = f"{wanted.__module__}.{wanted.__qualname__}", type(location).__qualname__
            raise errors.RequestError(f"source {self.name!r}: the location must be {there}, not {given}")
        return wanted(location.endpoint, location.access)

    def fill(self, endpoint: str, access: base.Access, given: Callable[[fields.Field], Any]) -> base.Location:
        """Return a location with the values that ``given`` returns for its fields; None means the default.

        Raises ``errors.Unsupported`` if a previous checkpoint is given and the source has no checkpoints.
        """
        if not self.location_type.staged and given(base.PREVIOUS):
            raise errors.Unsupported(reason=f"source {self.name!r}: does not support checkpoints")
        return self.location_type(endpoint, access, **fields.values(self.location_type, given))

    def open(self, location: base.Location, cancel: base.Cancel) -> base.Source:
        """Return the source for ``location``, not yet opened. Setting ``cancel`` aborts its waits."""
        source: base.Source = _load(self.source)(self.accept(location), cancel)
        return source


def _load(given: Any) -> Any:
    if not isinstance(given, str):
        return given
    module, _, name = given.partition(":")
    return getattr(importlib.import_module(module), name)
