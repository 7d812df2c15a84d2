"""What the tests of the S3 source share: an object, its readers, and documents of a server."""

from __future__ import annotations

import random
import threading

import pytest

from cdi_worker import errors
from cdi_worker.sources import base
from cdi_worker.sources.objects import locations, s3
from tests.support import misbehave, objectservers

DATA = random.Random(11).randbytes(3 * 1024 * 1024 + 17)
ADMIN = base.Access(user=objectservers.ACCESS_KEY, password=objectservers.SECRET_KEY)
READER = base.Access(user=objectservers.READER[0], password=objectservers.READER[1])


def opened(endpoint: str, access: base.Access = ADMIN, region: str = "") -> s3.S3Source:
    return s3.source(locations.S3(endpoint=endpoint, access=access, region=region), threading.Event())


def refusal(endpoint: str, access: base.Access = ADMIN) -> str:
    with pytest.raises(errors.Unreachable) as caught, opened(endpoint, access):
        pass
    return str(caught.value)


def document(code: str, **more: str) -> bytes:
    elements = "".join(f"<{name}>{value}</{name}>" for name, value in {"Code": code, **more}.items())
    return f'<?xml version="1.0"?><Error>{elements}</Error>'.encode()


def scope(seen: misbehave.Seen) -> str:
    """Return date-less scope of a signature: region, service, end."""
    credential = seen.headers["authorization"].partition("Credential=")[2].partition(",")[0]
    return "/".join(credential.split("/")[2:])
