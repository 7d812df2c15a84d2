"""What imports cost, from the figures of the rows: ``deploy/costs.json``, for deploy/estimate.py."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from typing import Final

from tests.bench.compare import OURS
from tests.bench.measure import Cost
from tests.bench.report import Report
from tests.bench.rows import kinds
from tests.support import repository

FILE: Final = repository.ROOT / "deploy/costs.json"
SMALL: Final = "cost of a small disk, file"


def text(reports: Sequence[Report]) -> str:
    """Return the costs, the means of all reports that have them."""
    large = {kind: _mean(reports, f"cost of {kind}, file") for kind in kinds.KINDS}
    found = {kind: cost for kind, cost in large.items() if cost}
    small = _mean(reports, SMALL)
    assert small
    return json.dumps(kinds.known(small, found, lambda each: each.cpu), indent=1) + "\n"


def _mean(reports: Sequence[Report], key: str) -> Cost | None:
    """Return the mean cost of our side of a row, but the largest memory."""
    found: list[Cost] = [
        cost
        for report in reports
        if key in report.found and OURS in report.found[key].figures
        for cost in report.found[key].figures[OURS].costs
    ]
    if not found:
        return None
    return Cost(
        wall=statistics.fmean(each.wall for each in found),
        cpu=statistics.fmean(each.cpu for each in found),
        memory=max(each.memory for each in found),
        read=round(statistics.fmean(each.read for each in found)),
        written=round(statistics.fmean(each.written for each in found)),
    )
