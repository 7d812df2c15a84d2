"""Local files, devices and pipes, other volumes, and blank disks."""

from __future__ import annotations

from cdi_worker.sources import kind

KINDS = (
    kind.Kind(
        "local",
        source=f"{__name__}.file:source",
        location=f"{__name__}.locations:LocalFile",
        schemes=("", "file"),
        archives=True,
    ),
    kind.Kind("volume", source=f"{__name__}.file:volume", location=f"{__name__}.locations:Local"),
    kind.Kind("none", source=f"{__name__}.blank:Blank", location=f"{__name__}.blank:Nowhere"),
)
