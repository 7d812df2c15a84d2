"""A kind of source: what is known of it before anything of its protocol is imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from cdi_worker import errors, lazy
from cdi_worker.sources import base, fields


class Kind(NamedTuple):
    """A source by its name in ``IMPORTER_SOURCE``.

    ``source``, ``location``: references (``lazy``) of a callable ``(location, Cancel) -> Source`` and of the
    location's dataclass. ``schemes``: of the URLs that name this source; empty for a path.
    ``archives``: whether its bytes may be a tar archive.
    """

    name: str
    source: str
    location: str = "cdi_worker.sources.base:Location"
    schemes: tuple[str, ...] = ()
    archives: bool = False

    @property
    def location_type(self) -> type[base.Location]:
        """The dataclass of its locations."""
        found: type[base.Location] = lazy.load(self.location)
        return found

    @property
    def table(self) -> Mapping[str, tuple[fields.Field, Any]]:
        """The fields of its locations, each with its default, by the dataclass's names."""
        return fields.table(self.location_type)

    def accept(self, location: base.Location) -> base.Location:
        """Return ``location`` as this source's; one that says no more than every location may becomes one.

        Raises ``RequestError`` for the location of another source.
        """
        wanted = self.location_type
        if isinstance(location, wanted):
            return location
        if type(location) is not base.Location:
            there, given = f"{wanted.__module__}.{wanted.__qualname__}", type(location).__qualname__
            raise errors.RequestError(f"source {self.name!r} wants a location of {there}, not {given}")
        return wanted(location.endpoint, location.access)

    def fill(self, endpoint: str, access: base.Access, given: Callable[[fields.Field], Any]) -> base.Location:
        """Return a location with the values that ``given`` returns for its fields; None: the default.

        Raises ``errors.Unsupported`` for a stage of a disk that has none.
        """
        if not self.location_type.staged and given(base.PREVIOUS):
            raise errors.Unsupported(
                reason=f"source {self.name!r} knows no difference to a previous checkpoint"
            )
        found = {name: given(each) for name, (each, _) in self.table.items()}
        said = {name: value for name, value in found.items() if value is not None}
        return self.location_type(endpoint, access, **said)

    def open(self, location: base.Location, cancel: base.Cancel) -> base.Source:
        """Return the source of a location, not yet opened. Setting ``cancel`` ends its waits."""
        made: base.Source = lazy.load(self.source)(self.accept(location), cancel)
        return made
