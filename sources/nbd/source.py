"""The NBD source: an export, or its changes since a dirty bitmap was created."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping

from cdi_worker import errors, units
from cdi_worker.formats import detect
from cdi_worker.images.engine import filled
from cdi_worker.sources import base, extents, wire
from cdi_worker.sources.nbd import client, handshake, locations

log = logging.getLogger(__name__)


class NbdSource(base.Source):
    """An export, which is always a raw disk: a guest can write any header to its disk.

    NBD states no identity. If the request names a checkpoint, the export counts as a snapshot; its identity
    is weak, because a name proves nothing. Without a checkpoint nothing is resumed.
    """

    def __init__(self, location: locations.Nbd, cancel: base.Cancel) -> None:
        self._address = locations.parse(location.endpoint)
        self.name = self._address.name
        self._location = location
        self._cancel = cancel
        self._open = contextlib.ExitStack()

    def open(self, opening: base.Opening) -> base.Facts:
        access, bitmap = self._location.access, self._location.changes
        contexts = (handshake.ALLOCATION, *([handshake.BITMAP + bitmap] if bitmap else []))
        connect, stall = wire.timeout(access)
        limits = client.Limits(
            access.connections,
            connect=connect,
            stall=stall,
            patience=access.patience,
            min_speed=access.min_speed,
        )
        with contextlib.ExitStack() as stack:
            folder = ""
            if self._address.tls:
                folder = stack.enter_context(handshake.credentials(self._location))
            server = handshake.Server(self.name, self._address, contexts, folder, not access.insecure)
            self._client = client.Client(server, self._cancel, limits)
            stack.callback(self._client.close)
            try:
                size = self._client.open()
            except handshake.Failed as err:
                raise errors.Unreachable(**{**err.fields, "url": self.name}) from err
            if bitmap and handshake.BITMAP + bitmap not in self._client.contexts:
                names = ", ".join(map(repr, self._client.bitmaps)) or "none"
                raise errors.SourceError(
                    reason=f"{self.name}: no dirty bitmap {bitmap!r} (the server lists: {names}); "
                    "start again with a full copy"
                )
            head = filled.head(self._client, min(base.HEAD_SIZE, size), self.name)
            self._open = stack.pop_all()
        current = self._location.current
        identity = f"{current} size {size}" if current else None
        if (found := detect.detect(head[: detect.HEAD])) not in {"raw", "iso"}:
            log.warning("the export begins like a %s image, copied as it is: it is a raw disk", found)
        log.info("source size=%r connections=%d identity=%r", size, self._client.allowed, identity)
        return base.Facts(
            name=self.name, size=size, head=head, identity=identity, weak=bool(current), format="raw"
        )

    @property
    def ranges(self) -> base.RandomReader:
        return self._client

    def first_sector(self) -> bytes:
        with contextlib.suppress(errors.SourceError):
            return filled.head(self._client, units.SECTOR, self.name)
        return b""

    def close(self) -> None:
        self._open.close()

    @property
    def extents(self) -> Callable[[], Iterator[base.Extent]] | None:
        if self._location.changes:
            return self._list_changes
        if handshake.ALLOCATION not in self._client.contexts:
            return None
        return lambda: extents.coarse(self._client.extents())

    def describe(self) -> Mapping[str, object]:
        return {
            "export": self._address.export,
            "connections": self._client.allowed,
            "extents": handshake.ALLOCATION in self._client.contexts,
            "bitmaps": self._client.bitmaps,
        }

    def _list_changes(self) -> Iterator[base.Extent]:
        bitmap = self._location.changes
        areas = extents.Kept(self._client.dirty(bitmap))
        changed = sum(area.length for area in areas)
        log.info("changed bitmap=%r areas=%d bytes=%d", bitmap, len(areas), changed)
        runs = self._client.extents(extents.pieces(areas))
        yield from extents.coarse(extents.overlay(areas, runs))
