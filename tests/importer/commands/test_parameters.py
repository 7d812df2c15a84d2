"""The options of commands."""

from __future__ import annotations

import click

from cdi_worker.importer.commands import parameters


def test_value_of_unknown_origin_is_a_default() -> None:
    """Click 8.4.0 knows the origin of a value only after the value is processed."""
    option = parameters.Option(["--disk"], default="")
    context = click.Context(click.Command("import", params=[option]))
    assert context.get_parameter_source("disk") is None
    assert option.process_value(context, "") == ""
