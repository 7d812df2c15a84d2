"""Objects in buckets: S3 and Google Cloud Storage."""

from __future__ import annotations

from cdi_worker.sources import kind

KINDS = (
    kind.Kind("s3", source=f"{__name__}.s3:source", location=f"{__name__}.locations:S3", schemes=("s3",)),
    kind.Kind("gcs", source=f"{__name__}.gcs:source", location=f"{__name__}.locations:Gcs", schemes=("gs",)),
)
