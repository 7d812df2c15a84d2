"""YAML documents from outside, and their fields as typed values with every fault named by its path."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdi_worker import errors

if TYPE_CHECKING:
    import yaml

#: Bytes of a file of manifests. etcd takes objects of 1.5 MiB at most.
LIMIT = 4 << 20
#: Levels of nesting. No object of Kubernetes comes near.
DEPTH = 64
#: Nodes of a file: what a document can make of few bytes.
NODES = 100_000
#: A name of an object, which also may become a file's (Kubernetes: "DNS subdomain names").
NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")


@dataclasses.dataclass(frozen=True, slots=True)
class Document:
    """One object. ``where``: names it in messages until it is known to have a name."""

    where: str
    content: Mapping[str, Any]

    @property
    def kind(self) -> str:
        return str(self.content.get("kind", ""))


def read(path: str) -> list[Document]:
    """Return the objects of a YAML file, ``-`` for standard input; a ``List`` counts as its items.

    Raises ``RequestError`` and ``MissingExtra``.
    """
    found = []
    for number, content in enumerate(_load(_text(path), path), 1):
        where = f"{path}, document {number}"
        if content is None:
            continue
        if not isinstance(content, dict):
            raise errors.RequestError(f"{where}: is no object (a mapping)")
        items = content.get("items")
        if content.get("kind") == "List" and isinstance(items, list):
            for index, item in enumerate(items):
                if not isinstance(item, dict):
                    raise errors.RequestError(f"{where}: items[{index}]: is no object (a mapping)")
                found.append(Document(f"{where}, items[{index}]", item))
        else:
            found.append(Document(where, content))
    return found


def _text(path: str) -> str:
    try:
        with contextlib.ExitStack() as stack:
            stream = sys.stdin.buffer if path == "-" else stack.enter_context(Path(path).open("rb"))
            data = stream.read(LIMIT + 1)
        if len(data) > LIMIT:
            raise errors.RequestError(f"{path}: larger than {LIMIT} bytes, which no manifest is")
        return data.decode("utf-8-sig")
    except OSError as err:
        raise errors.RequestError(f"{path}: {(err.strerror or 'unreadable').lower()}") from err
    except UnicodeDecodeError as err:
        raise errors.RequestError(f"{path}: is not UTF-8 at byte {err.start}") from err


def _load(text: str, path: str) -> list[Any]:
    with errors.optional("reading manifests", package="PyYAML", extra="kubernetes"):
        import yaml
    try:
        _check_events(text, path, yaml)
        return list(yaml.load_all(text, Loader=_loader(yaml)))
    except yaml.MarkedYAMLError as err:
        raise errors.RequestError(f"{path}{_line(err.problem_mark)}: {err.problem}") from err
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError) as err:
        # A tag such as !!bool on what is none ends in any of these.
        raise errors.RequestError(f"{path}: malformed YAML: {' '.join(str(err).split())}") from err


def _check_events(text: str, path: str, library: Any) -> None:
    """Refuse what can make much of few bytes, before anything is made."""
    depth = nodes = 0
    for event in library.parse(text, Loader=_base(library)):
        depth += isinstance(event, library.CollectionStartEvent)
        depth -= isinstance(event, library.CollectionEndEvent)
        nodes += isinstance(event, library.NodeEvent)
        if isinstance(event, library.AliasEvent):
            raise errors.RequestError(f"{path}{_line(event.start_mark)}: aliases (*name) are not accepted")
        if depth > DEPTH:
            raise errors.RequestError(f"{path}{_line(event.start_mark)}: nested deeper than {DEPTH} levels")
        if nodes > NODES:
            raise errors.RequestError(f"{path}{_line(event.start_mark)}: more than {NODES} values")


def _base(library: Any) -> type[yaml.SafeLoader]:
    # The loader in C is a hundred times faster, and not in every build.
    found: type[yaml.SafeLoader] = getattr(library, "CSafeLoader", library.SafeLoader)
    return found


def _loader(library: Any) -> type[yaml.SafeLoader]:
    """Return the safe loader, as strict as the API server: no key twice, no timestamps."""

    class Strict(_base(library)):  # type: ignore[misc]
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen = set()
            for key, _ in node.value:
                is_text = isinstance(key.value, str)
                if not is_text or key.value in seen:
                    problem = f"key {key.value!r} is there twice" if is_text else "a key is no text"
                    raise library.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add(key.value)
            made: dict[Any, Any] = super().construct_mapping(node, deep=deep)
            return made

    Strict.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in Strict.yaml_implicit_resolvers.items()
    }
    return Strict


def _line(mark: Any) -> str:
    return "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"


class Fields:
    """The fields of one mapping. Faults are collected; a field that nobody has asked for is one."""

    def __init__(self, content: object, path: str, faults: list[str]) -> None:
        self.path = path
        self.faults = faults
        self._asked: set[str] = set()
        self._content: Mapping[Any, Any] = {}
        if isinstance(content, Mapping):
            self._content = content
        elif content is not None:
            self.fault("", "is no mapping")

    def __contains__(self, name: str) -> bool:
        return self._content.get(name) is not None

    def names(self) -> list[str]:
        """Return the names of the fields that are not null."""
        return [str(name) for name, value in self._content.items() if value is not None]

    def at(self, name: str) -> str:
        """Return the path of a field."""
        return f"{self.path}.{name}".strip(".") if name else self.path

    def fault(self, name: str, what: str) -> None:
        self.faults.append(f"{self.at(name)}: {what}")

    def value(self, name: str) -> Any:
        """Return a field as it is, None if it is not there."""
        self._asked.add(name)
        return self._content.get(name)

    def text(self, name: str, *, required: bool = False) -> str:
        value = self.value(name)
        if value is not None and not isinstance(value, str):
            self.fault(name, f"{_shown(value)} is no text; put it in quotes")
            return ""
        if required and not value:
            self.fault(name, "missing")
        return value or ""

    def name(self, name: str, *, required: bool = False) -> str:
        """Return the name of an object of the cluster."""
        value = self.text(name, required=required)
        if value and (len(value) > 253 or not NAME.fullmatch(value)):
            self.fault(
                name, f"{_shown(value)} is no name (lower-case letters, digits, '-' and '.', at most 253)"
            )
            return ""
        return value

    def flag(self, name: str) -> bool:
        value = self.value(name)
        if value is not None and not isinstance(value, bool):
            self.fault(name, f"{_shown(value)} is neither true nor false")
        return value is True

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        value = self.text(name)
        if value and value not in choices:
            self.fault(name, f"{_shown(value)} is none of {', '.join(choices)}")
            return ""
        return value

    def entries(self, name: str) -> list[Any]:
        """Return the entries of a list."""
        value = self.value(name)
        if value is not None and not isinstance(value, list):
            self.fault(name, "is no list")
            return []
        return value or []

    def texts(self, name: str) -> Iterator[tuple[str, str]]:
        """Yield path and text of each entry of a list."""
        for index, value in enumerate(self.entries(name)):
            if isinstance(value, str):
                yield f"{name}[{index}]", value
            else:
                self.fault(f"{name}[{index}]", f"{_shown(value)} is no text; put it in quotes")

    def strings(self, name: str) -> dict[str, str]:
        """Return a mapping of text to text, such as labels."""
        value = self.value(name)
        if value is not None and not isinstance(value, dict):
            self.fault(name, "is no mapping")
            return {}
        for key, item in (value or {}).items():
            if not isinstance(key, str) or not isinstance(item, str):
                self.fault(f"{name}[{key}]", f"{_shown(item)} is no text; put it in quotes")
        return {str(key): str(item) for key, item in (value or {}).items()}

    def fields(self, name: str) -> Fields:
        """Return the fields of a mapping below this one; none where it is not there."""
        return Fields(self.value(name), self.at(name), self.faults)

    def end(self) -> None:
        """Name the fields that nobody has asked for."""
        for name in self._content:
            if name not in self._asked:
                self.fault(str(name), "unknown field")


def _shown(value: object) -> str:
    """Return a value for a message: short, and nothing that could be a secret's whole."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
