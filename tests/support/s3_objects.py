"""For tests of the S3 source: an object, its readers, and a server's error documents."""

from __future__ import annotations

import contextlib
import random

import pytest

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.sources import base
from cdi_worker.sources.objects import locations, s3
from tests.support import misbehave, objectservers

DATA = random.Random(11).randbytes(3 * 1024 * 1024 + 17)
ADMIN = base.Access(user=objectservers.ACCESS_KEY, password=objectservers.SECRET_KEY)
READER = base.Access(user=objectservers.READER[0], password=objectservers.READER[1])


def source(endpoint: str, access: base.Access = ADMIN, region: str = "") -> s3.S3Source:
    """Return the source of an object."""
    return s3.S3Source(locations.S3(endpoint=endpoint, access=access, region=region), cancelling.Cancel())


def opened(
    endpoint: str, access: base.Access = ADMIN, region: str = ""
) -> contextlib.AbstractContextManager[base.Image]:
    """Open the source of an object; close it after the block."""
    return base.open_image(source(endpoint, access, region))


def refusal(endpoint: str, access: base.Access = ADMIN) -> str:
    """Return the message of the ``Unreachable`` raised when the object is opened."""
    with pytest.raises(errors.Unreachable) as caught, opened(endpoint, access):
        pass
    return str(caught.value)


def document(code: str, **more: str) -> bytes:
    """Return an S3 error document; ``more`` are further elements."""
    elements = "".join(f"<{name}>{value}</{name}>" for name, value in {"Code": code, **more}.items())
    return f'<?xml version="1.0"?><Error>{elements}</Error>'.encode()


def scope(request: misbehave.Request) -> str:
    """Return the credential scope of a request's signature without its date."""
    credential = request.headers["authorization"].partition("Credential=")[2].partition(",")[0]
    return "/".join(credential.split("/")[2:])
