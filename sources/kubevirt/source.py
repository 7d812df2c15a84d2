"""The source of ``IMPORTER_SOURCE=kubevirt``: a volume in an export, or a disk in a backup.

A VirtualMachineExport has the raw disk, the same in gzip, or an archive of its files. A VirtualMachineBackup
that is pulled has a map of its extents, and its bytes (KubeVirt, VEP 25). QEMU keeps the disk as it was when
the backup began, so all requests see the same bytes while the guest runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping

from cdi_worker import errors
from cdi_worker.formats.compressed import decompress
from cdi_worker.images.engine import ahead, retry
from cdi_worker.sources import base, extents
from cdi_worker.sources.kubevirt import locations, maps, server
from cdi_worker.sources.web import http, session

log = logging.getLogger(__name__)

#: Seconds for which the request for a page of a map is repeated, after the first page has arrived.
PATIENCE = 10.0


def source(location: locations.KubeVirt, cancel: base.Cancel) -> base.Source:
    """Return the source for what is at the URL."""
    made: dict[locations.Form, Callable[[locations.KubeVirt, base.Cancel], base.Source]] = {
        locations.Form.RAW: RawSource,
        locations.Form.GZIP: GzipSource,
        locations.Form.ARCHIVE: ExportSource,
        locations.Form.BACKUP: BackupSource,
    }
    # ``faults`` reports a URL that is none of them.
    return made[location.form or locations.Form.RAW](location, cancel)


class ExportSource(http.HttpSource):
    """What the export server has at a URL; by default an archive (tar, gzip) of the files of a volume.

    The server creates the archive for each request, without a length.
    """

    def __init__(
        self, location: locations.KubeVirt, cancel: base.Cancel, resource: server.Resource | None = None
    ) -> None:
        self._location = location
        self._cancel = cancel
        if resource is None:
            token = server.Token(location)
            resource = server.Resource(location.endpoint, location.access, token, cancel=cancel)
        super().__init__(resource)

    def names(self, checkpoint: str) -> frozenset[str]:
        return self._location.names(checkpoint)

    def describe(self) -> Mapping[str, object]:
        return {"form": str(self._location.form)}


class RawSource(ExportSource):
    """A raw disk, by ranges of a file without ETag and date (``fileHandler`` of virt-exportserver).

    KubeVirt's disks are raw (VEP 25, "Restore"), and a guest can write any header to its disk. Only a name
    that the user gives to the disk's state is an identity: another export may have the same URL.
    """

    def open(self, opening: base.Opening) -> base.Facts:
        version, head = self._first_answer(opening)
        identity = version.identity or _identity(self._location, version.size)
        return self._facts(version, head, format="raw", identity=identity)


class GzipSource(ExportSource):
    """A raw disk that the server compresses while it sends it (``gzipHandler``): one ordered stream."""

    def open(self, opening: base.Opening) -> base.Facts:
        version, head = self._first_answer(opening)
        if head and not head.startswith(b"\x1f\x8b\x08"):
            raise errors.Corrupt(format="gz", reason=f"{self.name} does not begin like gzip")
        # The size of the bytes as served says nothing about the disk.
        return self._facts(version, head, format="raw", size=None)

    @property
    def ranges(self) -> None:
        return None

    @property
    def wire(self) -> base.Wire:
        return base.Wire(None if self._version is None else self._version.size)

    def unwrap(self, served: base.Reader) -> base.Reader:
        return decompress.open("gz", ahead.AheadReader(served, self._cancel))


class BackupSource(ExportSource):
    """A disk, or with a previous checkpoint what has changed since then.

    The server may answer a request for changes by a full backup, if the previous checkpoint was lost; its map
    says so, and then everything is copied. ``page_size``: extents of a page of the map that are requested.
    """

    def __init__(self, location: locations.KubeVirt, cancel: base.Cancel, page_size: int = maps.PAGE) -> None:
        self._page_size = page_size
        token = server.Token(location)
        access = location.access
        self._connection = session.new_session(access, cancel)
        self._pages = server.Resource(location.beside("map"), access, token, self._connection, cancel=cancel)
        self._data = server.Data(location.beside("data"), access, token, self._connection, cancel=cancel)
        self._map = maps.Map(self._pages.name)
        super().__init__(location, cancel, self._data)

    def open(self, opening: base.Opening) -> base.Facts:
        self._map.read(self._page)
        if self._map.lists_changes and not self._location.previous:
            raise errors.SourceError(
                reason=f"{self.name}: is an incremental backup; name its previous checkpoint"
            )
        self._data.size = self._map.size
        version, head = self._first_answer(opening)
        if self._location.previous and not self._map.lists_changes:
            log.warning("the backup is a full one, not the changes since %r", self._location.previous)
        # The server has no names of backups.
        identity = _identity(self._location, version.size)
        named = {"identity": identity, "weak": True} if identity else {}
        return self._facts(version, head, format="raw", **named)

    def extents(self) -> Iterator[base.Extent]:
        return extents.coarse(self._map.extents())

    def close(self) -> None:
        super().close()
        self._pages.close()
        self._connection.close()

    def verify(self) -> None:
        """Read the map again: a backup that has replaced this one would be a mixture of two disks."""
        again = maps.Map(self._pages.name)
        retry.patiently(lambda: again.read(self._page), PATIENCE, self._cancel)
        self._map.check_same(again)

    def describe(self) -> Mapping[str, object]:
        copied = sum(extent.length for extent in self._map.extents() if not extent.zero)
        kind = "changes" if self._map.lists_changes else "full"
        return {**super().describe(), "backup": kind, "data": copied}

    def _page(self, offset: int) -> bytes:
        """Return the page of the map that begins at ``offset``; too long by one byte if it is too long."""

        def ask() -> bytes:
            where = self._location.beside("map")
            self._pages.url = server.with_query(where, offset=offset, page_size=self._page_size)
            self._pages.unpin()
            return self._pages.body(self._pages.get(None), maps.LARGEST_PAGE)

        return retry.patiently(ask, PATIENCE, self._cancel) if offset else ask()


def _identity(location: locations.KubeVirt, size: int | None) -> str | None:
    """Return the name that the user gives to this state of the disk, if any, as a weak identity."""
    return f"checkpoint {location.current} size {size}" if location.current else None
