"""The locations of objects in S3 and Google Cloud Storage."""

from __future__ import annotations

import dataclasses
import urllib.parse

from cdi_worker.sources import base, fields


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class S3(base.Location):
    """``s3://bucket/key`` or ``http(s)://host/bucket/key``."""

    region: str = fields.field(option="--region", help="S3 region, if the host name does not contain it.")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gcs(base.Location):
    """``gs://bucket/object`` or ``http(s)://host/bucket/object``.

    ``emulator``: host or URL of a server that emulates Google Cloud Storage.
    """

    credentials_file: str = fields.field(
        env="GOOGLE_APPLICATION_CREDENTIALS",
        option="--credentials-file",
        help="Google credentials (JSON).",
        key="secretRef",
        entry="credentials.json",
    )
    emulator: str = fields.field(
        env="STORAGE_EMULATOR_HOST", ambient=True, help="Address of an emulator, for gs:// URLs."
    )

    @property
    def address(self) -> str:
        """The endpoint. With an emulator, a ``gs://`` URL is changed to the emulator's."""
        emulator = self.emulator.rstrip("/")
        if not emulator or not self.endpoint.startswith("gs://"):
            return self.endpoint
        scheme = "" if "://" in emulator else "http://"
        return f"{scheme}{emulator}/{urllib.parse.quote(self.endpoint.removeprefix('gs://'))}"
