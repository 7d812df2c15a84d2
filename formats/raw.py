"""A raw disk, or an ISO image used as one: there is no header to check."""

from __future__ import annotations

from cdi_worker.formats import facts, views


def check(view: views.View) -> facts.ImageFacts:
    """Refuse a disk without a sector, and one larger than any volume."""
    if view.size is not None:
        facts.check_size("raw", view.size)
    return facts.ImageFacts("raw", view.size)


def required_length(_view: views.View) -> int:
    """Return 0: a raw disk of any length is complete."""
    return 0
