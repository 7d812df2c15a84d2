"""An NBD client that writes. A lost connection is final: what was not flushed may be lost with it."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from typing import Final

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.sources import base
from cdi_worker.sources.nbd import client, connection, handshake, locations

#: Seconds for which requests continue after a cancel, so that what was written can be noted.
_GRACE: Final = 10.0


def connect(
    location: locations.Nbd, cancel: base.Cancel, url: str, *, writable: bool = True, name: str = ""
) -> Device:
    """Connect to the export at ``url``, over TLS with the certificates of ``location``.

    Raises ``errors.TargetError``.
    """
    address, access = locations.parse(url), location.access
    name = name or address.name
    limits = client.Limits(access.connections, stall=access.patience, patience=access.patience)
    with contextlib.ExitStack() as undo:
        folder = undo.enter_context(handshake.credentials(location)) if address.tls else ""
        server = handshake.Server(name, address, folder=folder, verify=not access.insecure)
        device = Device(server, limits, cancel, undo.pop_all(), writable=writable)
        undo.callback(device.close)
        try:
            cancelling.run_apart(device.open, cancel, late=device.close)
        except errors.SourceError as err:
            raise errors.TargetError(path=name, reason=err.fields["reason"]) from err
        undo.pop_all()
    return device


class Device(client.Client):
    """An open export, and ``owned``, which is closed with it; see ``images.targets.remote.Device``.

    It does not replace a connection that it has lost.
    """

    def __init__(
        self,
        server: handshake.Server,
        limits: client.Limits,
        cancel: base.Cancel,
        owned: contextlib.ExitStack,
        *,
        writable: bool,
    ) -> None:
        # Requests continue for a while after a cancel of the run.
        super().__init__(server, cancelling.NEVER, limits)
        self._writable = writable
        self._lost: errors.TargetError | None = None
        self._owned = owned
        self._run = cancel
        self._watching = cancel.on_set(self._hurry)
        self._edges = threading.Lock()
        self.size = 0
        self.unit = 1

    def read(self, offset: int, length: int, /) -> bytes:
        into = memoryview(bytearray(max(0, min(length, self.size - offset))))
        done = 0
        while done < len(into):
            done += self.read_range(offset + done, into[done:])
        return bytes(into)

    def write(self, offset: int, data: memoryview, /) -> None:
        """Write ``data``; a part of a block is read, changed and written."""
        end = offset + len(data)
        first = min(end, -(-offset // self.unit) * self.unit)
        last = end if end == self.size else max(first, end // self.unit * self.unit)
        self._write_part(offset, data[: first - offset])
        if last > first:
            self._write_blocks(first, data[first - offset : last - offset])
        self._write_part(last, data[last - offset :])

    def zero(self, offset: int, length: int, /, *, allocate: bool) -> None:
        """Zero whole blocks on the server. Raises OSError if it refuses that."""
        with self._lend(offset, 1) as used:
            if not used.can_zero:
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            self._check(used, used.zero(offset, length, allocate=allocate), f"zeroing at byte {offset}")

    def flush(self) -> None:
        # One connection flushes what all have written: there are several only if the server promises that.
        with self._lend(0, 1) as used:
            self._check(used, used.flush(), "flushing")

    def allocated(self, start: int, end: int, /) -> Iterator[tuple[int, int]]:
        """Yield the parts of a range that the server does not report as zeros."""
        for each in self.extents([(start, end)]) if end > start else ():
            if not each.zero:
                yield each.offset, each.offset + each.length

    def close(self) -> None:
        super().close()
        self._watching.close()
        self._owned.close()

    def _idle(self) -> tuple[connection.Connection | None, bool]:
        with self._lock:
            for each in self._connections:
                if each.dead:
                    self._lose(each.failure)
            if self._lost is not None:
                raise self._lost
        return super()._idle()

    def _lose(self, reason: str) -> errors.TargetError:
        self._lost = self._lost or errors.TargetError(path=self._server.name, reason=reason)
        return self._lost

    def _accept(self, made: connection.Connection) -> None:
        name = self._server.name
        if self._writable and made.is_read_only:
            raise errors.TargetError(path=name, reason="the server exports the disk read-only")
        if self._writable and not made.can_flush:
            reason = "the server cannot flush what was written (nbd-server: flush = true)"
            raise errors.TargetError(path=name, reason=reason)
        if self._size is None:
            self.size, self.unit = made.size, made.unit
        try:
            super()._accept(made)
        except errors.SourceChanged as err:
            raise self._lose(f"another connection is to another disk: {err}") from err

    def _check(self, used: connection.Connection, error: int, doing: str) -> None:
        if error in {errno.ENOTCONN, errno.EMSGSIZE, errno.EPROTO}:
            reason = used.failure if error == errno.ENOTCONN else "the reply is malformed"
            raise self._lose(f"{doing}: {reason}")
        if error:
            raise OSError(error, os.strerror(error))

    def _write_blocks(self, offset: int, data: memoryview) -> None:
        with self._lend(offset, 1) as used:
            for start in range(0, len(data), used.longest):
                error = used.write(offset + start, data[start : start + used.longest])
                self._check(used, error, f"writing at byte {offset + start}")

    def _write_part(self, offset: int, data: memoryview) -> None:
        """Write a part of one block."""
        if not data:
            return
        start = offset // self.unit * self.unit
        # Another thread may write another part of it.
        with self._edges:
            whole = bytearray(self.read(start, self.unit))
            whole[offset - start : offset - start + len(data)] = data
            self._write_blocks(start, memoryview(whole))

    def _hurry(self) -> None:
        timer = threading.Timer(_GRACE, self._end)
        timer.daemon = True
        timer.start()

    def _end(self) -> None:
        """Disconnect if the run is cancelled: a server that hangs must not keep it."""
        if self._run.is_set():
            super().close()
        elif not self._closed:
            # Only an attempt has failed.
            self._watching = self._run.on_set(self._hurry)
