"""An import that reports success is on storage, and what a power cut leaves before is no disk.

Here with two of the ways to write a disk; all of them, and all states: ``make crash``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.proofs.crash import checking, imports

PLAN = checking.Plan(epochs=1, cuts=2, sets=3, reruns=1)


# The old disk must not stay usable; an upload syncs its data once, not with each journal.
@pytest.mark.slow
@pytest.mark.parametrize("case", [("raw-over-a-disk", "block512"), ("upload", "ext4-busy")], ids="-".join)
def test_power_cut_leaves_no_incomplete_disk(
    case: tuple[str, str], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    imports.check(case, request, tmp_path, PLAN)
