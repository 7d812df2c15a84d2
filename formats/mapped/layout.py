"""What a format knows of one image: where everything lies, at random and as it comes."""

from __future__ import annotations

import abc
import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from cdi_worker import errors
from cdi_worker.formats import views
from cdi_worker.formats.mapped.pieces import Batch, Inflate, Piece


class Arrival(NamedTuple):
    """What the bytes that came mean.

    ``ready``: what can be placed now; a batch that begins before the new bytes lies in what was kept.
    ``holes``: (offset, length) on the disk that reads as zeros. ``keep``: spans (start, end) of the
    new bytes that may turn out to be needed.
    """

    ready: list[Batch]
    holes: Iterable[tuple[int, int]]
    keep: list[tuple[int, int]]


class Follower(abc.ABC):
    """Follows one image of ``virtual_size`` bytes. Offsets are those of the file."""

    virtual_size: int
    inflate: Inflate

    @property
    @abc.abstractmethod
    def mapped(self) -> bool:
        """Tell whether all tables have passed, so that what is not expected now is not needed."""

    @abc.abstractmethod
    def arrive(self, start: int, end: int, read: views.Read, *, last: bool) -> Arrival:
        """Take note that the bytes from ``start`` to ``end`` came, the ``last`` of the file or not.

        Both are multiples of 512 and of a cluster, except at the end. ``read(offset, length)`` gives
        bytes that came now or were kept.
        """


class Claims(abc.ABC):
    """What of a file is spoken for so far: nothing may serve two purposes.

    ``size``: bytes of the file, ``passing.UNKNOWN`` for a stream. What is taken already raises
    ``errors.Corrupt``.
    """

    def __init__(self, name: str, size: int) -> None:
        self.size = size
        #: The least length that a file with these claims has.
        self.required = 0
        self._name = name

    def reach(self, end: int) -> None:
        """Raise ``errors.Truncated`` if the file ends before."""
        if end > self.size:
            reason = f"the tables need {end} bytes, the file has {self.size}"
            raise errors.Truncated(format=self._name, reason=reason)
        self.required = max(self.required, end)

    @abc.abstractmethod
    def take_tables(self, tables: Iterable[Piece], /) -> None:
        """Claim for all the tables of the second level, once and before any data."""

    @abc.abstractmethod
    def take_pieces(self, found: Iterable[Piece], /) -> None:
        """Claim for data, given in the file's order."""


class Layout(abc.ABC):
    """How one image is laid out, as its header tells. Sizes and offsets in bytes.

    ``unit``: what the format calls the pieces of a disk. ``crowded``: whether a stream of the image may tell
    of more pieces than are remembered. ``entry``: the form of a table's entries, for ``views.entries``.
    ``directory``: offset and length of the table of the first level. ``fixed``: spans (start, end) of the
    file that are neither tables of the second level nor data. ``inflate``: thread-safe.
    """

    format: str
    unit: str
    crowded: bool
    entry: str
    virtual_size: int
    table_entries: int
    directory: tuple[int, int]
    fixed: Sequence[tuple[int, int]]
    inflate: Inflate

    @abc.abstractmethod
    def claims(self, size: int, /) -> Claims:
        """Return the claims of a file of ``size`` bytes before its tables are known."""

    @abc.abstractmethod
    def tables(self, directory: array.array[int], /) -> Iterator[Piece]:
        """Yield the tables of the second level; ``guest`` and ``size`` are what each maps."""

    @abc.abstractmethod
    def decode(self, data: bytes | memoryview, guest: int, /) -> list[Piece]:
        """Return the pieces, in the disk's order, of the table that maps the disk from ``guest``.

        What no piece covers reads as zeros.
        """

    @abc.abstractmethod
    def follow(self) -> Follower:
        """Return what follows the image when it comes in order."""
