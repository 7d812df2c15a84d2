"""The locations of objects in S3 and Google Cloud Storage."""

from __future__ import annotations

import dataclasses
import re
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import ClassVar

from cdi_worker import errors
from cdi_worker.sources import fields, staged


@dataclasses.dataclass(frozen=True, kw_only=True)
class S3(staged.Files):
    """``s3://bucket/key`` or ``http(s)://host/bucket/key``.

    ``endpoint_url``: the server of ``s3://`` addresses, empty for AWS. ``default_region``: for ``s3://``
    only, as EKS sets its variable in every pod.
    """

    variables: ClassVar[Mapping[str, str]] = {"ca_file": "AWS_CA_BUNDLE"}

    region: str = fields.field(option="--region", help="S3 region, if the host name does not contain it.")
    endpoint_url: str = fields.field(
        env="AWS_ENDPOINT_URL_S3",
        more=("AWS_ENDPOINT_URL",),
        ambient=True,
        option="--endpoint-url",
        help="Server of s3:// addresses, http(s)://host[:port] [default: AWS].",
    )
    default_region: str = fields.field(
        env="AWS_REGION", more=("AWS_DEFAULT_REGION",), ambient=True, help="Region of s3:// addresses."
    )

    @property
    def address(self) -> str:
        """The endpoint. With another server than AWS, an ``s3://`` URL is changed to that server's."""
        return _served_by(self.endpoint_url, self.endpoint, "s3://")

    def faults(self) -> Iterator[str]:
        yield from staged.Files.faults(self)
        if self.endpoint_url and not re.fullmatch(r"https?://[^/?#]+/?", self.endpoint_url):
            yield fields.Fault(
                "malformed S3 endpoint URL ({}); expected http(s)://host[:port]",
                "AWS_ENDPOINT_URL",
                "--endpoint-url or AWS_ENDPOINT_URL",
            )
        # They are sent in headers, and so are ASCII.
        for name in ("user", "session_token"):
            try:
                fields.token(getattr(self.access, name))
            except errors.RequestError as err:
                yield fields.fault(self.access, f"{{}}: {err}", name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gcs(staged.Files):
    """``gs://bucket/object`` or ``http(s)://host/bucket/object``.

    ``emulator``: host or URL of a server that emulates Google Cloud Storage.
    """

    credentials_file: str = fields.field(
        env="GOOGLE_APPLICATION_CREDENTIALS",
        option="--credentials-file",
        help="Google credentials (JSON).",
        key="secretRef",
        entry="credentials.json",
        selects=False,
    )
    emulator: str = fields.field(
        env="STORAGE_EMULATOR_HOST", ambient=True, help="Address of an emulator, for gs:// URLs."
    )

    @property
    def address(self) -> str:
        """The endpoint. With an emulator, a ``gs://`` URL is changed to the emulator's."""
        is_url = not self.emulator or "://" in self.emulator
        return _served_by(self.emulator if is_url else f"http://{self.emulator}", self.endpoint, "gs://")


def _served_by(server: str, endpoint: str, scheme: str) -> str:
    """Return a URL of the store's own ``scheme`` as one of ``server``, if that is given."""
    if not server or not endpoint.startswith(scheme):
        return endpoint
    return f"{server.rstrip('/')}/{urllib.parse.quote(endpoint.removeprefix(scheme))}"
