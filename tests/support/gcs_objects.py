"""For tests of the GCS source: an object, and a server that serves it as Google does."""

from __future__ import annotations

import base64
import contextlib
import json
import random
from pathlib import Path
from typing import Any

import google_crc32c
import pytest

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.sources import base
from cdi_worker.sources.objects import gcs, locations
from tests.support import misbehave

DATA = random.Random(13).randbytes(3 * 1024 * 1024 + 17)
METADATA = "/storage/v1/b/b/o/o?projection=noAcl&prettyPrint=false"
MEDIA = "/download/storage/v1/b/b/o/o?alt=media&generation=7"


def source(
    endpoint: str, access: base.Access | None = None, credentials_file: Path | str = ""
) -> gcs.GcsSource:
    """Return the source of an object."""
    location = locations.Gcs(
        endpoint=endpoint, access=access or base.Access(), credentials_file=str(credentials_file)
    )
    return gcs.GcsSource(location, cancelling.Cancel())


def opened(*arguments: Any) -> contextlib.AbstractContextManager[base.Image]:
    """Open the source of an object, see ``source``; close it after the block."""
    return base.open_image(source(*arguments))


def refusal(endpoint: str, credentials_file: Path | str = "") -> str:
    """Return the message of the ``Unreachable`` raised when the object is opened."""
    with pytest.raises(errors.Unreachable) as caught, opened(endpoint, None, credentials_file):
        pass
    return str(caught.value)


def serve(server: misbehave.Server, *turns: Any, data: bytes = DATA, **more: object) -> str:
    """Serve an object as Google does: generation, CRC, and the media of that generation only."""
    crc = base64.b64encode(google_crc32c.value(data).to_bytes(4)).decode()
    resource = {"generation": "7", "size": str(len(data)), "crc32c": crc, **more}
    page = misbehave.Page(json.dumps(resource).encode(), ranges=False, content_type="application/json")
    server.serve(METADATA, page)
    server.serve(MEDIA, *turns)
    return server.url("/b/o")


def media(data: bytes = DATA, **more: Any) -> misbehave.Page:
    """Return the media response of generation 7."""
    return misbehave.Page(data, headers={"x-goog-generation": "7"}, **more)


def error(status: int, message: str, *reasons: str) -> misbehave.Page:
    """Return an error response of Google's JSON API."""
    document = {"code": status, "message": message, "errors": [{"reason": reason} for reason in reasons]}
    return misbehave.Page(
        json.dumps({"error": document}).encode(), status=status, content_type="application/json"
    )
