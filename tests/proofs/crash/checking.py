"""Record one import, and check what every power cut during it would have left."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.proofs.crash import media, recording, states
from tests.support import devices, processes

#: The number of epochs of which more states are checked: at the start, when an old disk is made unusable, and
#: at the end, with the commit.
FIRST, LAST = 3, 8

#: Writes a disk to a target; the second path is a directory for scratch.
Run = Callable[[Path, Path], object]


def _as_it_is(target: Path, _directory: Path) -> Path:
    return target


@dataclasses.dataclass(frozen=True)
class Import:
    """An import whose writes are recorded.

    ``earlier``: the disk that the target holds before, written by ``before``; it may still be there after a
    power cut. ``in_place``: an update of a device, which is not whole until it has ended. ``rest``: the byte
    that fills a device after the disk. ``read`` returns a file with the guest's bytes of an accepted disk; it
    may write one into a directory.
    """

    run: Run
    expected: Path
    before: Run | None = None
    earlier: Path | None = None
    in_place: bool = False
    rest: bytes = devices.DIRT
    read: Callable[[Path, Path], Path] = _as_it_is


@dataclasses.dataclass
class Figures:
    """What was checked: states, those with an accepted disk, and runs that followed a state."""

    states: int = 0
    accepted: int = 0
    reruns: int = 0
    violations: list[str] = dataclasses.field(default_factory=list)

    def counted(self) -> dict[str, int]:
        """Return the figures by their names."""
        return {
            "states": self.states,
            "states with a disk": self.accepted,
            "runs after a state": self.reruns,
            "violations": len(self.violations),
        }


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much to check: states of an epoch, of how many epochs, and runs after a state.

    Of the other epochs, only the state right after their first flush is checked.
    """

    epochs: int
    cuts: int
    sets: int
    reruns: int


@dataclasses.dataclass
class Check:
    """The check of one import on one kind of storage; ``directory`` must be empty."""

    kind: media.Kind
    made: Import
    directory: Path
    plan: Plan
    seed: str
    figures: Figures = dataclasses.field(default_factory=Figures)

    def run(self) -> Figures:
        """Record the import, check all states, and run the import again after some of them."""
        base = self.directory / "base"
        self.kind.prepare(base)
        if self.made.before is not None:
            with self._attached(base) as target:
                self.made.before(target, self._scratch(target))
        place = self.directory / "recording"
        place.mkdir()
        with recording.recorded(place, base, self.kind.sector) as recorder:
            with (
                self.kind.target(recorder.device, self.directory) as target,
                self.kind.neighbour(target),
            ):
                self.made.run(target, self._scratch(target))
                # What follows is not needed: the import has reported success.
                end = recorder.position()
            epochs = recorder.epochs(end)
            self._check_record(recorder)
        self._replay(base, epochs)
        return self.figures

    def _check_record(self, recorder: recording.Recorder) -> None:
        """Check that the record is complete: it leads to the content of the device."""
        place = self.directory / "replayed"
        place.mkdir()
        medium = states.Medium(recorder.base, place)
        for epoch in recorder.epochs(recorder.position()):
            medium.add(epoch)
        processes.run("cmp", medium.flushed, recorder.data)
        shutil.rmtree(place)

    def _replay(self, base: Path, epochs: list[recording.Epoch]) -> None:
        dice = random.Random(self.seed)
        medium = states.Medium(base, self.directory)
        limits = states.Limits(self.plan.cuts, self.plan.sets, self.kind.unit)
        numbers = range(len(epochs))
        rest = numbers[FIRST:-LAST]
        thorough = {*numbers[:FIRST], *numbers[-LAST:], *dice.sample(rest, min(len(rest), self.plan.epochs))}
        chosen = [dice.randrange(len(epochs)) for _ in range(self.plan.reruns)]
        for number, epoch in enumerate(epochs):
            found = list(states.states(number, epoch, limits, dice))
            found = found if number in thorough else found[:1]
            again = {dice.randrange(len(found)) for _ in range(chosen.count(number))}
            for index, state in enumerate(found):
                with medium.after(state) as path:
                    self._check(state, path, ended=number == len(epochs) - 1)
                    if index in again:
                        self._run_again(state, path)
            medium.add(epoch)

    def _check(self, state: states.State, path: Path, *, ended: bool) -> None:
        """Check a state; ``ended``: after the last flush, when the import had ended or was about to."""
        self.figures.states += 1
        with self._attached(path) as target:
            accepted = self.kind.accepted(target, self.made.expected)
            self.figures.accepted += accepted
            allowed = tuple(disk for disk in (self.made.expected, self.made.earlier) if disk)
            try:
                if ended:
                    assert accepted, f"{target} has no disk after the end"
                    media.whole(self._read(target), (self.made.expected,), self.made.rest)
                elif accepted and not self.made.in_place:
                    media.whole(self._read(target), allowed, self.made.rest)
            except AssertionError as err:
                self.figures.violations.append(f"{state}: {err}")

    def _read(self, target: Path) -> Path:
        return self.made.read(target, self.directory)

    def _run_again(self, state: states.State, path: Path) -> None:
        self.figures.reruns += 1
        with self._attached(path) as target:
            self.made.run(target, self._scratch(target))
            try:
                media.whole(self._read(target), (self.made.expected,), self.made.rest)
            except AssertionError as err:
                self.figures.violations.append(f"run after {state}: {err}")

    @contextlib.contextmanager
    def _attached(self, path: Path) -> Iterator[Path]:
        with (
            devices.attached(path, sector=self.kind.sector, direct=False) as device,
            self.kind.target(device, self.directory) as target,
        ):
            yield target

    def _scratch(self, target: Path) -> Path:
        """Return a directory for scratch: on a file system beside the target, so that it is cut off, too."""
        parent = self.directory if target.is_block_device() else target.parent
        scratch = parent / "scratch"
        scratch.mkdir(exist_ok=True)
        return scratch
