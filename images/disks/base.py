"""A disk as the guest sees it, which delivers itself to a sink."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Final, NamedTuple, TypeAlias

from cdi_worker.formats import readers
from cdi_worker.images.sinks.base import Sink

#: Start and end of a part of the disk, in bytes.
Range: TypeAlias = tuple[int, int]

#: Counts bytes of the image that arrive.
Advance: TypeAlias = Callable[[int], None]
#: Opens the bytes of the disk, or of its image, as one ordered stream. The end of the block verifies what can
#: be verified at the end of the stream.
Opened: TypeAlias = Callable[[Advance], AbstractContextManager[readers.Reader]]

__all__ = ["EVERYTHING", "Advance", "Disk", "Meter", "Missing", "Opened", "Range", "Sink"]


#: Returns the parts of ranges that must be delivered, those of one range after those of another. Thread-safe.
Missing: TypeAlias = Callable[[Iterable[Range]], list[Range]]
EVERYTHING: Final[Missing] = list


def _nothing(_count: int) -> None:
    """Count nothing."""


class Meter(NamedTuple):
    """Counts bytes of the image while its disk is delivered. Thread-safe.

    ``advance``: they have arrived from the image. ``skip``: they are not read, and taken off the size of the
    image; negative: tables and data are so close that both are read twice. ``keep``: they are not read
    because their part of the disk is not missing. ``moved``: their part of the disk was delivered.
    """

    advance: Advance = _nothing
    skip: Callable[[int], None] = _nothing
    keep: Callable[[int], None] = _nothing
    moved: Callable[[int], None] = _nothing


class Disk(abc.ABC):
    """One disk. Sizes in bytes.

    ``size``: None while it is unknown. ``covers_all``: whether ``deliver`` covers the whole disk, or only
    what has changed since a checkpoint: these are ``declared`` bytes, after ``deliver``. ``repeats``: whether
    it can be delivered several times, and only what is missing then; a disk that follows a stream is
    delivered once and whole, whatever is missing. ``tentative``: what was delivered is certain only when
    ``deliver`` returns: its tables may come last. ``keep``: tells the sender of a stream which part (start,
    end) it may leave out, before ``deliver``. ``stored``, ``again``: for disks that verify their parts, set
    before ``deliver``: read what the target holds, and prepare it for another delivery of a part.
    """

    size: int | None = None
    covers_all: bool = True
    declared: int = 0
    repeats: bool = False
    tentative: bool = False
    keep: Callable[[int, int], None] | None = None
    stored: Callable[[int, int], bytes] | None = None
    again: Callable[[int, int], None] | None = None

    @abc.abstractmethod
    def deliver(self, sink: Sink, missing: Missing, meter: Meter) -> int:
        """Deliver each missing range to ``sink`` once, as data or zeros; return the size of the disk.

        Twice only after ``again``, in this thread.

        Ranges come in any order, from any thread. Data is valid only during the call of the sink. A failure
        of the sink ends all reads. When it returns or raises, no thread is in the sink.
        """
