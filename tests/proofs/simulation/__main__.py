"""Run simulated worlds: ``--seeds 1000`` or ``--seconds 60``. ``--seed 17`` replays one, with its trace."""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import logging
import math
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tests.proofs.simulation import scheduler as schedulers
from tests.proofs.simulation import world as worlds

#: Seeds in which a fault of the product or of the simulator was found. They run before the others.
FOUND = (363, 10029, 10032)


@dataclasses.dataclass(frozen=True)
class Fault:
    """What is wrong with a seed. ``is_law``: a broken law; else an error of the simulator itself."""

    text: str
    is_law: bool

    def __str__(self) -> str:
        return self.text

    @classmethod
    def of(cls, seed: int, made: worlds.Plan, error: Exception) -> Fault:
        is_law = isinstance(error, schedulers.Broken)
        what = "broken law" if is_law else "ERROR OF THE SIMULATOR, nothing is known about this seed"
        trace = "".join(traceback.format_exception(error, limit=-3))
        return cls(f"seed {seed}: {what}\n{made}\n{trace}\n{_replay(seed)}", is_law)


class Outcome(NamedTuple):
    """``trace``: its checksum. ``runs``: how they ended. ``fault``: None if nothing is wrong."""

    trace: int
    runs: list[str]
    fault: Fault | None


def run(seed: int, machines: worlds.Machines, *, tell: bool = False) -> Outcome:
    """Run the world of a seed."""
    made = worlds.plan(seed)
    world = worlds.World(made, seed, machines, tell=print if tell else None)
    try:
        return Outcome(world.go(), world.law.outcomes, None)
    except Exception as err:  # noqa: BLE001 (also an error of the simulator is reported, with its seed)
        return Outcome(world.scheduler.trace, world.law.outcomes, Fault.of(seed, made, err))


def _replay(seed: int) -> str:
    return f"replay it: .venv/bin/python -m tests.proofs.simulation --seed {seed}"


def several(
    seeds: Iterable[int], root: Path = worlds.ROOT, *, traces: bool = False, until: float = math.inf
) -> tuple[int, collections.Counter[str], list[Fault]]:
    """Run seeds, none after ``until`` (``time.monotonic``).

    Return their number, how many runs had which outcome, and what is wrong.
    """
    machines = worlds.Machines(root)
    outcomes: collections.Counter[str] = collections.Counter()
    wrong, count = [], 0
    for seed in seeds:
        if time.monotonic() > until:
            break
        count += 1
        outcome = run(seed, machines)
        outcomes.update(outcome.runs)
        if traces:
            print(f"seed {seed}: trace {outcome.trace:08x}")
        if outcome.fault is not None:
            wrong.append(outcome.fault)
    return count, outcomes, wrong


def _unraisable(ignored: sys.UnraisableHookArgs) -> None:
    """Say nothing of a process that was killed while Python ended a pool of threads that nobody refers to."""
    if "weakref_cb" not in repr(ignored.object):
        sys.__unraisablehook__(ignored)


def be_quiet() -> None:
    """Print no exceptions that Python ignores where a killed process ends."""
    sys.unraisablehook = _unraisable


class _Log(logging.Handler):
    """Makes the log of the product a part of the trace."""

    def emit(self, record: logging.LogRecord) -> None:
        if schedulers.running is not None:
            schedulers.running.say(f"log {record.getMessage()}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.proofs.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="number of seeds")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="run no further seeds after that time"
    )
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="replay this one, and print its schedule and its trace")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--root", type=Path, default=worlds.ROOT, help="another copy of the tree")
    parser.add_argument("--traces", action="store_true", help="print the checksum of each trace")
    given = parser.parse_args()
    if given.seed is not None:
        return _replay_one(given.seed, given.root)
    return _run_all(given)


def _replay_one(seed: int, root: Path) -> int:
    logging.basicConfig(level=logging.DEBUG, handlers=[_Log()])
    print(worlds.plan(seed))
    trace, outcomes, fault = run(seed, worlds.Machines(root), tell=True)
    print(fault or f"seed {seed}: trace {trace:08x} {outcomes}")
    return fault is not None


def _run_all(given: argparse.Namespace) -> int:
    logging.disable()
    began = time.monotonic()
    count, outcomes, wrong = 0, collections.Counter[str](), list[Fault]()
    seeds = [*range(given.first, given.first + given.seeds)]
    if not given.traces:
        seeds = [*FOUND, *seeds]
    with concurrent.futures.ProcessPoolExecutor(given.processes, initializer=be_quiet) as pool:
        parts = [
            pool.submit(
                several,
                seeds[part :: given.processes],
                given.root,
                traces=given.traces,
                until=began + given.seconds,
            )
            for part in range(given.processes)
        ]
        for part in parts:
            number, counted, failed = part.result()
            count += number
            outcomes.update(counted)
            wrong += failed
    for each in sorted(wrong, key=lambda fault: fault.is_law)[:5]:
        print(each)
    seconds = time.monotonic() - began
    broke = sum(each.is_law for each in wrong)
    print(
        f"{count} seeds from {given.first} in {seconds:.0f} s: {broke} broke the law, "
        f"{len(wrong) - broke} errors of the simulator; runs: {dict(outcomes)}"
    )
    if is_idle := outcomes["success"] + outcomes["resumed"] < count // 2:
        print("hardly a run succeeds: that no law is broken says nothing")
    return bool(wrong) or is_idle


if __name__ == "__main__":
    sys.exit(main())
