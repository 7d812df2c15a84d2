"""Simulated storage: files and devices whose last writes may be lost or torn, and a directory of them."""

from __future__ import annotations

import itertools
import random
import stat
from collections.abc import Iterable, Iterator

SECTOR = 512
CHUNK = 64 << 10
ZEROS = bytes(CHUNK)


class Sparse:
    """Bytes of any length. Chunks of zeros take no memory, so that a disk may be longer than 4 GiB."""

    def __init__(self, data: bytes = b"") -> None:
        self.length = 0
        #: By number. None of them is all zeros.
        self.chunks: dict[int, bytes] = {}
        self.write(0, data)

    def __len__(self) -> int:
        return self.length

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sparse) and self.length == other.length and self.chunks == other.chunks

    __hash__ = None  # type: ignore[assignment]

    def copy(self) -> Sparse:
        made = Sparse()
        made.length, made.chunks = self.length, dict(self.chunks)
        return made

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes of a range, as far as there are any."""
        end = min(end, self.length)
        if start >= end:
            return b""
        first, last = start // CHUNK, (end - 1) // CHUNK
        found = [self.chunks.get(number, ZEROS) for number in range(first, last + 1)]
        found[-1] = found[-1][: end - last * CHUNK]
        found[0] = found[0][start - first * CHUNK :]
        return found[0] if len(found) == 1 else b"".join(found)

    def write(self, offset: int, data: bytes) -> None:
        """Write a range; what is between it and the end of before is zeros."""
        done = 0
        while done < len(data):
            number, skip = divmod(offset + done, CHUNK)
            piece = data[done : done + CHUNK - skip]
            done += len(piece)
            if len(piece) < CHUNK:
                old = self.chunks.get(number, ZEROS)
                piece = b"".join((old[:skip], piece, old[skip + len(piece) :]))
            self._set(number, piece)
        self.length = max(self.length, offset + len(data))

    def zero(self, start: int, end: int) -> None:
        """Zero a range."""
        first, last = -(-start // CHUNK), end // CHUNK
        if first > last:
            self.write(start, bytes(end - start))
            return
        self.write(start, bytes(first * CHUNK - start))
        if last - first < len(self.chunks):
            for number in range(first, last):
                self.chunks.pop(number, None)
        else:
            self.chunks = {number: data for number, data in self.chunks.items() if not first <= number < last}
        self.write(last * CHUNK, bytes(end - last * CHUNK))
        self.length = max(self.length, end)

    def resize(self, size: int) -> None:
        if size < self.length:
            length, self.length = self.length, size
            last = size // CHUNK
            self.chunks = {number: data for number, data in self.chunks.items() if number <= last}
            if last in self.chunks and size < length:
                self._set(last, self.chunks[last][: size % CHUNK].ljust(CHUNK, b"\0"))
        self.length = size

    def begins_with(self, other: Sparse, end: int) -> bool:
        """Return whether the first ``end`` bytes are those of another one, of which they may be the end."""
        last = end // CHUNK
        mine = {number: data for number, data in self.chunks.items() if number < last}
        theirs = {number: data for number, data in other.chunks.items() if number < last}
        return mine == theirs and self.read(last * CHUNK, end) == other.read(last * CHUNK, end).ljust(
            min(end, self.length) - last * CHUNK, b"\0"
        )

    def data(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of chunks that are not zeros."""
        for number in sorted(self.chunks):
            first, after = max(start, number * CHUNK), min(end, (number + 1) * CHUNK)
            if first < after:
                yield first, after

    def _set(self, number: int, data: bytes) -> None:
        if data == ZEROS:
            self.chunks.pop(number, None)
        else:
            self.chunks[number] = data


#: A change of storage: offset and bytes, offset and number of zeros, or the new length alone.
Change = tuple[int, bytes | int] | int


class Storage:
    """The bytes of a file or a device.

    ``view``: what is read. ``stable``: what is left after a power failure; a write reaches it with ``sync``,
    and without one perhaps: completely, in part (single sectors), or not.
    """

    def __init__(self, data: Sparse | None = None, sector: int = SECTOR) -> None:
        self.sector = sector
        self.view = Sparse() if data is None else data
        self.stable = self.view.copy()
        #: Changes since the last sync.
        self.pending: list[Change] = []
        #: The number of changes.
        self.changes = 0

    def write(self, offset: int, data: bytes) -> None:
        self._change((offset, data))

    def zero(self, offset: int, length: int) -> None:
        self._change((offset, length))

    def resize(self, size: int) -> None:
        self._change(size)

    def _change(self, change: Change) -> None:
        self.changes += 1
        apply(self.view, change)
        self.pending.append(change)

    def sync(self) -> None:
        """Make all writes stable."""
        for each in self.pending:
            apply(self.stable, each)
        self.pending.clear()

    def fail_sync(self, dice: random.Random) -> None:
        """Lose some writes for ever, as Linux does: the next sync succeeds, and reads may show them."""
        self.lose(dice, evict=dice.random() < 0.5)

    def lose(self, dice: random.Random, *, evict: bool = True) -> None:
        """Lose writes that are not synced. ``evict``: what is read shows it at once."""
        self.stable = self.after_power_cut(dice)
        self.pending.clear()
        if evict:
            self.evict()

    def after_power_cut(self, dice: random.Random) -> Sparse:
        """Return what a power failure might leave."""
        left = self.stable.copy()
        for each in self.pending:
            fate = dice.random()
            if isinstance(each, int) or fate < 0.4:
                if fate < 0.7:
                    apply(left, each)
            elif fate < 0.7:
                _tear(left, each, self.sector, dice)
        return left

    def with_only(self, start: int, end: int) -> Sparse:
        """Return what is left if of all pending writes this range alone has reached storage."""
        left = self.stable.copy()
        for each in self.pending:
            _apply_part(left, each, start, end)
        return left

    def without(self, start: int, end: int) -> Sparse:
        """Return what is left if of all pending writes this range alone has not reached storage."""
        left = self.stable.copy()
        for each in self.pending:
            if isinstance(each, int):
                apply(left, each)
            else:
                _apply_part(left, each, 0, start)
                _apply_part(left, each, end, span(each)[1])
        return left

    def evict(self) -> None:
        """Drop the page cache, as far as it is not waiting to be written."""
        if not self.pending:
            self.view = self.stable.copy()


def apply(into: Sparse, change: Change) -> None:
    if isinstance(change, int):
        into.resize(change)
    elif isinstance(change[1], int):
        into.zero(change[0], change[0] + change[1])
    else:
        into.write(change[0], change[1])


def span(change: Change) -> tuple[int, int]:
    """Return the first byte of a change and the one after its last; nothing for a new length."""
    if isinstance(change, int):
        return 0, 0
    offset, data = change
    return offset, offset + (data if isinstance(data, int) else len(data))


def part(change: tuple[int, bytes | int], start: int, end: int) -> tuple[int, bytes | int]:
    """Return the part of a change from ``start`` to ``end``."""
    offset, data = change
    return start, end - start if isinstance(data, int) else data[start - offset : end - offset]


def _apply_part(into: Sparse, change: Change, start: int, end: int) -> None:
    if isinstance(change, int):
        return
    first, after = span(change)
    start, end = max(start, first), min(end, after)
    if start < end:
        apply(into, part(change, start, end))


def _tear(into: Sparse, change: tuple[int, bytes | int], sector: int, dice: random.Random) -> None:
    """Write some of the sectors of a change: those before a point, or any."""
    parts = list(_sectors(*span(change), sector))
    if dice.random() < 0.5:
        parts = parts[: dice.randrange(len(parts) + 1)]
    else:
        kept = dice.getrandbits(len(parts)) if parts else 0
        parts = [each for number, each in enumerate(parts) if kept >> number & 1]
    for start, end in parts:
        apply(into, part(change, start, end))


def _sectors(start: int, after: int, sector: int) -> Iterator[tuple[int, int]]:
    """Split a range into sectors, a long one into pieces of several sectors."""
    step = max(sector, (after - start) // 4096 // sector * sector)
    while start < after:
        end = min(after, start + step - start % SECTOR)
        yield start, end
        start = end


class Inode:
    """A file, a device or a directory."""

    _numbers = itertools.count(100)

    def __init__(self, kind: int, data: Sparse | None = None, sector: int = SECTOR) -> None:
        self.number = next(Inode._numbers)
        self.kind = kind
        self.mode = 0o660
        self.data = Storage(data, sector)
        self.attributes: dict[str, bytes] = {}
        self._stable_attributes: dict[str, bytes] = {}
        self.links = 1
        #: Changes since the last sync of a directory: name, and the new inode (None: removed).
        self.entries: dict[str, Inode] = {}
        self.stable: dict[str, Inode] = {}
        self._pending: list[list[tuple[str, Inode | None]]] = []
        #: Open file descriptions with a lock on it: with the kind of the lock, and the node.
        self.held: list[tuple[object, str, int]] = []

    @property
    def is_device(self) -> bool:
        return stat.S_ISBLK(self.kind)

    def change(self, *changes: tuple[str, Inode | None]) -> None:
        """Change entries of a directory, all or none of them."""
        _enter(self.entries, changes)
        self._pending.append(list(changes))

    def sync(self) -> None:
        self.data.sync()
        self.stable = dict(self.entries)
        self._stable_attributes = dict(self.attributes)
        self._pending.clear()

    def states(self) -> Iterator[dict[str, Inode]]:
        """Yield what a power failure might leave of a directory: changes up to one of them, as a journal."""
        state = dict(self.stable)
        yield state
        for changes in self._pending:
            _enter(state, changes)
            yield state

    def lose(self, dice: random.Random) -> None:
        """Lose what is not synced."""
        self.data.lose(dice)
        if dice.random() < 0.5:
            self.attributes = dict(self._stable_attributes)
        states = [dict(state) for state in self.states()]
        self.entries = dice.choice(states)
        self.sync()


def _enter(entries: dict[str, Inode], changes: Iterable[tuple[str, Inode | None]]) -> None:
    for name, inode in changes:
        if inode is None:
            entries.pop(name, None)
        else:
            entries[name] = inode


class Disk:
    """All storage of one world, by path: ``/data`` is a directory, ``/dev/…`` are devices."""

    def __init__(self) -> None:
        self.directory = Inode(stat.S_IFDIR)
        self.devices: dict[str, Inode] = {}

    def add_device(self, path: str, data: Sparse, sector: int = SECTOR) -> Inode:
        self.devices[path] = Inode(stat.S_IFBLK, data, sector)
        return self.devices[path]

    def lose(self, dice: random.Random) -> None:
        """Lose what is not synced: the power failed."""
        for inode in (*self.directory.entries.values(), *self.devices.values()):
            inode.lose(dice)
        self.directory.lose(dice)
