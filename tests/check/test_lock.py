"""requirements.lock covers all requirements of the project."""

from __future__ import annotations

import re
import tomllib

from packaging import requirements, utils

from tests.support import repository


def test_lock_file_satisfies_every_requirement() -> None:
    """Run ``make lock`` after adding or raising a dependency."""
    project = tomllib.loads((repository.ROOT / "pyproject.toml").read_text())["project"]
    text = (repository.ROOT / "requirements.lock").read_text()
    locked = dict(re.findall(r"^([\w.-]+)==([^\s;\\]+)", text, re.MULTILINE))
    extras = project["optional-dependencies"].values()
    required = [
        requirements.Requirement(line) for lines in (project["dependencies"], *extras) for line in lines
    ]
    for requirement in required:
        name = utils.canonicalize_name(requirement.name)
        if name != project["name"]:
            assert name in locked, f"make lock: {name}"
            assert requirement.specifier.contains(locked[name]), f"make lock: {requirement}"


def test_lock_file_has_hash_for_every_package() -> None:
    text = (repository.ROOT / "requirements.lock").read_text()
    for block in re.split(r"^(?=[\w])", text, flags=re.MULTILINE)[1:]:
        assert "--hash=sha256:" in block, block
