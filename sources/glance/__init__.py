"""Images of OpenStack."""

from __future__ import annotations

from cdi_worker.sources import kind

KINDS = (
    kind.Kind(
        "glance",
        source=f"{__name__}.source:GlanceSource",
        location=f"{__name__}.locations:Glance",
        schemes=("glance",),
        example="cdi-worker import --source glance --image-id 7b1c0a2e https://cloud.example.org disk.img",
        digests=True,
    ),
)
