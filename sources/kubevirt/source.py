"""The source of ``IMPORTER_SOURCE=kubevirt``: a volume in an export, or a disk in a backup.

A VirtualMachineExport has the raw disk, the same in gzip, or an archive of its files. A VirtualMachineBackup
that is pulled has a map of its extents, and its bytes (KubeVirt, VEP 25). QEMU keeps the disk as it was when
the backup began, so all requests see the same bytes while the guest runs.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping

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
        locations.Form.ARCHIVE: ArchiveSource,
        locations.Form.BACKUP: BackupSource,
    }
    # ``faults`` reports a URL that is none of them.
    return made[location.form or locations.Form.RAW](location, cancel)


# -- exports -----------------------------------------------------------------------------------


class ArchiveSource(http.HttpSource):
    """The files of a volume, in a tar archive with gzip. Each request makes it anew, without a length."""

    def __init__(self, location: locations.KubeVirt, cancel: base.Cancel) -> None:
        self._location = location
        self._cancel = cancel
        resource = server.Resource(location.endpoint, location.access, server.Token(location), cancel=cancel)
        super().__init__(resource)

    def open(self, opening: base.Opening) -> base.Facts:
        description = {"form": str(self._location.form)}
        facts = super().open(opening)
        return dataclasses.replace(facts, description=description, checkpoints=self._location.checkpoints)


class RawSource(ArchiveSource):
    """A raw disk, by ranges of a file without ETag and date (``fileHandler`` of virt-exportserver).

    KubeVirt's disks are raw (VEP 25, "Restore"), and a guest can write any header to its disk. Only a name
    that the user gives to the disk's state is an identity: another export may have the same URL.
    """

    def open(self, opening: base.Opening) -> base.Facts:
        facts = dataclasses.replace(super().open(opening), format="raw")
        return _at_checkpoint(facts, self._location) if facts.identity is None else facts


class GzipSource(ArchiveSource):
    """A raw disk that the server compresses while it sends it (``gzipHandler``): one ordered stream."""

    def open(self, opening: base.Opening) -> base.Facts:
        facts = super().open(opening)
        if facts.head and not facts.head.startswith(b"\x1f\x8b\x08"):
            raise errors.Corrupt(format="gz", reason=f"{self.name} does not begin like gzip")
        # The bytes as served have no relation to the size of the disk.
        return dataclasses.replace(
            facts, size=None, wire=base.Wire(facts.size), format="raw", ranges=None, unwrap=self._unwrap
        )

    def _unwrap(self, served: base.Reader) -> base.Reader:
        return decompress.open("gz", ahead.Reader(served, self._cancel))


# -- backups -----------------------------------------------------------------------------------


class BackupSource(http.HttpSource):
    """A disk, or with a previous checkpoint what has changed since then.

    The server may answer a request for changes by a full backup, if the previous checkpoint was lost; its map
    says so, and then everything is copied. ``page_size``: extents of a page of the map that are requested.
    """

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

    def open(self, opening: base.Opening) -> base.Facts:
        self._map.read(self._page)
        if self._map.lists_changes and not self._location.previous:
            raise errors.SourceError(
                reason=f"{self.name}: is an incremental backup; name its previous checkpoint"
            )
        self._data.size = self._map.size
        facts = super().open(opening)
        if self._location.previous and not self._map.lists_changes:
            log.warning("the backup is a full one, not the changes since %r", self._location.previous)
        facts = dataclasses.replace(
            facts,
            format="raw",
            extents=lambda: extents.coarse(self._map.extents()),
            checkpoints=self._location.checkpoints,
            description=self._description(),
        )
        # Nothing in the answers names the backup.
        return _at_checkpoint(facts, self._location)

    def close(self) -> None:
        super().close()
        self._pages.close()
        self._connection.close()

    def verify(self) -> None:
        """Read the map again: a backup that has replaced this one would be a mixture of two disks."""
        again = maps.Map(self._pages.name)
        retry.patiently(lambda: again.read(self._page), PATIENCE, self._cancel)
        self._map.check_same(again)

    def _description(self) -> Mapping[str, object]:
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
        return self._pages.body(self._pages.get(None), maps.LARGEST_PAGE)


def _at_checkpoint(facts: base.Facts, location: locations.KubeVirt) -> base.Facts:
    """Return the facts with the name that the user gives to this state of the disk as identity, if any."""
    if not location.current:
        return facts
    identity = f"checkpoint {location.current} size {facts.size}"
    return dataclasses.replace(facts, identity=identity, weak=True)
