"""Completion in fish, whose script by click cuts values and descriptions at their first comma."""

from __future__ import annotations

from click import shell_completion


@shell_completion.add_completion_class
class Fish(shell_completion.FishComplete):
    """Completion in fish, of values with commas too."""

    source_template = shell_completion.FishComplete.source_template.replace(
        'string split ","', 'string split --max 1 ","'
    )
