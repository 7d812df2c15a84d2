"""REUSE.toml: the licence and the authors of every file (``make check`` runs ``reuse lint``)."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import repository

REUSE = Path(sys.executable).with_name("reuse")


def reuse(tree: Path, command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([REUSE, command], cwd=tree, capture_output=True, text=True, check=False)


def test_files_of_others_name_their_authors() -> None:
    stated = dict(
        re.findall(
            r"^FileName: \./(.+)\n(?:.+\n)+?FileCopyrightText: (.+)",
            reuse(repository.ROOT, "spdx").stdout,
            re.MULTILINE,
        )
    )
    foreign = {name for name, text in stated.items() if "the cdi-worker authors" not in text}
    fixtures = {path for path in stated if path.startswith("tests/support/cosign/")}
    schemas = {
        path
        for path in stated
        if path.endswith(".json") and "Apache-2.0" in (repository.ROOT / path).read_text()
    }
    assert len(fixtures) > 10
    assert len(schemas) == 2
    assert foreign == fixtures | schemas


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree that is not a clone, with one file."""
    for name in ("REUSE.toml", "LICENSE", "LICENSES"):
        path = repository.ROOT / name
        (shutil.copytree if path.is_dir() else shutil.copy)(path, tmp_path / name)
    (tmp_path / "module.py").write_text("pass\n")
    return tmp_path


def test_file_without_header_is_ours(tree: Path) -> None:
    assert reuse(tree, "lint").returncode == 0
    assert "<text>SPDX-FileCopyrightText: 2026 the cdi-worker authors</text>" in reuse(tree, "spdx").stdout


# REUSE-IgnoreStart
def test_file_with_another_licence_is_refused(tree: Path) -> None:
    (tree / "copied.c").write_text("/* SPDX-License-Identifier: GPL-2.0-only */\n")
    done = reuse(tree, "lint")
    assert done.returncode == 1
    assert "GPL-2.0-only" in done.stdout


# REUSE-IgnoreEnd
