"""The version of the distribution that is installed."""

from __future__ import annotations

from importlib import metadata
from typing import Final


def _installed() -> str:
    try:
        return metadata.version("cdi-worker")
    except metadata.PackageNotFoundError:
        # A checkout can be run without an installation.
        return "unknown (not installed)"


VERSION: Final = _installed()
