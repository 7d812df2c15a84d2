"""The routes BLANK, STREAM, EXTENTS and PLACE: a disk of our own readers is delivered to the target."""

from __future__ import annotations

import contextlib
import functools

from cdi_worker.images import targets
from cdi_worker.importer import plan
from cdi_worker.importer.routes import delivery, disk
from cdi_worker.importer.routes.attempt import Attempt
from cdi_worker.scratch import space


def deliver(attempt: Attempt) -> None:
    """Deliver the disk that was planned, and make it usable."""
    asked, chosen = attempt.request, attempt.plan
    is_blank = chosen.route is plan.Route.BLANK
    if is_blank and not asked.preallocation and targets.facts(asked.target).kind == "block":
        attempt.outcome.size = chosen.virtual_size or 0
        return
    with contextlib.ExitStack() as stack:
        spill = None
        if chosen.spill and asked.scratch:
            room = stack.enter_context(space.Scratch(asked.scratch, asked.target))
            spill = stack.enter_context(space.Spill(room.path("spill")))
        make = functools.partial(disk.of, spill=spill)
        place = delivery.to_target(attempt, disk.moved(attempt))
        with delivery.delivered(attempt, make, place) as (out, size):
            delivery.commit(attempt, out, size)
