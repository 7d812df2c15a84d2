"""A disk as the guest sees it, which delivers itself to a sink."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from cdi_worker.formats import readers, views
from cdi_worker.images.sinks.base import Sink
from cdi_worker.scratch.ranges import Range

if TYPE_CHECKING:
    from cdi_worker.formats import clone

#: A run of a disk: the length of a hole in bytes, data, or a part that the target holds already.
Run: TypeAlias = "int | memoryview | clone.Kept"
#: Is called with numbers of bytes of the image that have arrived.
Advance: TypeAlias = Callable[[int], None]
#: Opens the bytes of the disk, or of its image, as one ordered stream. The end of the block verifies what can
#: be verified at the end of the stream.
OpenStream: TypeAlias = Callable[[Advance], AbstractContextManager[readers.Reader]]

__all__ = ["EVERYTHING", "Advance", "DeliveryMeter", "Disk", "Missing", "OpenStream", "Range", "Run", "Sink"]


#: Returns the parts of ranges that must be delivered, in the order of the ranges. Thread-safe.
Missing: TypeAlias = Callable[[Iterable[Range]], list[Range]]
EVERYTHING: Final[Missing] = list


class DeliveryMeter(NamedTuple):
    """Counts bytes of the image while its disk is delivered. Thread-safe.

    ``advance``: bytes that arrived. ``skip``: bytes that are not needed, subtracted from the total; negative
    if bytes are read twice, because tables and data are close together. ``keep``: bytes that are not read,
    because their part of the disk is not missing. ``moved``: bytes whose part of the disk was delivered.
    """

    advance: Advance = lambda _: None
    skip: Callable[[int], None] = lambda _: None
    keep: Callable[[int], None] = lambda _: None
    moved: Callable[[int], None] = lambda _: None


class Stored(NamedTuple):
    """A part of a disk, from ``start`` to ``end``, that the target holds. ``read`` returns its bytes."""

    start: int
    end: int
    read: views.Read


class Disk(abc.ABC):
    """One disk. Sizes in bytes.

    ``size``: None while it is unknown. ``covers_all``: whether ``deliver`` covers the whole disk, or only
    what has changed since a checkpoint: these are ``declared`` bytes, after ``deliver``. ``repeats``: whether
    ``deliver`` can be called again, for the missing ranges only; a disk that follows a stream is delivered
    once, and always whole. ``tentative``: delivered data may turn out wrong until ``deliver`` returns: the
    tables may come last. ``keep``: of a disk that is read in order; it is called before ``deliver`` with the
    part that the target holds, which is then not read from the source.
    """

    size: int | None = None
    covers_all: bool = True
    declared: int = 0
    repeats: bool = False
    tentative: bool = False
    keep: Callable[[Stored], None] | None = None

    @property
    def resumes(self) -> bool:
        """Whether what the target holds of it need not be read again."""
        return self.repeats or self.keep is not None

    @abc.abstractmethod
    def deliver(self, sink: Sink, missing: Missing, meter: DeliveryMeter) -> int:
        """Deliver each missing range to ``sink`` once, as data or zeros; return the size of the disk.

        Ranges come in any order, from any thread. Data is valid only during the call of the sink. A failure
        of the sink ends all reads. When it returns or raises, no thread is in the sink.
        """
