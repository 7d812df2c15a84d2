"""Paths in the repository that tests use."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Example DataVolumes, one YAML file each.
DATAVOLUMES = ROOT / "tests/support/datavolumes"
#: The manifests generated for the examples, as reviewed.
GOLDEN = ROOT / "tests/support/golden"
