"""Fields of a location: their names in the environment, on the command line and in a manifest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

_KEY = "cdi_worker"


class Field(NamedTuple):
    """The names of one value of a location. An empty name: not available there.

    ``env``: environment variable in pods; with ``ambient`` also for commands. ``more``: variables that are
    read after it, of the tools that people use for this kind of source. ``option``, ``help``:
    command-line option. ``mount``: default path in pods. ``file``: the value is the path of an existing file.
    ``key``: dotted path below the source in a DataVolume; with ``entry`` it names a Secret or ConfigMap,
    and ``entry`` is mounted as a file. ``parse``: converts the text; raises ``ValueError`` or
    ``errors.RequestError``. ``flag``: a boolean, not parsed. ``secret``: hidden in ``repr``. ``lines``:
    several values, each a line; its option may be repeated. ``selects``: whether other bytes are read with
    another value (``sources.selection``): all but credentials and tuning; a ``secret`` never does.
    """

    env: str = ""
    more: tuple[str, ...] = ()
    option: str = ""
    help: str = ""
    key: str = ""
    entry: str = ""
    mount: str = ""
    file: bool = False
    ambient: bool = False
    parse: Callable[[str], Any] = str
    flag: bool = False
    secret: bool = False
    lines: bool = False
    selects: bool = True


def field(default: Any = "", about: Field | None = None, **where: Any) -> Any:
    """Return a field of a location's dataclass; the names in ``where`` are those of ``Field``."""
    about = about or Field(flag=isinstance(default, bool), **where)
    return dataclasses.field(default=default, repr=not about.secret, metadata={_KEY: about})


def table(location: type[Any]) -> Mapping[str, tuple[Field, Any]]:
    """Return the fields of a location's dataclass with their defaults, by attribute name."""
    found = dataclasses.fields(location)
    return {each.name: (each.metadata[_KEY], each.default) for each in found if _KEY in each.metadata}


class Fault(str):
    """A fault of a request that a setting mends. As text, it names the variable of a pod."""

    __slots__ = ("_parts",)
    _parts: tuple[str, str, str]

    def __new__(cls, text: str, variable: str, option: str) -> Self:
        """``text`` has ``{}`` for the name of the setting."""
        fault = super().__new__(cls, text.format(variable))
        fault._parts = text, variable, option
        return fault

    def __reduce__(self) -> tuple[type[Self], tuple[str, str, str]]:
        return type(self), self._parts

    @property
    def at_terminal(self) -> str:
        """The fault with the name of the option."""
        text, _, option = self._parts
        return text.format(option)


def fault(location: object, text: str, name: str) -> Fault:
    """Return the fault that a field of ``location`` mends; ``text`` has ``{}`` for its name."""
    about, _ = table(type(location))[name]
    return Fault(text, about.env, about.option)
