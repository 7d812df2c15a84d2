"""A pod prints no advice of the command line: its reader has a DataVolume, and no command to change."""

from __future__ import annotations

import ast
import re
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cdi_worker
from cdi_worker import errors
from cdi_worker.importer import report
from cdi_worker.importer.commands import command, group

PACKAGE = Path(cdi_worker.__file__).parent
#: What a person at a terminal starts.
COMMANDS = ("importer/commands/", "importer/cli.py", "importer/kubernetes/")
#: Keywords whose texts are for the help.
OF_HELP = {"help", "option", "example"}
OPTIONS = {
    name
    for verb in group.COMMANDS
    if isinstance(found := group.command_of(verb), command.Command)
    for each in found.options
    for name in each.opts
    # No pod writes a qcow2 file.
    if name.startswith("--") and name != "--format"
}
#: An option or an argument of ours.
ADVICE = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, OPTIONS))})(?![\w-])|\b(SOURCE|TARGET)\b")


def classes() -> list[type[errors.Error]]:
    found: list[type[errors.Error]] = [errors.Error]
    for each in found:
        found += each.__subclasses__()
    return [each for each in found if each.__module__ == errors.__name__]


def error(kind: type[errors.Error]) -> errors.Error:
    """Return an error with all fields of its messages."""
    texts = (kind.template, kind.terminal, kind.phrase)
    names = {name for text in texts for _, name, _, _ in string.Formatter().parse(text) if name}
    fields: dict[str, Any] = dict.fromkeys({*names, "url", "reason"}, "x")
    if issubclass(kind, errors.RequestError):
        return kind("x")
    return kind(**fields | {"seconds": 1.0, "source": "http", "install": "pip install x"})


def test_no_class_of_error_advises_options_in_a_pod() -> None:
    for kind in classes():
        for source in ("", "http", "s3", "registry", "imageio", "vddk", "nbd"):
            message = report.failure(error(kind), source).message
            assert not ADVICE.search(message), message


def of_terminal(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield what only a terminal and the help show, and documentation.

    Ways of a remedy with the setting ``command``, second texts of a class, and the name of an option beside
    that of a variable.
    """
    ways = set()
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant()):
                yield node.value
            case ast.keyword(arg=name) if name in OF_HELP:
                yield node.value
            case ast.Call(func=ast.Attribute(attr="Fault"), args=[_, _, option]):
                yield option
            case ast.Tuple(elts=[ast.Name(id=name), ast.Constant(value="command")]):
                ways.add(name)
            case ast.Tuple(elts=[way, ast.Constant(value="command")]):
                yield way
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            (name, *_) = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            if "terminal" in ast.unparse(name).lower() or ast.unparse(name) in ways:
                yield node.value


def test_advice_of_the_command_line_is_for_a_terminal() -> None:
    found = []
    for folder in (PACKAGE, *filter(Path.is_dir, PACKAGE.iterdir())):
        for path in folder.rglob("*.py"):
            place = str(path.relative_to(PACKAGE))
            if not place.startswith(COMMANDS):
                found += [f"{place}:{line}" for line in advice(ast.parse(path.read_text()))]
    assert not found


def advice(tree: ast.AST) -> Iterator[str]:
    """Yield the lines of a module with advice in a message, which begins with a small letter."""
    skipped = {each for part in of_terminal(tree) for each in ast.walk(part)}
    for each in ast.walk(tree):
        if isinstance(each, ast.Constant) and each not in skipped:
            text = str(each.value)
            if not text[:1].isupper() and " " in text and ADVICE.search(text):
                yield f"{each.lineno}: {text}"
