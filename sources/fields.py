"""The fields of a source's location: how the environment, the command line and a manifest name each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

_KEY = "cdi_worker"


class Field(NamedTuple):
    """One value of a location, and where it comes from; what is empty does not offer it.

    ``env``: variable of a pod; with ``ambient``, commands read it too. ``option`` and ``help``: of the
    commands about a source. ``mount``: a path that pods have without being told, unless ``option`` names
    another. ``file``: it names a file that has to exist. ``key``: path below the source in a DataVolume,
    with dots; with ``entry`` it names a Secret or ConfigMap, whose entry becomes a file.
    ``parse``: makes the value of a text; raises ``ValueError`` or ``errors.RequestError``.
    ``flag``: it is true or false, and not parsed.
    """

    env: str = ""
    option: str = ""
    help: str = ""
    key: str = ""
    entry: str = ""
    mount: str = ""
    file: bool = False
    ambient: bool = False
    parse: Callable[[str], Any] = str
    flag: bool = False


def field(default: Any = "", about: Field | None = None, **where: Any) -> Any:
    """Return a field of a location's dataclass; the names in ``where`` are those of ``Field``."""
    about = about or Field(flag=isinstance(default, bool), **where)
    return dataclasses.field(default=default, metadata={_KEY: about})


def table(location: type[Any]) -> Mapping[str, tuple[Field, Any]]:
    """Return the fields of a location's dataclass, each with its default, by their names."""
    found = dataclasses.fields(location)
    return {each.name: (each.metadata[_KEY], each.default) for each in found if _KEY in each.metadata}
