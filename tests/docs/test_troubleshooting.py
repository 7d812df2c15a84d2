"""docs/troubleshooting.md has every error: its message as in the code, its cause and its cure."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator

import pytest

from cdi_worker import errors
from tests.support import repository

PAGE = (repository.ROOT / "docs/troubleshooting.md").read_text()
CLASSES = [
    found for _, found in inspect.getmembers(errors, inspect.isclass) if issubclass(found, errors.Error)
]
#: The section of each class: from its heading to the next one.
SECTIONS = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", PAGE, re.DOTALL | re.MULTILINE))


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: str(kind.__name__))
def test_error_has_message_cause_and_cure(kind: type[errors.Error]) -> None:
    section = SECTIONS.get(kind.__name__, "")
    assert section, f"docs/troubleshooting.md: add ### {kind.__name__}"
    message, *_ = re.findall(r"```text\n(.*?)\n```", section, re.DOTALL)
    assert " ".join(message.split()) == kind.template
    assert f"Exit status {kind.status}" in section
    assert ("retried" in section) == kind.retryable, "say 'may be retried' of a retryable error only"
    for part in ("Cause", "Cure"):
        assert re.search(rf"^\*\*{part}\.\*\* \S", section, re.MULTILINE), f"{kind.__name__}: no {part}"


def test_page_has_no_error_that_does_not_exist() -> None:
    assert set(SECTIONS) == {kind.__name__ for kind in CLASSES}


def test_every_safety_rule_is_explained() -> None:
    rows = re.findall(r"^\| `([\w ]+)` \| \S.* \| \S.* \|$", SECTIONS["Refused"], re.MULTILINE)
    assert set(rows) == set(rules())


def rules() -> Iterator[str]:
    """Yield the rules by which the code refuses images and archives."""
    for part in ("cdi_worker", "importer", "sources", "images", "formats"):
        for path in (repository.ROOT / part).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call):
                    yield from _rule(node)


def _rule(call: ast.Call) -> Iterator[str]:
    name = ast.unparse(call.func).rpartition(".")[2]
    if name == "Refused":
        given = [each.value for each in call.keywords if each.arg == "rule"]
    elif name in {"refuse", "refused", "_refused"}:
        # ``facts.refuse`` has the format first.
        given = call.args[1:2] if name == "refuse" else call.args[:1]
    else:
        return
    yield from (each.value for each in given if isinstance(each, ast.Constant))
