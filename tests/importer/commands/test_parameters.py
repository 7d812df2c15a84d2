"""The options of commands."""

from __future__ import annotations

import click
import pytest

from cdi_worker.importer.commands import options, parameters


def test_value_of_unknown_origin_is_a_default() -> None:
    """Click 8.4.0 knows the origin of a value only after the value is processed."""
    option = parameters.Option(["--disk"], default="")
    context = click.Context(click.Command("import", params=[option]))
    assert context.get_parameter_source("disk") is None
    assert option.process_value(context, "") == ""


def test_minimum_speed_takes_units() -> None:
    option = next(each for each in options.of("import") if "--min-speed" in each.opts)
    context = click.Context(click.Command("import", params=[option]))
    assert option.process_value(context, "10M") == 10_000_000
    with pytest.raises(click.BadParameter, match="write 10Mi for powers of 1024, 10M for powers of 1000"):
        option.process_value(context, "10MB")
