"""docs/troubleshooting.md has every error: its messages, from the code, its cause and its cure."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator

import pytest

from cdi_worker import errors
from tests.support import repository

sys.path.insert(0, str(repository.ROOT / "docs"))
import messages
import tables

PAGE = (repository.ROOT / "docs/troubleshooting.md").read_text()
#: All errors but the base class that nothing raises by itself.
CLASSES = [
    found
    for _, found in inspect.getmembers(errors, inspect.isclass)
    if issubclass(found, errors.Error) and found is not errors.ImageError
]
#: The section of each class: from its heading to the next one.
SECTIONS = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", PAGE, re.DOTALL | re.MULTILINE))


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: str(kind.__name__))
def test_error_has_cause_cure_and_messages(kind: type[errors.Error]) -> None:
    section = SECTIONS.get(kind.__name__, "")
    assert section, f"docs/troubleshooting.md: add ### {kind.__name__}"
    for part in ("Cause", "Cure"):
        assert re.search(rf"^\*\*{part}\.\*\* \S", section, re.MULTILINE), f"{kind.__name__}: no {part}"
    assert f"```{{printed}} {kind.__name__}\n```" in section
    made = "\n".join(tables.printed(kind.__name__))
    assert f"Exit status {kind.status}" in made
    assert ("retried" in made) == kind.retryable
    for text in (kind.phrase + kind.template, kind.terminal):
        assert all(words in made for words in re.split(r"\{[^}]*\}", text))


def _shown(kind: str, printed: str) -> bool:
    """Whether the reasons of ``kind`` have a message."""
    return any(
        re.search(".+".join(map(re.escape, text.split(messages.DETAILS))), printed)
        for text in messages.reasons()[kind]
        if len(re.findall(r"\w+", text)) > 1
    )


@pytest.mark.parametrize(
    ("kind", "printed"),
    [
        ("RequestError", "unsupported URL scheme 'htp'; did you mean 'http'?"),
        ("RequestError", "an archive cannot be written to standard output; name a folder"),
        ("Unreachable", "x: connection refused; check host and port, and that the server runs"),
        ("Unreachable", "the disk has no snapshot 1"),
        ("Unreachable", "server answers 404 Not Found; check the URL"),
        ("Transient", "the server closed the connection"),
        ("WrongRanges", "206 response without a valid Content-Range"),
        ("Refused", "the image is encrypted (method 2); decrypt it first"),
        ("Corrupt", "L1 entry 7 is malformed"),
        ("Truncated", "the file has 512 bytes, less than a header"),
        ("TargetError", "has several hard links, and would change under all; copy it, and change the copy"),
        ("TargetBusy", "it is mounted, or another program uses it; unmount it"),
        ("ScratchRequired", "the image's mapping tables are too large for memory"),
        ("Untrusted", "no OpenPGP signature in it"),
    ],
)
def test_page_has_the_words_that_are_printed(kind: str, printed: str) -> None:
    assert _shown(kind, printed)


def test_reasons_are_those_of_the_program_and_no_others() -> None:
    found = messages.reasons()
    assert set(found) <= set(messages.KINDS)
    assert sum(map(len, found.values())) > 600
    assert not _shown("Corrupt", "no message of ours")


def test_page_has_no_error_that_does_not_exist() -> None:
    assert set(SECTIONS) == {kind.__name__ for kind in CLASSES}
    assert "ImageError" not in messages.reasons()


def test_every_safety_rule_is_explained() -> None:
    """A row has the rules with the same cure; each rule is in one row."""
    cells = re.findall(r"^\| (`[\w `,]+`) \| \S.* \|$", SECTIONS["Refused"], re.MULTILINE)
    explained = [rule for cell in cells for rule in re.findall(r"`([\w ]+)`", cell)]
    assert sorted(explained) == sorted(set(rules()))


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
