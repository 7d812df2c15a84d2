"""Sources of disk images: one folder per protocol. A source does not know the target.

Each folder lists its sources as ``KINDS`` in its ``__init__``, which imports no protocol library, to keep
the start-up short. Third-party packages declare theirs as entry points, programs register theirs.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
import traceback
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from cdi_worker import errors

if TYPE_CHECKING:
    from cdi_worker.sources import kind

log = logging.getLogger(__name__)

#: The kinds of sources that this process has registered, by name.
_registered: dict[str, kind.Kind] = {}
_registering = threading.Lock()


def own() -> Iterator[kind.Kind]:
    """Yield the built-in kinds of sources."""
    for path in __path__:
        for found in sorted(Path(path).glob("*/__init__.py")):
            folder = importlib.import_module(f"{__name__}.{found.parent.name}")
            yield from getattr(folder, "KINDS", ())


def register(added: kind.Kind) -> None:
    """Add a source to this process, for which it is then as good as an installed one. Thread-safe.

    Raises ``RequestError`` if its name or a URL scheme is that of a built-in or registered source. It takes
    precedence over an installed source of the same name.
    """
    with _registering:
        for each in (*own(), *_registered.values()):
            if each.name == added.name:
                raise errors.RequestError(f"source {added.name!r}: is registered already")
            for scheme in {*each.schemes} & {*added.schemes}:
                what = f"URL scheme {scheme!r} is that of {each.name!r}"
                raise errors.RequestError(f"source {added.name!r}: {what}")
        _registered[added.name] = added


def unregister(name: str) -> None:
    """Remove a registered source; imports that have begun are not affected. Thread-safe.

    Raises ``RequestError`` if it is not registered.
    """
    with _registering:
        if _registered.pop(name, None) is None:
            raise errors.RequestError(f"source {name!r}: is not registered")


def third_party(name: str = "") -> Iterator[kind.Kind]:
    """Yield the sources of third parties: those registered in this process, then the installed ones.

    An installed package has an entry point in the group ``cdi_worker.sources``, which refers to a ``Kind``,
    or to a callable ``(Location, Cancel) -> Source``. ``name``: only those of this name. Raises
    ``RequestError`` if the source ``name`` cannot be loaded; without ``name``, such a source is logged and
    skipped.
    """
    with _registering:
        registered = tuple(_registered.values())
    yield from (each for each in registered if name in {"", each.name})
    from importlib import metadata

    from cdi_worker.sources import kind

    points = metadata.entry_points(group="cdi_worker.sources")
    for point in points.select(name=name) if name else points:
        try:
            found = point.load()
        except Exception as err:
            # Code of third parties may raise anything; one broken plug-in must not affect other sources.
            what = f"source {point.name!r}: {point.value} cannot be loaded: {err}"
            if name:
                raise errors.RequestError(what) from err
            log.warning("%s", what)
            continue
        known = found if isinstance(found, kind.Kind) else kind.Kind(point.name, point.value)
        yield known._replace(name=point.name)


def every() -> Iterator[kind.Kind]:
    """Yield the built-in kinds of sources, then those of third parties."""
    yield from own()
    yield from third_party()


@contextlib.contextmanager
def blame_plugin(used: kind.Kind) -> Iterator[None]:
    """Raise ``errors.PluginFailed`` if the code of a third party raises anything but our errors."""
    module = used.source if isinstance(used.source, str) else used.source.__module__
    package = module.partition(":")[0].partition(".")[0]
    try:
        yield
    except errors.Error:
        raise
    except Exception as err:
        # Code of third parties may raise anything.
        frames = traceback.walk_tb(err.__traceback__)
        names = {frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in frames}
        if package == "cdi_worker" or package not in names:
            raise
        raise errors.PluginFailed(
            source=used.name, package=package, exception=type(err).__name__, reason=err
        ) from err


def find(name: str) -> kind.Kind:
    """Return the kind of source called ``name``. Raises ``RequestError`` if it is unknown."""
    for each in own():
        if each.name == name:
            return each
    for each in third_party(name):
        return each
    known = sorted({each.name for each in every()})
    raise errors.RequestError(f"unknown source {name!r}; {errors.supported(name, known)}")


def find_scheme(scheme: str) -> kind.Kind:
    """Return the kind of source for a URL scheme; ``""`` stands for a path.

    Raises ``RequestError`` if the scheme is unknown.
    """
    for each in every():
        if scheme in each.schemes:
            return each
    known = sorted({name for each in every() for name in each.schemes if name})
    remedy = None
    if not (hint := errors.did_you_mean(scheme, known)):
        hint = f"supported: {', '.join(known)}"
        way = "an image in a registry begins with docker://, others need --source"
        remedy = errors.Remedy([(way, "command")])
    raise errors.RequestError(f"unsupported URL scheme {scheme!r}; {hint}", remedy=remedy)


def of(address: str) -> kind.Kind:
    """Return the kind of source for a URL or path. Raises ``RequestError`` if it is unknown."""
    is_path = False
    try:
        # In a directory that this user may not search, a path does not exist.
        with contextlib.suppress(OSError):
            is_path = Path(address).exists()
        return find_scheme("" if is_path else urllib.parse.urlsplit(address).scheme)
    except ValueError as err:
        from cdi_worker.sources import wire

        raise wire.malformed(address) from err
