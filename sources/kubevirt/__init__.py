"""Exports and backups of KubeVirt."""

from __future__ import annotations

from cdi_worker.sources import kind

KINDS = (
    kind.Kind(
        "kubevirt",
        source=f"{__name__}.source:source",
        location=f"{__name__}.locations:KubeVirt",
        schemes=("kubevirt",),
        archives=True,
        example="cdi-worker import --export-token-file token --ca-file ca.pem "
        "kubevirt://HOST/…/volumes/root/disk.img disk.img",
    ),
)
