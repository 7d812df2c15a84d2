"""The oVirt source: an image transfer of the engine, whose data the ovirt-imageio client reads."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from cdi_worker import errors
from cdi_worker.formats import readers
from cdi_worker.images.engine import cancelling, filled, retry
from cdi_worker.sources import base, extents, renewal, wire
from cdi_worker.sources.ovirt import data, engine, locations

log = logging.getLogger(__name__)

#: Successive refusals of the ticket after which a transfer that the engine reports as healthy is replaced.
MAX_REFUSALS = 3


@dataclasses.dataclass(frozen=True)
class Patience:
    """Limits of waits, in seconds.

    ``renew``: interval between renewals of the ticket. ``locked``: for a locked disk, for example until the
    engine ends the transfer of a killed worker. ``ready``: for the engine to prepare a transfer. ``first``:
    for the data server to answer. ``end``: to end a transfer after success. ``last``: to end it after a
    failure or SIGTERM, when the kubelet allows 30 s in total.
    """

    renew: float = 20.0
    locked: float = 600.0
    ready: float = 300.0
    first: float = 10.0
    end: float = 120.0
    last: float = 15.0


class _State(NamedTuple):
    """The disk as the engine describes it, and its snapshot at the current checkpoint.

    ``identity``: None without a snapshot. ``names``: the name of each checkpoint that is a snapshot.
    ``previous_size``: size in bytes at the previous checkpoint.
    """

    disk: Any
    snapshot: Any | None
    identity: str | None
    names: dict[str, frozenset[str]]
    previous_size: int | None


class ImageioSource(base.Source):
    """A disk, a disk at a snapshot, or with a previous checkpoint the changes since then.

    The first two are read as a raw disk, the changes as the qcow2 file of one snapshot. A thread renews the
    ticket. The transfer is ended by ``verify``, or by ``close`` after a failure.
    """

    def __init__(
        self, location: locations.Imageio, cancel: base.Cancel, patience: Patience = Patience()
    ) -> None:
        self.name = f"{wire.safe_url(location.endpoint)} disk {location.disk_id}"
        self._format = "qcow2" if location.previous else "raw"
        self._location = location
        self._cancel = cancel
        self._patience = patience
        self._open = contextlib.ExitStack()
        self._recovering = threading.Lock()
        self._renewal = self._new_renewal()
        self._transfer: engine.Transfer | None = None
        self._refusals = 0
        self._read = 0
        #: What was read before the ticket was last renewed.
        self._read_before = 0
        #: When the source was opened.
        self._names: dict[str, frozenset[str]] = {}

    def open(self, opening: base.Opening) -> base.Facts:
        self._renewal = self._new_renewal()
        with contextlib.ExitStack() as stack:
            trusted = stack.enter_context(wire.authorities(self._location.access))
            self._engine = engine.Engine(self._location, trusted, self._cancel)
            stack.callback(self._engine.close)
            self._engine.log_in()
            self._state = before = self._find()
            self._pool = data.Pool(self.name, self._location.access, self._cancel)
            stack.callback(self._end, succeeded=False)
            self._begin()
            # Started before the disk is found again and its extents are read: that may outlast the ticket.
            self._renewal.start()
            stack.callback(self._renewal.end, engine.LONGEST_LOOK)

            def look() -> bytes:
                self._find_locked(before.identity)
                self._connect()
                self._extents = self._pool.extents()
                return filled.head(self, min(base.HEAD_SIZE, self._extents.end), self.name)

            # Retries on this transfer, as a new one waits for its lock.
            try:
                head = retry.patiently(look, self._patience.first, self._cancel)
            except errors.TransferFailed as err:
                raise errors.Transient(url=self.name, reason=err.fields["reason"]) from err
            state = self._state
            size, stated = self._extents.end, (state.snapshot or state.disk).provisioned_size
            # The data server serves a truncated volume to its end, whatever the engine states of the disk.
            if self._format == "raw" and stated and self._extents.end < stated:
                reason = f"{self.name}: the image transfer has {size} bytes, the disk {stated}"
                raise errors.SourceError(reason=f"{reason}; check the disk and its volumes in oVirt")
            self._names = state.names
            self._open = stack.pop_all()
        log.info("source disk=%r size=%r identity=%r", self._location.disk_id, size, state.identity)
        return base.Facts(
            name=self.name,
            size=size,
            head=head,
            identity=state.identity,
            format=self._format,
            previous_size=state.previous_size,
        )

    @property
    def extents(self) -> Callable[[], Iterator[base.Extent]] | None:
        has_zeros = self._format == "raw" and any(extent.zero for extent in self._extents)
        return (lambda: extents.coarse(self._extents)) if has_zeros else None

    def names(self, checkpoint: str) -> frozenset[str]:
        return self._names.get(checkpoint, frozenset({checkpoint}))

    def close(self) -> None:
        self._open.close()

    def stream(self, offset: int = 0) -> base.Reader:
        return readers.RangesReader(self.read_range, offset, self._extents.end)

    def read_range(self, offset: int, into: memoryview, /) -> int:
        """Read one range; see ``sources.base.RandomReader``."""
        generation = self._pool.generation
        try:
            count = self._pool.read(offset, into)
        except data.TicketRefused as err:
            self._recover(generation, offset)
            raise errors.Transient(url=self.name, reason=err.fields["reason"]) from err
        self._read += count
        self._refusals = 0
        return count

    def verify(self) -> None:
        """End the transfer. All data was read, and the transfer locks the disk."""
        self._end(succeeded=True)

    # -- disk and snapshot

    def _find(self) -> _State:
        """Find the disk and the snapshots. The active state of the disk has no snapshot."""
        disk = self._engine.disk(self._location.disk_id)
        current, previous = self._location.current, self._location.previous
        wanted = filter(None, (current, previous))
        snapshots = {checkpoint: self._engine.snapshot(disk, checkpoint) for checkpoint in wanted}
        snapshot, earlier = snapshots.get(current), snapshots.get(previous)
        if current and snapshot is None and disk.image_id != current:
            raise errors.Unreachable(url=self.name, reason=f"the disk has no snapshot {current}")
        identity = None
        if snapshot is not None:
            # A snapshot is immutable, but removing another snapshot can merge data into it.
            parts = (disk.id, snapshot.id, snapshot.snapshot and snapshot.snapshot.id)
            sizes = (snapshot.provisioned_size, snapshot.actual_size)
            identity = " ".join(str(part) for part in (*parts, *sizes, self._format))
        # An image that other data was merged into keeps its id, but then belongs to another snapshot.
        names = {
            checkpoint: frozenset({f"{checkpoint} of snapshot {found.snapshot.id}"})
            for checkpoint, found in snapshots.items()
            if found is not None and found.snapshot is not None and found.snapshot.id
        }
        return _State(disk, snapshot, identity, names, None if earlier is None else earlier.provisioned_size)

    # -- the transfer

    def _begin(self) -> None:
        """Start a transfer, once the disk is unlocked. It locks the disk, which is to be found again."""
        form = "cow" if self._format == "qcow2" else "raw"
        deadline = time.monotonic() + self._patience.locked
        while True:
            try:
                self._transfer = self._engine.transfer(self._state.disk, self._state.snapshot, form)
                break
            except engine.Locked as err:
                if time.monotonic() > deadline:
                    raise errors.Unreachable(url=self.name, reason=err.fields["reason"]) from err
                log.info("waiting for the locked disk reason=%s", err)
                self._pause(engine.LONGEST_LOOK)
                # The operation that holds the lock may change it.
                self._state = self._find()
        self._refusals = 0

    def _find_locked(self, before: str | None) -> None:
        """Find the disk again, which is locked now.

        Raises ``errors.SourceChanged`` if removing another snapshot has merged data into it since ``before``.
        """
        self._state = self._find()
        now = self._state.identity
        if now != before:
            raise errors.SourceChanged(url=self.name, what="snapshot", before=before, now=now)

    def _connect(self) -> None:
        """Wait until the transfer is ready, and connect to its data server."""
        if self._transfer is not None:
            urls = self._transfer.urls(self._patience.ready, self._pause)
            cancelling.run_apart(lambda: self._pool.connect(urls), self._cancel)

    def _pause(self, seconds: float) -> None:
        self._renewal.pause(seconds, self._cancel)

    def _recover(self, generation: int, offset: int) -> None:
        """Recover from a refused ticket of ``generation``, as the phase of the transfer requires.

        Raises ``errors.TransferFailed`` if the transfer was cancelled or cannot be replaced, and
        ``errors.Transient`` if the engine is unreachable.
        """
        with self._recovering:
            transfer = self._transfer
            if transfer is None or generation != self._pool.generation:
                return  # Another thread has recovered already.
            try:
                phase = transfer.phase()
            except engine.NotFound:
                phase = "forgotten by the engine"
            log.info("ticket refused transfer=%r phase=%r", transfer.id, phase)
            self._refusals += phase == "transferring"
            if phase == "transferring" and self._refusals < MAX_REFUSALS:
                transfer.extend()
                self._connect()
            elif phase == "paused_system":
                transfer.resume()
                self._connect()
            elif phase in transfer.BY_USER:
                reason = f"image transfer {transfer.id} was cancelled in the engine"
                raise errors.TransferFailed(url=self.name, offset=offset, reason=reason)
            elif phase not in {"initializing", "resuming", "paused_user"}:
                before = self._state.identity
                if before is None:
                    # The disk was unlocked meanwhile: its data may differ from the data read so far.
                    reason = f"the ticket of image transfer {transfer.id} has expired (phase {phase})"
                    raise errors.TransferFailed(url=self.name, offset=offset, reason=reason)
                transfer.end(self._limit, succeeded=False)
                self._begin()
                # The disk was unlocked until now.
                retry.patiently(lambda: self._find_locked(before), self._patience.first, self._cancel)
                self._connect()

    def _new_renewal(self) -> renewal.Renewal:
        return renewal.Renewal("ticket", self._renew, self._patience.renew)

    def _renew(self) -> None:
        """Renew the ticket, also while nothing is read: zeroing a target may take long."""
        if (transfer := self._transfer) is not None:
            before, self._read_before = self._read_before, self._read
            transfer.extend()
            if before == self._read:
                self._pool.read(0, memoryview(bytearray(512)))

    def _end(self, *, succeeded: bool) -> None:
        """End the transfer once, and wait until the disk is unlocked."""
        self._renewal.end()
        with self._recovering:
            transfer, self._transfer = self._transfer, None
        if transfer is None:
            return
        started = time.monotonic()
        self._pool.close()
        limit = self._limit if succeeded else lambda: self._patience.last
        phase = transfer.end(limit, succeeded=succeeded)
        if succeeded and phase not in {"finished_success", ""}:
            log.warning("all data was read, but transfer %r ended as %r", transfer.id, phase)
        with contextlib.suppress(errors.Error):
            while time.monotonic() - started < limit():
                if self._engine.disk(self._location.disk_id).status != engine.LOCKED:
                    break
                # The engine reports no events. Not ended by a cancel: the limit is shorter then.
                time.sleep(engine.FIRST_LOOK)

    def _limit(self) -> float:
        """Return the limit in seconds for the end of a transfer. It is shorter after a cancel."""
        return self._patience.last if self._cancel.is_set() else self._patience.end
