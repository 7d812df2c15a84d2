"""Disks of oVirt."""

from __future__ import annotations

from cdi_worker.sources import kind

KINDS = (
    kind.Kind(
        "imageio",
        source=f"{__name__}.source:ImageioSource",
        location=f"{__name__}.locations:Imageio",
        example="cdi-worker import --source imageio --disk-id 6f3a https://HOST/ovirt-engine/api disk.img",
    ),
)
