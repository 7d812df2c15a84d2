"""Simulated storage: files and devices whose last writes may be lost or torn, and a directory of them."""

from __future__ import annotations

import itertools
import random
import stat
from collections.abc import Iterator

SECTOR = 512


class Storage:
    """The bytes of a file or a device.

    ``view``: what is read. ``stable``: what is left after a power failure; a write reaches it with ``sync``,
    and without one perhaps: completely, in part (single sectors), or not.
    """

    def __init__(self, data: bytes = b"") -> None:
        self.view = bytearray(data)
        self.stable = bytearray(data)
        #: Writes since the last sync: offset and bytes. Offset None: cut or extended to the length in bytes.
        self._pending: list[tuple[int, bytes] | int] = []

    def write(self, offset: int, data: bytes) -> None:
        _put(self.view, offset, data)
        self._pending.append((offset, data))

    def resize(self, size: int) -> None:
        _resize(self.view, size)
        self._pending.append(size)

    def sync(self) -> None:
        """Make all writes stable."""
        for each in self._pending:
            _apply(self.stable, each)
        self._pending.clear()

    def fail_sync(self, dice: random.Random) -> None:
        """Lose some writes for ever, as Linux does: the next sync succeeds, and reads may show them."""
        self.lose(dice, evict=dice.random() < 0.5)

    def lose(self, dice: random.Random, *, evict: bool = True) -> None:
        """Lose writes that are not synced. ``evict``: what is read shows it at once."""
        for each in self._pending:
            fate = dice.random()
            if isinstance(each, int) or fate < 0.4:
                if fate < 0.7:
                    _apply(self.stable, each)
            elif fate < 0.7:
                _tear(self.stable, *each, dice)
        self._pending.clear()
        if evict:
            self.evict()

    def evict(self) -> None:
        """Drop the page cache, as far as it is not waiting to be written."""
        if not self._pending:
            self.view[:] = self.stable


def _apply(into: bytearray, change: tuple[int, bytes] | int) -> None:
    if isinstance(change, int):
        _resize(into, change)
    else:
        _put(into, *change)


def _put(into: bytearray, offset: int, data: bytes) -> None:
    if offset > len(into):
        _resize(into, offset)
    into[offset : offset + len(data)] = data


def _resize(data: bytearray, size: int) -> None:
    del data[size:]
    data.extend(bytes(size - len(data)))


def _tear(into: bytearray, offset: int, data: bytes, dice: random.Random) -> None:
    """Write some of the sectors of ``data``: those before a point, or any."""
    parts = list(_sectors(offset, data))
    if dice.random() < 0.5:
        parts = parts[: dice.randrange(len(parts) + 1)]
    else:
        kept = dice.getrandbits(len(parts)) if parts else 0
        parts = [part for number, part in enumerate(parts) if kept >> number & 1]
    for start, piece in parts:
        _put(into, start, piece)


def _sectors(offset: int, data: bytes) -> Iterator[tuple[int, bytes]]:
    start = 0
    while start < len(data):
        end = min(len(data), start + SECTOR - (offset + start) % SECTOR)
        yield offset + start, data[start:end]
        start = end


class Inode:
    """A file, a device or a directory."""

    _numbers = itertools.count(100)

    def __init__(self, kind: int, data: bytes = b"") -> None:
        self.number = next(Inode._numbers)
        self.kind = kind
        self.mode = 0o660
        self.data = Storage(data)
        self.attributes: dict[str, bytes] = {}
        self.links = 1
        #: Changes since the last sync of a directory: name, and the new inode (None: removed).
        self.entries: dict[str, Inode] = {}
        self.stable: dict[str, Inode] = {}
        self._pending: list[list[tuple[str, Inode | None]]] = []

    @property
    def is_device(self) -> bool:
        return stat.S_ISBLK(self.kind)

    def change(self, *changes: tuple[str, Inode | None]) -> None:
        """Change entries of a directory, all or none of them."""
        for name, inode in changes:
            if inode is None:
                self.entries.pop(name, None)
            else:
                self.entries[name] = inode
        self._pending.append(list(changes))

    def sync(self) -> None:
        self.data.sync()
        self.stable = dict(self.entries)
        self._pending.clear()

    def lose(self, dice: random.Random) -> None:
        """Lose what is not synced. A directory keeps its changes up to one of them, as with a journal."""
        self.data.lose(dice)
        kept = dice.randrange(len(self._pending) + 1)
        pending, self._pending = self._pending[:kept], []
        self.entries = self.stable
        for changes in pending:
            self.change(*changes)
        self.sync()


class Disk:
    """All storage of one world, by path: ``/data`` is a directory, ``/dev/…`` are devices."""

    def __init__(self) -> None:
        self.directory = Inode(stat.S_IFDIR)
        self.devices: dict[str, Inode] = {}

    def add_device(self, path: str, data: bytes) -> Inode:
        self.devices[path] = Inode(stat.S_IFBLK, data)
        return self.devices[path]

    def lose(self, dice: random.Random) -> None:
        """Lose what is not synced: the power failed."""
        for inode in (*self.directory.entries.values(), *self.devices.values()):
            inode.lose(dice)
        self.directory.lose(dice)
