"""Run imports or upload servers one after another in this process, and print what they leave behind.

    python -m tests.proofs.soak.runs imports|uploads DIRECTORY COUNT

``DIRECTORY`` holds ``steps`` (see ``tests.proofs.soak.steps``). The last line is a JSON document.
"""

from __future__ import annotations

import dataclasses
import filecmp
import json
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.proofs.soak import steps, usage
from tests.support import oracle


def main(kind: str, place: str, count: int) -> None:
    """Run the steps in turn, ``count`` in total, and print the usage after half of them and after all.

    The first half loads libraries, fills caches, and grows the heaps of the C library's arenas.
    """
    directory = Path(place)
    made: Sequence[steps.Step] = pickle.loads((directory / "steps").read_bytes())
    run = {"imports": steps.run_import, "uploads": steps.Uploads(directory).run}[kind]
    work = directory / "work"
    started = time.monotonic()
    half = count // 2
    before = _run_all(run, made, work, half)
    after = _run_all(run, made, work, count - half, before)
    outcome = {
        "before": dataclasses.asdict(before),
        "after": dataclasses.asdict(after),
        "rises": after.above(before),
        "grown": after.memory - before.memory,
        "seconds": time.monotonic() - started,
    }
    print(json.dumps(outcome))


def _run_all(
    run: Callable[[steps.Step, Path], None],
    made: Sequence[steps.Step],
    work: Path,
    count: int,
    before: usage.Usage | None = None,
) -> usage.Usage:
    for number in range(count):
        step = made[number % len(made)]
        work.mkdir(exist_ok=True)
        run(step, step.device or work / "disk.img")
        _check(step, work)
    return usage.Usage.settled(work, before)


def _check(step: steps.Step, work: Path) -> None:
    target = step.device or work / "disk.img"
    if step.expected is None:
        assert step.device or not target.exists(), f"{step.name}: {target} exists"
    elif step.device is not None:
        oracle.same(step.device, step.expected, beyond=None)
    else:
        assert filecmp.cmp(target, step.expected, shallow=False), f"{step.name}: wrong disk"
        target.unlink()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
