"""Fields of a location: their names in the environment, on the command line and in a manifest."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Self

from cdi_worker import errors

_KEY = "cdi_worker"
_HEADER = r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)"


#: The commands that read a disk from a source, and those that have the options of sources.
READ = ("import", "verify", "inspect")
SOURCE = (*READ, "digest")
#: In place of a command: a pod's role.
POD = "pod"
#: Who reads variables: roles of a pod, and in place of one the commands.
IMPORTER, UPLOAD_SERVER, CLONER, COMMANDS = "importer", "uploadserver", "cloner", "commands"


class Field(NamedTuple):
    """How a value of a location, an access or a request is set. An empty name: not available there.

    ``env``: environment variable of these ``roles`` of a pod; with ``ambient`` also of commands. ``more``:
    variables that are read after it, of the tools that people use for this kind of source. ``on``: the value
    that sets a flag; ``strict``: any other but ``false`` is a fault. ``mount``: default path in pods.
    ``key``: dotted path below the source in a DataVolume; with ``entry`` it names a Secret, whose key
    ``entry`` is mounted as a file.

    ``option``, ``help``: the command-line option, and its text. ``verbs``: the commands that have it.
    ``section``: of the help; ``common``: whether the short help shows it. ``form``: what help shows in place
    of a value. ``short``: one letter for it. ``part``: the field that is set, of a value of several;
    ``sets``: the value that a flag sets.

    ``parse``: converts the text; raises ``ValueError`` or ``errors.RequestError``. ``least``, ``most``: the
    bounds of an ``int`` or a ``float``. ``choices``: the only values. ``file``, ``folder``: the value is the
    path of an existing one. ``flag``: a boolean, not parsed. ``lines``: several values, each a line; its
    option may be repeated. ``secret``: hidden in ``repr``. ``selects``: whether other bytes are read with
    another value (``sources.selection``): all but credentials and tuning; a ``secret`` never does.
    """

    env: str = ""
    more: tuple[str, ...] = ()
    roles: tuple[str, ...] = (IMPORTER,)
    on: str = "true"
    strict: bool = False
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
    verbs: tuple[str, ...] = SOURCE
    section: str = ""
    common: bool = False
    form: str = ""
    short: str = ""
    part: str = ""
    sets: str = ""
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    folder: bool = False

    @property
    def key_of_option(self) -> str:
        """The name of the option's value among those of a command."""
        return self.option.lstrip("-").replace("-", "_")

    def is_read_by(self, role: str) -> bool:
        """Return whether a role, or ``COMMANDS``, reads its variable."""
        return bool(self.env) and (role in self.roles or (self.ambient and role == COMMANDS))


def field(default: Any = "", *several: Field, **where: Any) -> Any:
    """Return a field of a dataclass that is declared by ``several``, or by one with these values."""
    about = several or (Field(flag=isinstance(default, bool), **where),)
    shown = not any(each.secret for each in about)
    return dataclasses.field(default=default, repr=shown, metadata={_KEY: about})


def declared(owner: type[Any]) -> Iterator[tuple[str, Field, Any]]:
    """Yield the name, the declaration and the default of the declared fields of a dataclass."""
    for each in dataclasses.fields(owner):
        for about in each.metadata.get(_KEY, ()):
            yield each.name, about, each.default


def values(owner: type[Any], given: Callable[[Field], Any]) -> dict[str, Any]:
    """Return the values that ``given`` returns for the declared fields of a dataclass, by field.

    None, and False for a flag, mean that a field is not set.
    """
    found: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    for name, about, default in declared(owner):
        value = given(about)
        if value is None or value is False:
            continue
        if about.part:
            parts.setdefault(name, {})[about.part] = value
            value = type(default)(**parts[name])
        found[name] = about.sets or value
    return found


def table(location: type[Any]) -> Mapping[str, tuple[Field, Any]]:
    """Return the fields of a location's dataclass with their defaults, by attribute name."""
    return {name: (about, default) for name, about, default in declared(location)}


class Fault(str):
    """A fault of a request that a setting mends. As text, it names the variable of a pod."""

    __slots__ = ("_parts",)
    _parts: tuple[str, str, str]

    def __new__(cls, text: str, variable: str, option: str) -> Self:
        """``text`` has ``{}`` for the name of the setting."""
        fault = super().__new__(cls, text.replace("{}", variable))
        fault._parts = text, variable, option
        return fault

    def __reduce__(self) -> tuple[type[Self], tuple[str, str, str]]:
        return type(self), self._parts

    @property
    def at_terminal(self) -> str:
        """The fault with the name of the option."""
        text, _, option = self._parts
        return text.replace("{}", option)


def secret(text: str) -> str:
    """Return a user name or a password without line breaks at its ends: ``echo`` writes one.

    Raises ``errors.RequestError``, without the text: no protocol can send control characters in it (RFC 7617,
    2).
    """
    text = text.strip("\r\n")
    if re.search(r"[\x00-\x1f\x7f-\x9f]", text):
        reason = (
            "contains a line break or another control character; write it again: printf %s 'SECRET' >FILE"
        )
        raise errors.RequestError(reason)
    return text


def token(text: str) -> str:
    """Return a token or an access key, as ``secret``; it is ASCII (RFC 6750, 2.1)."""
    text = secret(text)
    if not text.isascii():
        raise errors.RequestError("is not ASCII, as by a curly quote or a space of a document; copy it again")
    return text


def header(text: str) -> tuple[str, str]:
    """Return name and value of ``Name: value`` (RFC 9110, 5.1 and 5.5). The text may be secret."""
    found = re.fullmatch(_HEADER, text.strip())
    if not found:
        raise errors.RequestError("malformed extra header; expected 'Name: value' on one line")
    return found[1], found[2].strip()


def named(check: Callable[[str], str], text: str, name: str) -> str:
    """Return ``check(text)``, of ``secret`` or ``token``; an error begins with ``name``, its place."""
    try:
        return check(text)
    except errors.RequestError as err:
        raise errors.RequestError(f"{name}: {err}") from err


def fault(location: object, text: str, name: str) -> Fault:
    """Return the fault that a field of ``location`` mends; ``text`` has ``{}`` for its name."""
    about, _ = table(type(location))[name]
    return Fault(text, about.env, about.option)
