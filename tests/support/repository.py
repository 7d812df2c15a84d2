"""Paths in the repository that tests use."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Example DataVolumes, one YAML file each.
DATAVOLUMES = ROOT / "tests/support/datavolumes"
#: The manifests generated for the examples, as reviewed.
GOLDEN = ROOT / "tests/support/golden"


def programs() -> list[str]:
    """Return the programs of docs/reference/library.md; other blocks are indented, parts of a package."""
    page = (ROOT / "docs" / "reference" / "library.md").read_text()
    return re.findall(r"^```python\n(.*?)```", page, re.DOTALL | re.MULTILINE)
