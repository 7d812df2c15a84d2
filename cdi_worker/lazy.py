"""Objects imported when they are first used: start-up time is part of every import.

A reference is ``module:attribute``, as in entry points; ``module`` alone is the module itself.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")


def load(reference: str) -> Any:
    """Import and return the object at ``reference``."""
    name, _, attribute = reference.partition(":")
    module = importlib.import_module(name)
    return getattr(module, attribute) if attribute else module


@contextlib.contextmanager
def start() -> Iterator[None]:
    """Pause the garbage collector while the block loads modules: it would search them again and again.

    What exists at the end of the block joins the oldest generation, which is searched least. Use this only at
    a start: the garbage of a transfer would stay in memory as long.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.unfreeze()
        if was_enabled:
            gc.enable()


class Table(Mapping[K, V]):
    """Mapping of keys to objects, each imported when it is looked up; keys are listed without importing."""

    def __init__(self, references: Mapping[K, str]) -> None:
        self._references = references

    def __getitem__(self, key: K) -> V:
        found: V = load(self._references[key])
        return found

    def __contains__(self, key: object) -> bool:
        # Mapping.__contains__ looks the value up, which would import it.
        return key in self._references

    def __iter__(self) -> Iterator[K]:
        return iter(self._references)

    def __len__(self) -> int:
        return len(self._references)
