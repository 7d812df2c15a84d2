"""Options are declared once, and one function makes the requests of all front ends."""

from __future__ import annotations

import ast
import dataclasses

from cdi_worker.importer import request
from cdi_worker.importer.commands import group, options
from cdi_worker.sources import base, fields
from tests.support import repository

DECLARED = [(owner, *each) for owner in (request.Request, base.Access) for each in fields.declared(owner)]


def test_options_of_a_command_are_declared_once() -> None:
    """Each field that names a command is an option of it."""
    for name in group.COMMANDS:
        found = {option for param in group.command_of(name).params for option in param.opts}
        for _, _, field, _ in DECLARED:
            assert not field.option or name not in field.verbs or field.option in found, name


def test_declarations_name_commands() -> None:
    verbs = {verb for _, _, field, _ in DECLARED if field.option for verb in field.verbs}
    assert verbs <= {*group.VISIBLE, "pod"}
    assert all(field.help for _, _, field, _ in DECLARED)
    assert all(field.section in options.SECTIONS for _, _, field, _ in DECLARED if field.option)


def calls() -> list[tuple[str, ast.Call]]:
    """Return all calls in the importer, with the paths of their modules."""
    return [
        (path.relative_to(repository.ROOT).as_posix(), node)
        for path in sorted(repository.ROOT.glob("importer/**/*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    ]


def test_only_one_function_makes_requests() -> None:
    names = {"request.Request", "request_module.Request", "Request", "cdi_worker.Request"}
    makers = {path for path, call in calls() if ast.unparse(call.func) in names}
    # What an upload server reads has the same name: see ``upload.http``.
    assert sorted(makers) == ["importer/request.py", "importer/upload/http.py"]


def test_no_module_rewrites_a_request() -> None:
    """A replacement is of a request if its name says so, or if only a request has such fields."""
    fields = {each.name for each in dataclasses.fields(request.Request)}
    # Pods have scratch space too, and surveys a format.
    fields -= {"scratch", "format"}

    def rewrites(call: ast.Call) -> bool:
        name = ast.unparse(call.func)
        if name not in {"dataclasses.replace", "copy.replace"}:
            return False
        is_named = ast.unparse(call.args[0]).endswith("request")
        return is_named or {each.arg for each in call.keywords} <= fields

    assert {path for path, call in calls() if rewrites(call)} == {"importer/request.py"}
