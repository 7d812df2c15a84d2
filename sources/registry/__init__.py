"""Container registries and OCI archives: the disk in an image, or an artifact that is a disk."""

from __future__ import annotations

from cdi_worker.sources import kind

KINDS = (
    kind.Kind(
        "registry",
        source="cdi_worker.sources.packages.oci:source",
        location=f"{__name__}.locations:Registry",
        schemes=("docker", "oci-archive"),
        example="cdi-worker import --architecture arm64 docker://quay.io/org/disk:latest disk.img",
        digests=True,
    ),
)
