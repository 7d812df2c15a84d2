"""The states of a device after a power cut, from a record of its writes and flushes."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.proofs.crash import recording


@dataclasses.dataclass(frozen=True)
class State:
    """The base, all writes of the epochs before ``epoch``, and of this epoch's writes ``arrived``."""

    epoch: int
    name: str
    arrived: Sequence[recording.Write]

    def __str__(self) -> str:
        return f"epoch {self.epoch}, {self.name}"


@dataclasses.dataclass(frozen=True)
class Limits:
    """How many states of each epoch: cuts between two writes, and random sets of whole and torn writes.

    ``unit``: bytes that the storage writes whole or not at all.
    """

    cuts: int
    sets: int
    unit: int


def states(epoch: int, writes: recording.Epoch, limits: Limits, dice: random.Random) -> Iterator[State]:
    """Yield states of a power cut during an epoch.

    Without a flush nothing is promised: any of the writes may be on the medium, in any order, and in part.
    """
    yield State(epoch, "nothing after the flush", ())
    if not writes:
        return
    ends: Sequence[int] = range(1, len(writes) + 1)
    if len(ends) > limits.cuts:
        ends = [*sorted(dice.sample(ends, limits.cuts - 1)), len(writes)]
    for end in ends:
        yield State(epoch, f"the first {end} of {len(writes)} writes", writes[:end])
    if len(writes) > 1:
        yield State(epoch, "only the last write", writes[-1:])
        yield State(epoch, "all but the first write", writes[1:])
    for number in range(limits.sets):
        arrived = [part for write in writes for part in _torn(write, limits.unit, dice)]
        yield State(epoch, f"set {number} of whole and torn writes", arrived)


def _torn(write: recording.Write, unit: int, dice: random.Random) -> Iterator[recording.Write]:
    """Yield the parts of a write that reach the medium: all, none, a beginning, or any units."""
    fate = dice.random()
    units = range(0, len(write.data), unit)
    if fate < 0.3:
        yield write
    elif fate < 0.5:
        yield recording.Write(write.offset, write.data[: unit * dice.randrange(len(units))])
    elif fate < 0.7:
        for at in units:
            if dice.random() < 0.5:
                yield recording.Write(write.offset + at, write.data[at : at + unit])


class Medium:
    """What a device holds: the file ``flushed`` in ``directory``. Epochs are added in their order."""

    def __init__(self, base: Path, directory: Path) -> None:
        self.flushed = directory / "flushed"
        self._copy = directory / "state"
        recording.copy_sparse(base, self.flushed)

    def add(self, epoch: recording.Epoch) -> None:
        """Apply all writes of an epoch, which were flushed."""
        _apply(self.flushed, epoch)

    @contextlib.contextmanager
    def after(self, state: State) -> Iterator[Path]:
        """Yield a file with a state, which the block may change."""
        recording.copy_sparse(self.flushed, self._copy)
        try:
            _apply(self._copy, state.arrived)
            yield self._copy
        finally:
            self._copy.unlink()


def _apply(path: Path, writes: Sequence[recording.Write]) -> None:
    with path.open("r+b", buffering=0) as stream:
        for write in writes:
            stream.seek(write.offset)
            stream.write(write.data)
