"""YAML documents, limited in size and depth, without aliases, which could expand a short one to any size."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Mapping
from typing import Any, ClassVar

from cdi_worker import errors
from cdi_worker.formats import smalljson
from cdi_worker.sources import smallfile

with errors.optional("reading manifests", package="PyYAML", extra="kubernetes"):
    import yaml

#: Bytes of a file of manifests. etcd takes objects of 1.5 MiB at most.
LIMIT = 4 << 20
#: YAML's types of a key: text, and ``<<``.
KEYS = frozenset({"tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"})
#: A name of an object, which also may become a file's (Kubernetes: "DNS subdomain names").
NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")


# The loader in C is a hundred times faster, and not in every build.
class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # chosen at run time
    """The safe loader, as strict as the API server: no key twice, no timestamps."""

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            problem = ""
            if not isinstance(key.value, str):
                problem = "a key is not a string"
            elif key.tag not in KEYS:
                problem = f"key {key.value!r} is not a string; put it in quotes"
            elif key.value in seen:
                problem = f"key {key.value!r} appears twice"
            if problem:
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        made: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return made


@dataclasses.dataclass(frozen=True)
class Document:
    """One object. ``where``: names it in messages until it is known to have a name.

    ``path``: of an object within another one, with a dot at its end, to which messages add that of a field.
    """

    where: str
    content: Mapping[str, Any]
    path: str = ""

    @property
    def kind(self) -> str:
        return str(self.content.get("kind", ""))

    @property
    def name(self) -> str:
        return self._of_metadata("name")

    @property
    def namespace(self) -> str:
        return self._of_metadata("namespace")

    def _of_metadata(self, key: str) -> str:
        metadata = self.content.get("metadata")
        return str(metadata.get(key, "")) if isinstance(metadata, Mapping) else ""


def read(path: str) -> list[Document]:
    """Return the objects of a YAML file, ``-`` for standard input; a ``List`` counts as its items.

    Raises ``RequestError`` and ``MissingExtra``.
    """
    data = sys.stdin.buffer.read(LIMIT + 1) if path == "-" else smallfile.read(path, LIMIT)
    if len(data) > LIMIT:
        raise errors.RequestError(f"{path}: is larger than {LIMIT >> 20} MiB")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as err:
        raise errors.RequestError(f"{path}: is not UTF-8 at byte {err.start}") from err
    found = []
    for number, content in enumerate(_load(text, path), 1):
        where = f"{path}, document {number}"
        if content is None:
            continue
        if not isinstance(content, dict):
            raise errors.RequestError(f"{where}: is not an object (a mapping)")
        items = content.get("items")
        if content.get("kind") == "List" and isinstance(items, list):
            for index, item in enumerate(items):
                if not isinstance(item, dict):
                    raise errors.RequestError(f"{where}: items[{index}]: is not an object (a mapping)")
                found.append(Document(f"{where}, items[{index}]", item))
        else:
            found.append(Document(where, content))
    return found


def _load(text: str, path: str) -> list[Any]:
    try:
        depth = 0
        for event in yaml.parse(text, Loader=_Loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            fault = ""
            if isinstance(event, yaml.AliasEvent):
                fault = "aliases (*name) are not accepted"
            elif depth > smalljson.DEEPEST:
                fault = f"more than {smalljson.DEEPEST} levels of objects and lists"
            if fault:
                raise errors.RequestError(f"{path}{_line(event.start_mark)}: {fault}")
        return list(yaml.load_all(text, Loader=_Loader))
    except yaml.MarkedYAMLError as err:
        raise errors.RequestError(f"{path}{_line(err.problem_mark)}: {err.problem}") from err
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as err:
        # PyYAML raises any of these if a tag does not fit its value, such as !!bool on a text.
        raise errors.RequestError(f"{path}: malformed YAML: {' '.join(str(err).split())}") from err


def _line(mark: Any) -> str:
    return "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
