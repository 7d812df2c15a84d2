"""Objects in buckets: S3 and Google Cloud Storage."""

from __future__ import annotations

from cdi_worker.sources import kind

KINDS = (
    kind.Kind(
        "s3",
        source=f"{__name__}.s3:S3Source",
        location=f"{__name__}.locations:S3",
        schemes=("s3",),
        example="cdi-worker import --region eu-west-1 s3://bucket/disk.qcow2 disk.img",
        digests=True,
    ),
    kind.Kind(
        "gcs",
        source=f"{__name__}.gcs:GcsSource",
        location=f"{__name__}.locations:Gcs",
        schemes=("gs",),
        example="cdi-worker import --credentials-file key.json gs://bucket/disk.qcow2 disk.img",
        digests=True,
    ),
)
