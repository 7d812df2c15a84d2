"""Where bytes come from: each folder knows one protocol and no disk.

A folder declares the kinds of sources that it serves as ``KINDS`` in its ``__init__``, which imports nothing
of the protocol: start-up is part of every import. Third parties declare theirs in an entry point.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from cdi_worker import errors, lazy
from cdi_worker.sources import kind

log = logging.getLogger(__name__)

ENTRY_POINTS = "cdi_worker.sources"


def own() -> Iterator[kind.Kind]:
    """Yield the kinds that our folders declare."""
    for path in __path__:
        for found in sorted(Path(path).glob("*/__init__.py")):
            yield from getattr(lazy.load(f"{__name__}.{found.parent.name}"), "KINDS", ())


def installed(name: str = "") -> Iterator[kind.Kind]:
    """Yield the kinds of third parties, or the one of a name: entry points of ``cdi_worker.sources``.

    Each names a ``Kind``, or a callable ``(Location, Cancel) -> Source`` with no more to say. Raises
    ``RequestError`` if the one that was asked for cannot be loaded.
    """
    # Takes 15 ms, in which most imports find no plug-in.
    from importlib import metadata

    points = metadata.entry_points(group=ENTRY_POINTS)
    for point in points.select(name=name) if name else points:
        try:
            found = point.load()
        except Exception as err:
            # The code of a third party fails as it likes; the others have to work all the same.
            what = f"source {point.name!r}: {point.value} cannot be loaded: {err}"
            if name:
                raise errors.RequestError(what) from err
            log.warning("%s", what)
            continue
        known = found if isinstance(found, kind.Kind) else kind.Kind(point.name, point.value)
        yield known._replace(name=point.name)


def find(name: str) -> kind.Kind:
    """Return the kind of that name. Raises ``RequestError``."""
    for each in own():
        if each.name == name:
            return each
    for each in installed(name):
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
