"""Each word of the glossary is in the code, under the name that the glossary says."""

from __future__ import annotations

import dataclasses
import importlib
import re
from typing import Any

import pytest

from tests.support import repository

TEXT = (repository.ROOT / "docs/glossary.md").read_text()
ROWS = [tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in TEXT.splitlines() if "| `" in line]
NAMES = re.findall(r"`((?:importer|sources|images|formats|scratch|errors)\.[\w.]+)`", TEXT)


def found(name: str) -> Any:
    """Return the object with this name below ``cdi_worker``. Raises ``AttributeError``."""
    parts = ["cdi_worker", *name.split(".")]
    for end in range(len(parts), 0, -1):
        try:
            here: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            if dataclasses.is_dataclass(here) and part in {each.name for each in dataclasses.fields(here)}:
                return part
            here = getattr(here, part)
        return here
    raise AttributeError(name)


@pytest.mark.parametrize("name", NAMES)
def test_name_exists(name: str) -> None:
    found(name)


def test_words_are_explained_once_and_in_order() -> None:
    words = [word for word, *_ in ROWS]
    assert len(NAMES) == len(ROWS) + 1
    assert words == sorted(set(words))


def test_missing_name_is_noticed() -> None:
    with pytest.raises(AttributeError):
        found("importer.plan.Detour")
