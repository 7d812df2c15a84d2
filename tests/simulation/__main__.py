"""Run simulated worlds: ``--seeds 1000`` runs a thousand, ``--seed 17`` replays one and prints its trace."""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import logging
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

from tests.simulation import scheduler as schedulers
from tests.simulation import world as worlds


def run(seed: int, machines: worlds.Machines, *, tell: bool = False) -> tuple[int, list[str], str]:
    """Return the trace's checksum, the outcomes of the runs, and what is wrong (empty: nothing)."""
    made = worlds.plan(seed)
    world = worlds.World(made, seed, machines, tell=print if tell else None)
    try:
        return world.go(), world.law.outcomes, ""
    except AssertionError:
        wrong = f"seed {seed}\n{made}\n{traceback.format_exc(limit=-3)}\n{_replay(seed)}"
        return world.scheduler.trace, world.law.outcomes, wrong


def _replay(seed: int) -> str:
    return f"replay it: .venv/bin/python -m tests.simulation --seed {seed}"


def several(
    seeds: Iterable[int], root: Path = worlds.ROOT, *, traces: bool = False
) -> tuple[collections.Counter[str], list[str]]:
    """Run seeds; return how many runs had which outcome, and what is wrong."""
    machines = worlds.Machines(root)
    outcomes: collections.Counter[str] = collections.Counter()
    wrong = []
    for seed in seeds:
        trace, found, fault = run(seed, machines)
        outcomes.update(found)
        if traces:
            print(f"seed {seed}: trace {trace:08x}")
        if fault:
            wrong.append(fault)
    return outcomes, wrong


class _Log(logging.Handler):
    """Makes the log of the product a part of the trace."""

    def emit(self, record: logging.LogRecord) -> None:
        if schedulers.running is not None:
            schedulers.running.say(f"log {record.getMessage()}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="number of seeds")
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
    trace, outcomes, wrong = run(seed, worlds.Machines(root), tell=True)
    print(wrong or f"seed {seed}: trace {trace:08x} {outcomes}")
    return bool(wrong)


def _run_all(given: argparse.Namespace) -> int:
    logging.disable()
    began = time.monotonic()
    outcomes, wrong = collections.Counter[str](), list[str]()
    seeds = range(given.first, given.first + given.seeds)
    with concurrent.futures.ProcessPoolExecutor(given.processes) as pool:
        parts = [
            pool.submit(several, seeds[part :: given.processes], given.root, traces=given.traces)
            for part in range(given.processes)
        ]
        for part in parts:
            counted, failed = part.result()
            outcomes.update(counted)
            wrong += failed
    for each in wrong[:5]:
        print(each)
    seconds = time.monotonic() - began
    print(f"{given.seeds} seeds in {seconds:.0f} s: {len(wrong)} broke the law; runs: {dict(outcomes)}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
