"""What the kernel tells of this process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cdi_worker.images import kernel


@pytest.mark.parametrize(
    ("text", "limit"),
    [("75000 100000\n", 0.75), ("max 100000\n", None), ("6400000 100000\n", 64.0), ("", None), ("1 0", None)],
)
def test_limit_of_a_pod_is_one_of_cpus(tmp_path: Path, text: str, limit: float | None) -> None:
    path = tmp_path / "cpu.max"
    path.write_text(text)
    usable = len(os.sched_getaffinity(0))
    assert kernel.processors(str(path)) == (usable if limit is None else min(usable, limit))


def test_cpus_are_known_without_a_limit(tmp_path: Path) -> None:
    assert kernel.processors(str(tmp_path / "missing")) == len(os.sched_getaffinity(0))
