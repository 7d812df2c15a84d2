"""The interface of a built-in disk format: the layout of an image, read at random or as a stream."""

from __future__ import annotations

import abc
import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from cdi_worker import errors
from cdi_worker.formats import views
from cdi_worker.formats.mapped.pieces import Batch, Inflate, Piece


class Arrival(NamedTuple):
    """What to do after new bytes have arrived.

    ``ready``: batches to place now; one that begins before the new bytes is in the kept bytes. ``holes``:
    (offset, length) of parts of the disk that read as zeros. ``keep``: spans (start, end) of the new bytes
    that may be needed later.
    """

    ready: list[Batch]
    holes: Iterable[tuple[int, int]]
    keep: list[tuple[int, int]]


class Follower(abc.ABC):
    """Interpret the stream of one image of ``virtual_size`` bytes. Offsets are offsets in the file."""

    virtual_size: int
    inflate: Inflate

    @property
    @abc.abstractmethod
    def mapped(self) -> bool:
        """Return whether all tables have arrived, so that bytes no table refers to can be discarded."""

    @property
    def complete(self) -> bool:
        """Return whether the disk is complete: the rest of the file, if there is any, is not needed."""
        return False

    @abc.abstractmethod
    def arrive(self, start: int, end: int, read: views.Read, *, last: bool) -> Arrival:
        """Process the arrival of the bytes from ``start`` to ``end``; ``last``: the file ends there.

        Both are multiples of 512 and of the cluster size, except at the end. ``read(offset, length)``
        returns bytes that arrived now or were kept.
        """


class Allocation(abc.ABC):
    """The bytes of a file that are in use, to detect overlaps: no byte may be used twice.

    ``size``: bytes of the file, ``passing.UNKNOWN`` for a stream. Bytes already in use raise
    ``errors.Corrupt``.
    """

    def __init__(self, name: str, size: int) -> None:
        self.size = size
        #: Minimum length of a file with this allocation.
        self.required = 0
        self._name = name

    def reach(self, end: int) -> None:
        """Raise ``errors.Truncated`` if the file ends before ``end``."""
        if end > self.size:
            reason = f"the tables need {end} bytes, the file has {self.size} bytes"
            raise errors.Truncated(format=self._name, reason=reason)
        self.required = max(self.required, end)

    @abc.abstractmethod
    def take_tables(self, tables: Iterable[Piece], /) -> None:
        """Take all second-level tables. Call it once, before ``take_pieces``."""

    @abc.abstractmethod
    def take_pieces(self, data: Iterable[Piece], /) -> None:
        """Take data, given in file order."""


class Layout(abc.ABC):
    """The layout of one image, from its header. Sizes and offsets in bytes.

    ``unit``: the format's word for its allocation units, in plural. ``crowded``: whether a stream may expect
    more than ``passing.LIMIT`` pieces at once. ``entry``: layout of a table entry, for ``views.entries``.
    ``directory``: offset and length of the first-level table. ``map_length``: bytes of a block map, which
    qemu-img would keep in memory. ``fixed``: spans (start, end) of the file that hold neither second-level
    tables nor data. ``inflate``: thread-safe.
    """

    format: str
    unit: str
    crowded: bool
    entry: str
    virtual_size: int
    table_entries: int
    directory: tuple[int, int]
    map_length: int = 0
    fixed: Sequence[tuple[int, int]]
    inflate: Inflate

    @abc.abstractmethod
    def allocation(self, size: int, /) -> Allocation:
        """Return the allocation of header and directory in a file of ``size`` bytes."""

    @abc.abstractmethod
    def tables(self, directory: array.array[int], /) -> Iterator[Piece]:
        """Yield the second-level tables; ``guest`` and ``size`` are the part of the disk that each maps."""

    @abc.abstractmethod
    def decode(self, data: bytes | memoryview, guest: int, /) -> list[Piece]:
        """Return the pieces, in disk order, of the table that maps the disk from ``guest``.

        Parts of the disk without a piece read as zeros.
        """

    @abc.abstractmethod
    def follow(self) -> Follower:
        """Return the follower for a stream of the image."""
