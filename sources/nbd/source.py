"""The NBD source: an export, or its changes since a dirty bitmap was created."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping

from cdi_worker import errors
from cdi_worker.formats import detect
from cdi_worker.images.engine import filled
from cdi_worker.sources import base, extents, wire
from cdi_worker.sources.nbd import client, handshake, locations

log = logging.getLogger(__name__)

#: Bytes of the first read.
HEAD_SIZE = 256 * 1024


class NbdSource(base.Source):
    """An export, which is always a raw disk: a guest can write any header to its disk.

    NBD has no identity. A checkpoint's name says that the export is a moment that does not change; its
    identity is weak, because the name proves nothing. Without a checkpoint nothing is resumed.
    """

    def __init__(self, location: locations.Nbd, cancel: base.Cancel) -> None:
        self._address = locations.parse(location.endpoint)
        self.name = self._address.name
        self._location = location
        self._cancel = cancel
        self._open = contextlib.ExitStack()

    def open(self, opening: base.Opening) -> base.Facts:
        with contextlib.ExitStack() as stack:
            self._client = client.Client(self._server(stack), self._cancel, self._limits())
            stack.callback(self._client.close)
            try:
                size = self._client.open()
            except handshake.Failed as err:
                raise errors.Unreachable(**{**err.fields, "url": self.name}) from err
            self._check_bitmap()
            head = filled.head(self._client, min(HEAD_SIZE, size), self.name)
            self._open = stack.pop_all()
        current = self._location.current
        identity = f"{current} size {size}" if current else None
        if (found := detect.detect(head[: detect.HEAD])) not in {"raw", "iso"}:
            log.warning("the export begins like a %s image, copied as it is: it is a raw disk", found)
        log.info("source size=%r connections=%d identity=%r", size, self._client.allowed, identity)
        return base.Facts(
            name=self.name,
            size=size,
            head=head,
            identity=identity,
            weak=bool(current),
            format="raw",
            ranges=self._client,
            extents=self._extents(),
            description=self._description(),
        )

    def close(self) -> None:
        self._open.close()

    def _extents(self) -> Callable[[], Iterator[base.Extent]] | None:
        """Return what lists the extents; None if the server does not."""
        if bitmap := self._location.changes:
            return lambda: self._changed(bitmap)
        if handshake.ALLOCATION not in self._client.contexts:
            return None
        return lambda: extents.coarse(self._client.extents())

    def _description(self) -> Mapping[str, object]:
        found = self._client
        reported = handshake.ALLOCATION in found.contexts
        return {
            "export": self._address.export,
            "connections": found.allowed,
            "extents": reported,
            "bitmaps": found.bitmaps,
        }

    def _server(self, stack: contextlib.ExitStack) -> handshake.Server:
        contexts = [handshake.ALLOCATION]
        if bitmap := self._location.changes:
            contexts.append(handshake.BITMAP + bitmap)
        folder = ""
        if self._address.tls:
            folder = stack.enter_context(handshake.credentials(self._location))
        verify = not self._location.access.insecure
        return handshake.Server(self.name, self._address, tuple(contexts), folder, verify)

    def _limits(self) -> client.Limits:
        connect, stall = wire.TIMEOUT
        access = self._location.access
        patience = access.patience
        return client.Limits(
            access.connections,
            connect=min(connect, patience),
            stall=min(stall, patience),
            patience=patience,
            slowest=access.slowest,
        )

    def _check_bitmap(self) -> None:
        bitmap = self._location.changes
        if not bitmap or handshake.BITMAP + bitmap in self._client.contexts:
            return
        names = ", ".join(map(repr, self._client.bitmaps)) or "none"
        raise errors.SourceError(
            reason=f"{self.name}: no dirty bitmap {bitmap!r} (the server lists: {names}); "
            "start again with a full copy"
        )

    def _changed(self, bitmap: str) -> Iterator[base.Extent]:
        areas = extents.Kept(self._client.dirty(bitmap))
        changed = sum(area.length for area in areas)
        log.info("changed bitmap=%r areas=%d bytes=%d", bitmap, len(areas), changed)
        runs = self._client.extents(extents.pieces(areas))
        yield from extents.coarse(extents.overlay(areas, runs))
