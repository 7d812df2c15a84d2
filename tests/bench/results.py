"""The figures of a run, kept as a JSON file that the report reads."""

from __future__ import annotations

import dataclasses
import datetime as dt
import fcntl
import json
from pathlib import Path
from typing import Any

from tests.bench.measure import Cost

#: A row this close to the machine's limit cannot be much faster, whatever its rival takes.
NEAR = 1.2


@dataclasses.dataclass
class Result:
    """The figures of one row in one setting. ``ratio`` is what ``aim`` bounds; ``limit``: the machine's."""

    name: str
    target: str
    rival_is: str = ""
    aim: float | None = None
    ours: Cost | None = None
    rival: Cost | None = None
    go: Cost | None = None
    #: Of another version of the worker.
    before: Cost | None = None
    ratio: float | None = None
    note: str = ""
    limit: tuple[str, float] | None = None
    curve: tuple[str, int] | None = None
    #: Why a side has no figures.
    failure: str = ""
    rival_failure: str = ""
    skipped: str = ""
    rounds: int = 0
    date: str = ""

    @property
    def is_near_limit(self) -> bool:
        """Return whether the machine allows hardly more."""
        return bool(self.ours and self.limit and self.ours.wall <= NEAR * self.limit[1])

    @property
    def verdict(self) -> str:
        """Return whether the aim is met."""
        if self.skipped:
            return "not run"
        if self.failure:
            return "**failed**"
        if self.aim is None or self.ratio is None:
            return ""
        if self.ratio <= self.aim:
            return "ok"
        return "limit" if self.is_near_limit else "**missed**"


class Results:
    """A file of results: by setting and row. ``rates``: of the machine, by setting."""

    def __init__(self, path: Path) -> None:
        self._path = path
        known = json.loads(path.read_text()) if path.exists() else {}
        self.rates: dict[str, dict[str, float]] = known.get("rates", {})
        self.rows: dict[str, dict[str, Result]] = {
            setting: {key: _result(value) for key, value in rows.items()}
            for setting, rows in known.get("rows", {}).items()
        }

    def keep(self, setting: str, key: str, result: Result) -> None:
        """Add a result, or replace it, with the rates of its setting; others may write to the file, too."""
        result.date = str(dt.datetime.now(dt.UTC).date())
        self.rows.setdefault(setting, {})[key] = result
        with self._path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            saved = Results(self._path)
            saved.rows.setdefault(setting, {})[key] = result
            saved.rates[setting] = self.rates.get(setting, {})
            saved.save(self._path)

    def save(self, path: Path) -> None:
        """Write the file."""
        rows = {
            setting: {key: dataclasses.asdict(result) for key, result in found.items()}
            for setting, found in self.rows.items()
        }
        path.write_text(json.dumps({"rates": self.rates, "rows": rows}, indent=1) + "\n")


def _result(value: dict[str, Any]) -> Result:
    for side in ("ours", "rival", "go", "before"):
        if value.get(side):
            value[side] = Cost(**value[side])
    return Result(**value)
