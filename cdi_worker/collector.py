"""Python's garbage collector while modules are imported: start-up time is part of every import."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def pause() -> Iterator[None]:
    """Pause the garbage collector while the block loads modules: it would search them again and again.

    What exists at the end of the block joins the oldest generation, which is searched least. Use this only at
    a start: the garbage of a transfer would stay in memory as long.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.unfreeze()
        if was_enabled:
            gc.enable()
