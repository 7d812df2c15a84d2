"""The programs of the page about the library; ``importer.test_library`` runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support import repository


def test_documented_programs_are_short_and_typed(tmp_path: Path) -> None:
    paths = []
    # The first one is the overview.
    for number, code in enumerate(repository.programs()[1:]):
        assert code.count("\n") <= 25, code
        paths.append(tmp_path / f"program{number}.py")
        paths[-1].write_text(code)
    # The cache of ``make check`` has most of what they import.
    subprocess.run([sys.executable, "-m", "mypy", "--strict", *paths], cwd=repository.ROOT, check=True)
