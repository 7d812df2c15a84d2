"""The base class of targets: the life of a disk, from the first byte until it is usable."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Final, Literal, NamedTuple, Self, TypeAlias

from cdi_worker import errors, units
from cdi_worker.images.engine import cancelling
from cdi_worker.images.targets import claim, file_format, storage

log = logging.getLogger(__name__)


Mode: TypeAlias = Literal["new", "update", "delta"]


class TargetOptions(NamedTuple):
    """How to open and write a target.

    ``preallocate``: allocate storage for every byte. ``direct``: bypass the page cache if the storage
    supports it. ``mode``: ``new`` writes a disk, with ``resume`` over the left-over of an earlier attempt.
    The others change a finished one: ``delta`` parts of it, in place; ``update`` keeps it usable until the
    first change, before which it calls ``begun`` with the path. ``cancel`` ends a long zeroing with
    ``errors.Cancelled``. ``claim``: the target's, held by the caller; None: claim it
    until it is closed. ``sectors``: read the first sector of each file of the source again, from storage.
    ``existing``: what happens to a disk at the path: ``replace`` it when the new one is complete, ``remove``
    it before the new one is written, or ``refuse`` to. ``permissions`` of a new file; None: by the umask.
    ``form``: of the file; None: raw.
    """

    preallocate: bool = False
    direct: bool = False
    mode: Mode = "new"
    resume: bool = False
    begun: Callable[[str], None] = lambda _: None
    cancel: cancelling.Cancel = cancelling.NEVER
    claim: claim.Claim | None = None
    sectors: Callable[[], list[bytes]] = list
    existing: Literal["replace", "remove", "refuse"] = "replace"
    permissions: int | None = None
    form: file_format.Qcow2Format | None = None


NEW: Final = TargetOptions()


class Target:
    """A disk being written: each range once, in any order, from any thread, then ``commit``.

    Ranges that are neither written nor zeroed have undefined content. Errors: ``storage.Storage``; writing
    beyond ``size`` or the end of the device raises ``errors.TooLarge``. As a context manager it is closed
    at the end, which removes a disk that was not committed, unless another run writes to it.

    ``storage``: its bytes. Sinks that compare read them there.
    """

    #: Whether the bytes of an earlier attempt are kept. Without them its journal must be ignored.
    resumed: bool = False
    #: Bytes at the start that are stored only by ``commit``: a journal must not list them as finished.
    withheld: int = 0
    #: Whether the end of the ``with`` block leaves it open: a ``group.Group`` publishes and closes it.
    is_detached: bool = False
    #: Whether it is a device, whose end is not that of the disk.
    is_device: bool = False

    def __init__(self, stored: storage.Storage, size: int | None, options: TargetOptions) -> None:
        self.path = stored.path
        #: The path for programs that write to the target themselves.
        self.written_path = stored.path
        self.storage = stored
        self.size = size
        #: Whether the disk may have been changed: one that is updated stays as it is until then.
        self.has_begun = options.mode != "update"
        #: Closed with the target.
        self.owned = contextlib.ExitStack()
        self.owned.callback(stored.close)
        self._limit = size
        self._options = options
        self._end = size or 0
        self._kept = False
        self._closed = False
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.is_detached:
            self.close()

    def write(self, offset: int, data: memoryview) -> None:
        """Write ``data``, which may be reused on return."""
        self.reach(offset + len(data))
        self._begin()
        self.storage.write(offset, data)

    def zero(self, offset: int, length: int) -> None:
        """Make a range read as zeros, at the latest on the next ``flush``."""
        self.reach(offset + length)
        if length:
            self._begin()
        self.storage.zero(offset, offset + length)

    def reach(self, end: int) -> None:
        """Extend the disk to ``end``, even if nothing is written."""
        if self._limit is not None and end > self._limit:
            raise errors.TooLarge(virtual_size=end, available=self._limit)
        if end > self._end:
            with self._lock:
                self._end = max(self._end, end)

    def cut(self, end: int) -> None:
        """Set the end of a new disk that is smaller than was expected; nothing was delivered after it."""
        self._end = end

    def zero_rest(self, start: int) -> None:
        """Zero everything from ``start``, the end of the disk: a later stage of it may be longer."""
        if self.size is not None and self.size > start:
            self.zero(start, self.size - start)

    def extend(self, end: int, size: int) -> None:
        """Zero a device from the ``end`` of the image to ``size``; a file is extended by ``commit``."""

    def flush(self) -> None:
        """Write everything written and zeroed so far to stable storage, except the withheld bytes."""
        with self.storage.guard("sync"):
            self.storage.sync()
            self._check_claim()

    def commit(self, size: int = 0) -> None:
        """Make the disk durable and usable. The target cannot be written after it.

        A file is extended to ``size`` bytes if that is larger than the image; it is never shrunk.
        """
        self.prepare(size)
        self.publish()

    def prepare(self, size: int = 0) -> None:
        """Do all of ``commit`` that can fail before the disk becomes usable."""
        with self.storage.guard("sync"):
            self.settle(size)
            end = units.whole_sectors(self._end)
            if self.has_begun:
                # After the end of a short disk, the withheld bytes are zeros.
                self.storage.zero(self._end, max(end, self.withheld))
            self._ready(max(size, end))

    def publish(self) -> None:
        """Make the disk usable, which is prepared."""
        with self.storage.guard("sync"):
            self._check_claim()
            if self.has_begun:
                self._finish()
            self.owned.close()
            self._closed = True

    def settle(self, size: int = 0) -> None:
        """Begin an update that changes only the end of the disk. ``commit`` does it, too."""

    def keep(self) -> None:
        """Keep the written bytes on ``close``, so that a later attempt can resume."""
        self._kept = True

    def close(self) -> None:
        """Close the target. A disk that was not committed stays unusable. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for step in (self._abandon, self.owned.close):
            try:
                step()
            except (OSError, errors.TargetError) as err:
                # Only the first failure is reported. The target of another run is left as it is.
                log.debug("clean-up failed path=%r error=%r", self.path, str(err))

    def _begin(self) -> None:
        """Make a finished disk unusable, before its first change."""
        if not self.has_begun:
            with self._lock, self.storage.guard("write"):
                if not self.has_begun:
                    self._disable()
                    self._options.begun(self.written_path)
                    self.storage.fsync()
                    self.has_begun = True

    # -- implemented by the sub-classes

    def _disable(self) -> None:
        """Make the finished disk unusable, but keep it: the change may be interrupted."""
        raise NotImplementedError

    def _ready(self, size: int, /) -> None:
        """Make a disk of ``size`` bytes durable where it is not usable yet."""
        raise NotImplementedError

    def _finish(self) -> None:
        """Make the disk usable."""
        raise NotImplementedError

    def _abandon(self) -> None:
        """Leave no usable disk if it has begun. Check the claim before anything is changed or removed."""
        raise NotImplementedError

    def _check_claim(self) -> None:
        """Raise ``errors.TargetLost`` if another run has taken the target over."""
        self.storage.claim.check()
