"""The quick tests (``make quick``): no server, no device, no root, and no Python but forks of a prepared one.

It is decided for a file from its text, before it is imported, and then for each test from its fixtures. What
takes a second or more, with all its cases, is marked as ``slow``.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from tests.support import repository

TESTS = repository.ROOT / "tests"
#: Folders that make test does not run.
OTHERS = frozenset({"bench", "check", "image", "proofs"})
#: Modules of ``tests.support`` that start servers or need root: so does what imports them or has such a text.
STARTING = frozenset({"devices", "limits", "servers", "threaded"})
TEXTS = ("sys.executable", "need_root", "processes.running", "create_server", "socketserver", "unshare")
#: Modules that only offer to start something.
OFFERING = frozenset({"forked", "processes", "worker"})
#: What a file imports of ``tests.support``. Each process of the tests looks at all files: with ``ast`` that
#: takes a second.
IMPORT = re.compile(r"^ *from tests\.support(?:\.(\w+)[\w.]*)? import (\([^)]*\)|.*)", re.MULTILINE)


@functools.cache
def has_quick_tests(path: Path) -> bool:
    """Report whether a file may have quick tests."""
    return path.relative_to(TESTS).parts[0] not in OTHERS and not _starts(path)


def is_quick(item: pytest.Item) -> bool:
    """Report whether a test of such a file is not slow, and no fixture of it starts something."""
    assert isinstance(item, pytest.Function)
    if item.get_closest_marker("slow"):
        return False
    fixtures = [each for found in item._fixtureinfo.name2fixturedefs.values() for each in found]
    used = {name for each in fixtures for name in each.func.__code__.co_names}
    return not any(_starts_module(name) for name in used)


@functools.cache
def _starts_module(name: str) -> bool:
    path = TESTS / "support" / f"{name}.py"
    return name in STARTING or (name not in OFFERING and path.exists() and _starts(path))


def _starts(path: Path) -> bool:
    text = path.read_text()
    return any(each in text for each in TEXTS) or any(map(_starts_module, _imports(text)))


def _imports(text: str) -> set[str]:
    """Return the modules of ``tests.support`` that are imported."""
    found = set()
    for module, names in IMPORT.findall(text):
        found |= {module} if module else set(re.findall(r"\w+", names))
    return found
