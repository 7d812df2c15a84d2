"""The image's lock file holds what the project asks for."""

from __future__ import annotations

import re
import tomllib

from packaging import requirements, utils

from tests.support import worker


def test_every_requirement_is_locked() -> None:
    """A dependency that is new or raised needs `make lock`."""
    project = tomllib.loads((worker.ROOT / "pyproject.toml").read_text())["project"]
    text = (worker.ROOT / "requirements.lock").read_text()
    locked = dict(re.findall(r"^([\w.-]+)==([^\s;\\]+)", text, re.MULTILINE))
    extras = project["optional-dependencies"].values()
    wanted = [
        requirements.Requirement(line) for lines in (project["dependencies"], *extras) for line in lines
    ]
    for each in wanted:
        name = utils.canonicalize_name(each.name)
        if name != project["name"]:
            assert name in locked, f"make lock: {name}"
            assert each.specifier.contains(locked[name]), f"make lock: {each}"


def test_every_locked_file_has_a_hash() -> None:
    text = (worker.ROOT / "requirements.lock").read_text()
    for block in re.split(r"^(?=[\w])", text, flags=re.MULTILINE)[1:]:
        assert "--hash=sha256:" in block, block
