"""The messages of the program, read from its source: the reasons that are given to each error.

A reason that is only details, such as the answer of a server, is not among them.
"""

from __future__ import annotations

import ast
import collections
import functools
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

from cdi_worker import errors

ROOT = Path(__file__).parent.parent
PARTS = ("cdi_worker", "importer", "sources", "images", "formats", "scratch")
#: The errors, by name.
KINDS = {
    name: kind for name, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.Error)
}
#: Stands for details in a message.
DETAILS = "…"
#: The fields of an error, and the parameters of a function that makes one, which say why.
WHY = frozenset({"reason", "what", "why", "message", "fault", "problem"})

#: The error that a function makes, and which argument is the reason: its position or its name.
Maker: TypeAlias = tuple[str, int | str]
#: The values that are assigned to a name.
Values: TypeAlias = Mapping[str, list[ast.expr]]


@functools.cache
def reasons() -> Mapping[str, list[str]]:
    """Return the reasons of each kind of error, with ``…`` in place of details."""
    paths = [path for part in PARTS for path in sorted((ROOT / part).rglob("*.py"))]
    trees = [ast.parse(path.read_text()) for path in paths]
    makers = [dict(_makers(tree)) for tree in trees]
    public = {name: made for found in makers for name, made in found.items() if not name.startswith("_")}
    found = collections.defaultdict(set)
    for tree, own in zip(trees, makers, strict=True):
        for kind, text in _reasons(tree, public | own):
            # Words, and not the rest of a message that is put together.
            if re.search("[A-Za-z]", text) and " " in text and text[0] not in ",; ":
                found[kind].add(text)
    found["Unreachable"] |= {f"{reason}; {cure}" for reason, (cure, _) in errors._REACH.items()}  # noqa: SLF001
    return {kind: _sorted(texts) for kind, texts in found.items()}


def _sorted(texts: Iterable[str]) -> list[str]:
    """Sort by the first words of our own; texts with the same words are one."""
    by_words = {text.lstrip(f"{DETAILS}: (").lower(): text for text in sorted(texts)}
    return [text for _, text in sorted(by_words.items())]


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def _makers(tree: ast.AST) -> Iterator[tuple[str, Maker]]:
    """Yield the functions that make an error of a reason that they are given."""
    for function in _functions(tree):
        names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
        names = names[1:] if names[:1] in (["self"], ["cls"]) else names
        places: dict[str, int | str] = {name: index for index, name in enumerate(names)}
        places |= {each.arg: each.arg for each in function.args.kwonlyargs}
        for kind, why in _errors(function):
            for node in ast.walk(why):
                if isinstance(node, ast.Name) and node.id in places and (node is why or node.id in WHY):
                    yield function.name, (kind, places[node.id])


def _errors(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield the kind of each error that is made, and its reason."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and (kind := _last_name(call)) in KINDS:
            given = (each.value for each in call.keywords if each.arg in WHY)
            yield from ((kind, why) for why in (*call.args, *given))


def _last_name(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def _reasons(tree: ast.Module, makers: Mapping[str, Maker]) -> Iterator[tuple[str, str]]:
    everywhere = _assigned(tree.body)
    for function in _functions(tree):
        known = {**everywhere, **_assigned(ast.walk(function))}
        found = list(_errors(function))
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and _last_name(node) in makers:
                kind, place = makers[_last_name(node)]
                given = dict(enumerate(node.args)) | {each.arg: each.value for each in node.keywords}
                found += [(kind, given[place])] if place in given else []
            elif "faults" in function.name and isinstance(node, ast.Yield) and node.value:
                found.append(("RequestError", node.value))
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("faults.append"):
                found.append(("RequestError", node.args[0]))
        for kind, why in found:
            yield from ((kind, text) for text in _texts(why, known))


def _assigned(nodes: Iterable[ast.AST]) -> Values:
    found = collections.defaultdict(list)
    for node in nodes:
        match node:
            case ast.Assign([ast.Name(name)], value) | ast.NamedExpr(ast.Name(name), value):
                found[name].append(value)
    return found


def _texts(node: ast.expr, known: Values) -> Iterator[str]:
    """Yield the texts that an expression may have."""
    match node:
        case ast.Constant(str(text)):
            yield text
        case ast.JoinedStr([ast.FormattedValue(ast.Name(_) as name), *parts]):
            starts = list(_texts(name, known)) or [DETAILS]
            yield from (start + end for start in starts for end in _texts(ast.JoinedStr(parts), known))
        case ast.JoinedStr(parts):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else DETAILS for part in parts)
        case ast.IfExp():
            yield from _texts(node.body, known)
            yield from _texts(node.orelse, known)
        case ast.BinOp(left, ast.Add(), right):
            ends = list(_texts(right, known)) or [DETAILS]
            yield from (f"{start}{end}" for start in _texts(left, known) for end in ends)
        case ast.Call(ast.Attribute(text, "rstrip")):
            yield from _texts(text, known)
        case ast.Call(ast.Attribute(ast.Dict(values=values), "get"), [_, *default]):
            for value in (*values, *default):
                yield from _texts(value, known)
        case ast.Name(name):
            others = {each: values for each, values in known.items() if each != name}
            for value in known.get(name, ()):
                yield from _texts(value, others)
