"""What the tests of signatures share."""

from __future__ import annotations

import itertools

import pytest

NAMES = (f"signed{number}" for number in itertools.count())


@pytest.fixture
def name() -> str:
    """Return a repository that no other test uses."""
    return next(NAMES)
