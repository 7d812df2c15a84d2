"""Where bytes come from: each folder knows one protocol and no disk.

A folder declares the kinds of sources that it serves as ``KINDS`` in its ``__init__``, which imports nothing
of the protocol: start-up is part of every import. Third parties declare theirs in an entry point.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from cdi_worker import errors, lazy
from cdi_worker.sources import kind

if TYPE_CHECKING:
    from importlib import metadata

ENTRY_POINTS = "cdi_worker.sources"


def own() -> Iterator[kind.Kind]:
    """Yield the kinds that our folders declare."""
    for path in __path__:
        for found in sorted(Path(path).glob("*/__init__.py")):
            yield from getattr(lazy.load(f"{__name__}.{found.parent.name}"), "KINDS", ())


def installed() -> Iterator[kind.Kind]:
    """Yield the kinds of third parties: entry points of the group ``cdi_worker.sources``.

    Each names a ``Kind``, or a callable ``(Location, Cancel) -> Source`` with no more to say.
    """
    # Takes 15 ms, in which most imports find no plug-in.
    from importlib import metadata

    for point in metadata.entry_points(group=ENTRY_POINTS):
        yield _declared(point)


def find(name: str) -> kind.Kind:
    """Return the kind of that name. Raises ``RequestError``."""
    for search in (own, installed):
        for each in search():
            if each.name == name:
                return each
    known = ", ".join(sorted(each.name for search in (own, installed) for each in search()))
    raise errors.RequestError(f"unknown source {name!r}: one of {known}")


def find_scheme(scheme: str) -> kind.Kind:
    """Return the kind of source that URLs with ``scheme`` name, "" for a path. Raises ``RequestError``."""
    for search in (own, installed):
        for each in search():
            if scheme in each.schemes:
                return each
    known = (known for search in (own, installed) for each in search() for known in each.schemes if known)
    raise errors.RequestError(
        f'unsupported URL scheme "{scheme}"; supported: {", ".join(sorted(known))}; others need --source'
    )


def _declared(point: metadata.EntryPoint) -> kind.Kind:
    found = point.load()
    return found if isinstance(found, kind.Kind) else kind.Kind(point.name, point.value)
