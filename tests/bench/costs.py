"""What imports cost, from the figures of the rows: ``deploy/costs.json``, for deploy/estimate.py."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from typing import Final

from tests.bench.compare import OURS
from tests.bench.measure import Cost
from tests.bench.report import Report
from tests.bench.rows import kinds, scale
from tests.support import repository

FILE: Final = repository.ROOT / "deploy/costs.json"
#: Many imports at once, and one after the other: what each costs more while others wait for the CPUs.
CROWD: Final = f"{scale.CROWD} imports at once, file"
SMALL: Final = "cost of a small disk, file"


def text(reports: Sequence[Report]) -> str:
    """Return the costs, the medians of all reports that have them."""
    large = {kind: _typical(reports, f"cost of {kind}, file") for kind in kinds.KINDS}
    found = {kind: cost for kind, cost in large.items() if cost}
    small = _typical(reports, SMALL)
    assert small
    crowds = [report.found[CROWD] for report in reports if CROWD in report.found]
    times = [each.figures[OURS].cpu / each.figures[each.row.rival].cpu for each in crowds]
    made = {"crowded": round(statistics.fmean(times), 2)}
    return json.dumps(made | kinds.known(small, found, lambda each: each.cpu), indent=1) + "\n"


def _typical(reports: Sequence[Report], key: str) -> Cost | None:
    """Return the medians of our side of a row, and the largest memory."""
    found: list[Cost] = [
        cost
        for report in reports
        if key in report.found and OURS in report.found[key].figures
        for cost in report.found[key].figures[OURS].costs
    ]
    if not found:
        return None
    return Cost(
        wall=statistics.median(each.wall for each in found),
        cpu=statistics.median(each.cpu for each in found),
        memory=max(each.memory for each in found),
        read=round(statistics.median(each.read for each in found)),
        written=round(statistics.median(each.written for each in found)),
    )
