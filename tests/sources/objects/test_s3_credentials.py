"""Ambient credentials for S3, each in a process of its own."""

from __future__ import annotations

import hashlib
import socket
from pathlib import Path

import pytest

from cdi_worker.sources.web import http
from tests.support import misbehave, objectservers, processes, proxy, s3_objects, tls

READ = """
import sys, threading, hashlib
from cdi_worker.images.engine import cancelling
from cdi_worker.sources.objects import locations, s3
import os
from cdi_worker.sources import base
access = base.Access(http_proxy=os.environ.get("PROXY", ""))
location = locations.S3(endpoint=sys.argv[1], access=access)
with base.open_image(s3.S3Source(location, cancelling.Cancel())) as image:
    print(hashlib.sha256(image.facts.head).hexdigest())
"""


def web_identity(directory: Path, service: str) -> dict[str, str]:
    """Return the environment of a pod whose service account stands for a role; write its token."""
    (directory / "token").write_text("a-service-account-token")
    return {
        "AWS_ROLE_ARN": "arn:aws:iam::123456789012:role/importer",
        "AWS_WEB_IDENTITY_TOKEN_FILE": str(directory / "token"),
        "AWS_ENDPOINT_URL_STS": service,
        "AWS_REGION": "us-east-1",
    }


def reads(url: str, **variables: str) -> None:
    done = processes.script(READ, url, **variables)
    assert done.stdout.strip() == hashlib.sha256(s3_objects.DATA[: http.HEAD_SIZE]).hexdigest(), done.stderr


@pytest.fixture(scope="module")
def stored_url(seaweed: objectservers.Store) -> objectservers.Store:
    seaweed.put("disk.img", s3_objects.DATA)
    return seaweed


def test_credentials_of_the_environment_are_used(stored_url: objectservers.Store) -> None:
    key, secret = objectservers.READER
    keys = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret}
    reads(stored_url.url("disk.img"), **keys)


def test_credentials_of_a_profile_are_used(stored_url: objectservers.Store, tmp_path: Path) -> None:
    key, secret = objectservers.READER
    file = tmp_path / "credentials"
    file.write_text(f"[disks]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")
    reads(stored_url.url("disk.img"), AWS_SHARED_CREDENTIALS_FILE=str(file), AWS_PROFILE="disks")


def test_credentials_of_a_web_identity_are_used(server: misbehave.Server, tmp_path: Path) -> None:
    denied = misbehave.Page(s3_objects.document("AccessDenied"), status=403)
    url = server.serve("/b/k", (denied, 1), misbehave.Page(s3_objects.DATA))
    with objectservers.token_service(objectservers.READER) as service:
        reads(
            url,
            **web_identity(tmp_path, service.url),
        )
    assert "WebIdentityToken=a-service-account-token" in service.bodies[0]
    anonymous, signed = server.gets("/b/k")
    assert "authorization" not in anonymous.headers
    assert f"Credential={objectservers.READER[0]}/" in signed.headers["authorization"]
    assert signed.headers["x-amz-security-token"] == "a-session"


def test_log_of_botocore_shows_no_credential(server: misbehave.Server, tmp_path: Path) -> None:
    """A program that uses the library may log everything."""
    denied = misbehave.Page(s3_objects.document("AccessDenied"), status=403)
    url = server.serve("/b/k", (denied, 1), misbehave.Page(s3_objects.DATA))
    with objectservers.token_service(objectservers.READER) as service:
        done = processes.script(
            "import logging\nlogging.basicConfig(level=logging.DEBUG)" + READ,
            url,
            **web_identity(tmp_path, service.url),
        )
    assert done.stdout, done.stderr
    assert "DEBUG:botocore" in done.stderr
    for secret in ("a-service-account-token", objectservers.READER[1], ">a-session"):
        assert secret not in done.stderr


def test_token_service_is_reached_through_the_proxy(server: misbehave.Server, tmp_path: Path) -> None:
    """By the same rules as the object: no_proxy, and loopback."""
    denied = misbehave.Page(s3_objects.document("AccessDenied"), status=403)
    with objectservers.token_service(objectservers.READER) as service, proxy.Proxy() as between:
        far = service.url.replace("127.0.0.1", tls.FAR).replace("localhost", tls.FAR)
        for endpoint, is_proxied in ((service.url, False), (far, True)):
            url = server.serve("/b/k", (denied, 1), misbehave.Page(s3_objects.DATA))
            reads(
                url,
                **web_identity(tmp_path, endpoint),
                PROXY=between.url.removeprefix("http://"),
            )
            assert bool(between.requests) is is_proxied


STOPPED = """
import sys, threading, time
from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.sources import base
from cdi_worker.sources.objects import locations, s3
cancel = cancelling.Cancel()
threading.Timer(1, cancel.set).start()
began = time.monotonic()
try:
    s3.S3Source(locations.S3(endpoint=sys.argv[1]), cancel).open(base.Opening())
except errors.Cancelled:
    print(time.monotonic() - began, flush=True)
    import os
    os._exit(0)
"""


def test_cancel_ends_waiting_for_a_silent_token_service(server: misbehave.Server, tmp_path: Path) -> None:
    url = server.serve("/b/k", misbehave.Page(s3_objects.document("AccessDenied"), status=403))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        done = processes.script(
            STOPPED,
            url,
            **web_identity(tmp_path, f"http://127.0.0.1:{silent.getsockname()[1]}"),
        )
    assert float(done.stdout) < 10, done.stderr


def test_failing_ambient_credentials_are_reported(stored_url: objectservers.Store, tmp_path: Path) -> None:
    done = processes.script(READ, stored_url.url("disk.img"), AWS_PROFILE="none")
    assert "errors.Unreachable" in done.stderr
    assert "ambient AWS credentials: The config profile (none) could not be found" in done.stderr


@pytest.mark.parametrize(
    "text", ["not XML", "<html></html>", objectservers._ASSUMED.replace("2099", "2001"), "<a>\ud7ff</b>"]
)
def test_odd_response_of_the_token_service_is_reported(
    server: misbehave.Server, tmp_path: Path, text: str
) -> None:
    url = server.serve("/b/k", misbehave.Page(s3_objects.document("AccessDenied"), status=403))
    with objectservers.post_service(text, "text/xml") as service:
        done = processes.script(
            READ,
            url,
            **web_identity(tmp_path, service.url),
        )
    assert "errors.Unreachable: ambient AWS credentials: " in done.stderr


def test_missing_boto3_is_named() -> None:
    done = processes.script(f"import sys; sys.modules['boto3'] = None\n{READ}", "s3://b/k")
    assert "s3 source needs the Python package boto3: " in done.stderr
    assert "[s3]'" in done.stderr
