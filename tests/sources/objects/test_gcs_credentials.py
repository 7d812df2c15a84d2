"""Credentials for Google: from a file, from the environment, and which servers receive them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import pickle
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.importer import report
from cdi_worker.sources import base
from cdi_worker.sources.objects import gcs, locations
from cdi_worker.sources.web import http
from tests.support import gcs_objects, misbehave, objectservers, processes, proxy, reading, tls

TOKEN = "ya29.a-token-of-the-tests"


@pytest.fixture
def guard(emulator: objectservers.Emulator) -> Iterator[objectservers.Service]:
    emulator.put("disk.img", gcs_objects.DATA)
    with objectservers.with_bearer_token(emulator, TOKEN) as running:
        running.disk = emulator.url("disk.img", host=running.url)
        yield running


# -- credentials ------------------------------------------------------------------------------------


@functools.cache
def private_key() -> str:
    return (
        rsa.generate_private_key(65537, 2048)
        .private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        .decode()
    )


def service_account(directory: Path, token_uri: str) -> Path:
    file = directory / "credentials.json"
    file.write_text(json.dumps({
        "type": "service_account", "client_email": "importer@project.iam.gserviceaccount.com",
        "private_key": private_key(), "private_key_id": "1", "token_uri": token_uri,
    }))  # fmt: skip
    return file


def external_account(directory: Path, token_url: str) -> Path:
    (directory / "subject").write_text("a-token-of-the-cluster")
    file = directory / "credentials.json"
    file.write_text(json.dumps({
        "type": "external_account", "token_url": token_url,
        "audience": "//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/providers/q",
        "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
        "credential_source": {"file": str(directory / "subject")},
    }))  # fmt: skip
    return file


def test_service_account_gets_a_token(guard: objectservers.Service, tmp_path: Path) -> None:
    file = service_account(tmp_path, f"{guard.url}/token")
    with gcs_objects.opened(guard.disk, None, file) as image:
        assert reading.read_through_engine(image) == gcs_objects.DATA
        image.verify()
    assert len(guard.bodies) == 1
    assert "assertion=" in guard.bodies[0]


def test_external_account_exchanges_its_token(guard: objectservers.Service, tmp_path: Path) -> None:
    file = external_account(tmp_path, "https://sts.googleapis.com/v1/token")
    authority = tls.Authority(tmp_path)
    with proxy.Proxy(authority=authority, origin=guard.url) as between:
        access = base.Access(https_proxy=between.url, ca_files=(str(authority.certificate),))
        with gcs_objects.opened(guard.disk, access, file) as image:
            assert reading.read_through_engine(image) == gcs_objects.DATA
    assert "subject_token=a-token-of-the-cluster" in guard.bodies[0]
    assert between.requests[0].target == "sts.googleapis.com:443"


def test_credentials_file_cannot_send_other_tokens(tmp_path: Path) -> None:
    """An untrusted file may name any local file, or the metadata server, as the token to exchange."""
    file = external_account(tmp_path, "https://sts.googleapis.com/v1/token")
    whole = json.loads(file.read_text())
    for url in (
        "http://sts.googleapis.com/v1/token",
        "https://evil.example/token",
        "https://sts.googleapis.com.evil.example/",
    ):
        for field in ("token_url", "service_account_impersonation_url"):
            file.write_text(json.dumps({**whole, field: url}))
            with pytest.raises(errors.RequestError, match=f"{field} is not at"):
                gcs_objects.opened("gs://b/o", None, file)


def test_rejected_token_is_renewed(server: misbehave.Server, tmp_path: Path) -> None:
    answer = {"access_token": TOKEN, "token_type": "Bearer", "expires_in": 3600}
    with objectservers.post_service(json.dumps(answer), "application/json") as service:
        file = service_account(tmp_path, service.url)
        url = gcs_objects.serve(
            server,
            (gcs_objects.media(), 1),
            (gcs_objects.error(401, "Invalid Credentials"), 1),
            gcs_objects.media(),
        )
        with gcs_objects.opened(url, None, file) as image:
            assert reading.read_through_engine(image) == gcs_objects.DATA
    assert len(service.bodies) == 2


@pytest.mark.parametrize(
    ("server", "access"),
    [
        ("https://storage.example", base.Access()),
        ("http://localhost:4443", base.Access()),
        ("http://[::1]:4443", base.Access()),
        ("http://storage.example", base.Access(insecure=True)),
    ],
)
def test_token_is_not_sent_unencrypted_to_other_hosts(
    tmp_path: Path, server: str, access: base.Access
) -> None:
    """It could be read and used on the way."""
    file = service_account(tmp_path, "https://oauth2.googleapis.com/token")
    assert gcs_objects.opened(f"{server}/b/o", access, file)
    for elsewhere in ("http://storage.example", "http://10.0.0.1:4443", "http://localhost.example"):
        assert gcs_objects.opened(f"{elsewhere}/b/o")
        with pytest.raises(errors.RequestError, match=f"^{elsewhere}: .* unencrypted; use https") as caught:
            gcs_objects.opened(f"{elsewhere}/b/o", None, file)
        again = pickle.loads(pickle.dumps(caught.value))
        assert again.at_terminal().endswith(", or allow plain http (--insecure)")
        assert report.failure(again, "gcs").message.endswith("(emulators need none)")


def test_unreachable_token_service_is_reported(guard: objectservers.Service, tmp_path: Path) -> None:
    file = service_account(tmp_path, "http://127.0.0.1:1/token")
    with (
        pytest.raises(errors.Transient, match=r"^Google's token service: connection refused; check host "),
        gcs_objects.opened(guard.disk, None, file),
    ):
        pass


def test_cancel_ends_waiting_for_a_silent_token_service(tmp_path: Path) -> None:
    cancel, began = cancelling.Cancel(), time.monotonic()
    threading.Timer(0.3, cancel.set).start()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        file = service_account(tmp_path, f"http://127.0.0.1:{silent.getsockname()[1]}/token")
        location = locations.Gcs("gs://b/o", credentials_file=str(file))
        with pytest.raises(errors.Cancelled):
            gcs.GcsSource(location, cancel).open(base.Opening())
        # The request is ended, not abandoned until it times out.
        connection, _ = silent.accept()
        connection.settimeout(processes.PATIENCE / 2)
        with connection, contextlib.suppress(ConnectionResetError):
            while connection.recv(1 << 16):
                pass
    assert time.monotonic() - began < processes.PATIENCE


@pytest.mark.parametrize(
    "text", [" " * (2 << 20) + json.dumps({"access_token": TOKEN, "expires_in": 3600}), "<html></html>", "[]"]
)
def test_response_that_is_not_a_token_is_reported(
    guard: objectservers.Service, tmp_path: Path, text: str
) -> None:
    """A longer one than a token's is not read."""
    with objectservers.post_service(text, "application/json") as service:
        message = gcs_objects.refusal(guard.disk, service_account(tmp_path, service.url))
    assert message.startswith("Google credentials: ")


def test_rejected_credentials_are_reported(guard: objectservers.Service, tmp_path: Path) -> None:
    with objectservers.post_service('{"error": "invalid_grant"}', "application/json", status=400) as service:
        message = gcs_objects.refusal(guard.disk, service_account(tmp_path, service.url))
    assert "Google credentials: invalid_grant" in message


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("not json: s3cret", "not a usable Google credentials file"),
        ("[]", "not a usable Google credentials file"),
        ('{"type": "service_account", "private_key": "s3cret"}', "not a usable Google credentials file"),
        ('{"type": "external_account", "credential_source": {"executable": {}}}', "are not supported"),
        ('{"type": "odd"}', "of type 'odd' are not supported"),
    ],
)
def test_unusable_credentials_file_is_reported(tmp_path: Path, text: str, fault: str) -> None:
    file = tmp_path / "credentials.json"
    file.write_text(text)
    with pytest.raises(errors.RequestError, match=fault) as caught:
        gcs_objects.opened("gs://b/o", None, file)
    assert "s3cret" not in str(caught.value)
    with pytest.raises(errors.RequestError, match="no such file"):
        gcs_objects.opened("gs://b/o", None, tmp_path / "nothing")


READ = """
import os, sys, hashlib
from cdi_worker.images.engine import cancelling
from cdi_worker.sources import base
from cdi_worker.sources.objects import gcs, locations
from cdi_worker.sources.web import session
access = base.Access(https_proxy=os.environ.get("PROXY", ""), ca_files=tuple(sys.argv[2:]))
where = locations.Gcs(endpoint=sys.argv[1], access=access)
facts = gcs.GcsSource(where, cancelling.Cancel()).open(base.Opening())
print(hashlib.sha256(facts.head).hexdigest())
"""


def test_ambient_credentials_are_used_if_anonymous_access_fails(
    guard: objectservers.Service, emulator: objectservers.Emulator, tmp_path: Path
) -> None:
    file = service_account(tmp_path, f"{guard.url}/token")
    authority = tls.Authority(tmp_path)
    with proxy.Proxy(authority=authority, origin=guard.url) as between:
        google = (READ, emulator.uri("disk.img"), str(authority.certificate))
        done = processes.script(*google, PROXY=between.url, GOOGLE_APPLICATION_CREDENTIALS=str(file))
        assert done.stdout.strip() == hashlib.sha256(gcs_objects.DATA[: http.HEAD_SIZE]).hexdigest(), (
            done.stderr
        )
        done = processes.script(*google, PROXY=between.url)
        assert "access denied without credentials: Anonymous caller does not have access" in done.stderr


def test_ambient_credentials_are_not_sent_to_other_servers(
    guard: objectservers.Service, tmp_path: Path
) -> None:
    """A bearer token can be used by anyone: a server that refuses a request must not receive ours."""
    file = service_account(tmp_path, f"{guard.url}/token")
    done = processes.script(READ, guard.disk, GOOGLE_APPLICATION_CREDENTIALS=str(file))
    assert "access denied without credentials" in done.stderr
    assert not guard.bodies


def test_missing_library_is_named() -> None:
    done = processes.script(f"import sys; sys.modules['google.cloud.storage'] = None\n{READ}", "gs://b/o")
    assert "the gcs source needs the Python package google-cloud-storage" in done.stderr
    assert "[gcs]'" in done.stderr
