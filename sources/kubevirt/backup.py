"""A disk in a VirtualMachineBackup that is pulled: a map of its extents, and its bytes (KubeVirt, VEP 25).

QEMU keeps the disk as it was when the backup began, so all requests see the same bytes while the guest runs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

from cdi_worker import errors
from cdi_worker.images.engine import retry
from cdi_worker.sources import base, extents
from cdi_worker.sources.kubevirt import locations, maps, server
from cdi_worker.sources.web import http, session

log = logging.getLogger(__name__)

#: Seconds for which the request for a page is repeated, after the first page has arrived.
PATIENCE = 10.0


class BackupSource(http.HttpSource):
    """A disk, or with a previous checkpoint what has changed since then.

    The server may answer a request for changes by a full backup, if the previous checkpoint was lost; its map
    says so, and then everything is copied. ``page_size``: extents of a page of the map that are requested.
    """

    format = "raw"

    def __init__(self, location: locations.KubeVirt, cancel: base.Cancel, page_size: int = maps.PAGE) -> None:
        self._location = location
        self._page_size = page_size
        self._cancel = cancel
        token = server.Token(location)
        access = location.access
        self._connection = session.new_session(access, cancel)
        self._pages = server.Resource(location.beside("map"), access, token, self._connection, cancel=cancel)
        self._data = server.Data(location.beside("data"), access, token, self._connection, cancel=cancel)
        self._map = maps.Map(self._pages.name)
        super().__init__(self._data)

    def open(self, opening: base.Opening) -> None:
        self._map.read(self._page)
        if self._map.lists_changes and not self._location.previous:
            raise errors.SourceError(
                reason=f"{self.name}: is an incremental backup; name its previous checkpoint"
            )
        self._data.size = self._map.size
        super().open(opening)
        if self._location.current:
            # Nothing in the answers names the backup.
            self.identity = f"checkpoint {self._location.current} size {self.size}"
            self.weak = True
        if self._location.previous and not self._map.lists_changes:
            log.warning("the backup is a full one, not the changes since %r", self._location.previous)

    def close(self) -> None:
        super().close()
        self._pages.close()
        self._connection.close()

    def extents(self) -> Iterator[base.Extent]:
        return extents.coarse(self._map.extents())

    def verify(self) -> None:
        """Read the map again: a backup that has replaced this one would be a mixture of two disks."""
        again = maps.Map(self._pages.name)
        retry.patiently(lambda: again.read(self._page), PATIENCE, self._cancel)
        self._map.check_same(again)

    def describe(self) -> Mapping[str, object]:
        copied = sum(extent.length for extent in self._map.extents() if not extent.zero)
        kind = "changes" if self._map.lists_changes else "full"
        return {"form": str(self._location.form), "backup": kind, "data": copied}

    def _page(self, offset: int) -> bytes:
        if not offset:
            return self._ask_page(offset)
        return retry.patiently(lambda: self._ask_page(offset), PATIENCE, self._cancel)

    def _ask_page(self, offset: int) -> bytes:
        """Return the page of the map that begins at ``offset``; too long by one byte if it is too long."""
        where = self._location.beside("map")
        self._pages.url = server.with_query(where, offset=offset, page_size=self._page_size)
        self._pages.unpin()
        response = self._pages.get(None)
        if response.status_code != 200:
            raise self._pages.failure(response)
        try:
            with session.translated(self._pages.name, first=False):
                return session.body(response, maps.LARGEST_PAGE)
        finally:
            self._pages.drop(response)
