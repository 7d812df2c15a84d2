"""HTTP, HTTPS and node pull."""

from __future__ import annotations

from cdi_worker.sources import kind

KINDS = (
    kind.Kind(
        "http",
        source=f"{__name__}.nodepull:source",
        location=f"{__name__}.locations:Http",
        schemes=("http", "https"),
        archives=True,
        digests=True,
    ),
)
