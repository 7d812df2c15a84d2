"""A third-party source with an option of its own: a disk of one repeated byte."""

from __future__ import annotations

import cdi_worker

KIND = cdi_worker.Kind(
    "pattern", source=f"{__name__}.source:open", location=f"{__name__}.location:Pattern", schemes=("pattern",)
)
