"""Measure one row in one setting."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Sequence

import pytest

from tests.bench import measure
from tests.bench.bench import Bench, Row, Side, Sides
from tests.bench.machine import Machine
from tests.bench.measure import Cost
from tests.bench.results import Result

#: In a pod, of the time of CDI's Go worker, and of a rival that is not a lower bound.
POD_AIM = 0.7
#: Characters of a failure in the report.
_LENGTH = 200


def row(bench: Bench, declared: Row, machine: Machine) -> Result:
    """Measure a row; a failure of a side is part of the result."""
    result = Result(declared.name, declared.target, declared.rival, declared.aim, curve=declared.curve)
    try:
        with declared.open(bench) as sides:
            if bench.is_alone:
                sides = dataclasses.replace(sides, rival=None, others=(), go=None, verdict=None)  # noqa: PLW2901
            _measure(bench, sides, result)
            result.limit = machine.limit(sides.work, declared.target)
    except pytest.skip.Exception as err:
        result.skipped = str(err)
    except Exception as err:  # noqa: BLE001  the other rows must still be measured
        result.skipped = f"{type(err).__name__}: {err}"[:_LENGTH]
    return result


def _measure(bench: Bench, sides: Sides, result: Result) -> None:
    compared = [sides.ours, *([sides.rival] if sides.rival else []), *sides.others]
    more = {name: side for name, side in (("Go", sides.go), ("before", bench.earlier(sides.ours))) if side}
    found = [_median(each) for each in alternate(bench, [*compared, *more.values()])]
    costs = [cost for cost in found[: len(compared)] if isinstance(cost, Cost)]
    others = {name: _split(each) for name, each in zip(more, found[len(compared) :], strict=True)}
    result.rounds = bench.rounds
    result.ours, result.failure = _split(found[0])
    failures = [f"{name}: {failure}" for name, (_, failure) in others.items() if failure]
    if sides.rival:
        result.rival, failure = _split(found[1])
        failures.insert(0, failure)
    result.go, result.before = (others.get(name, (None, ""))[0] for name in ("Go", "before"))
    result.rival_failure = "; ".join(filter(None, failures))
    if len(costs) == len(compared):
        result.ratio, result.note = sides.judge(costs)
    if not bench.setting.is_pod:
        return
    if result.ours and result.go:
        result.aim, result.ratio = POD_AIM, result.ours.wall / result.go.wall
    elif result.aim is not None and result.aim <= 1 and not sides.verdict:
        result.aim = POD_AIM


def alternate(bench: Bench, sides: Sequence[Side]) -> list[list[Cost] | str]:
    """Measure all sides in turn; return the costs of each. One that fails ends with its message."""
    costs: list[list[Cost]] = [[] for _ in sides]
    failures: dict[int, str] = {}
    for _ in range(bench.rounds):
        for number, side in enumerate(sides):
            if number in failures:
                continue
            # Only this file system: others on the machine may write a lot.
            subprocess.run(["sync", "--file-system", bench.file.parent], check=True)
            before = bench.group.killed() if bench.group else 0
            try:
                costs[number].append(side())
            except Exception as err:  # noqa: BLE001  whatever a side does wrong is its result
                killed = bench.group is not None and bench.group.killed() > before
                failures[number] = ("killed for memory; " if killed else "") + _short(str(err))
    return [failures.get(number) or found for number, found in enumerate(costs)]


def _median(found: list[Cost] | str) -> Cost | str:
    return found if isinstance(found, str) else measure.median(found)


def _split(found: Cost | str) -> tuple[Cost | None, str]:
    return (None, found) if isinstance(found, str) else (found, "")


def _short(text: str) -> str:
    """Return the end of a message, which says why, in one line for a table."""
    return " ".join(text.split())[-_LENGTH:].replace("|", "/")
