"""A raw disk, or an ISO image used as one: nothing in it speaks about the file."""

from __future__ import annotations

from cdi_worker.formats import facts, views


def check(view: views.View) -> facts.Facts:
    """Refuse a size that no disk has."""
    if view.size is not None:
        facts.check_size("raw", view.size)
    return facts.Facts("raw", view.size)


def required_length(_view: views.View) -> int:
    """Return 0: any length is a whole disk."""
    return 0
