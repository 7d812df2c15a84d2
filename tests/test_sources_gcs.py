"""The GCS source against an emulator, with a guard before it, and against a server that misbehaves."""

from __future__ import annotations

import base64
import dataclasses
import gc
import gzip
import hashlib
import json
import os
import random
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from importer import contract, errors
from sources import base, gcs, session
from tests import misbehave, objectservers, proxy, reading, tls

DATA = random.Random(13).randbytes(3 * 1024 * 1024 + 17)
TOKEN = "ya29.a-token-of-the-tests"
REPOSITORY = Path(__file__).parents[1]
METADATA = "/storage/v1/b/b/o/o?projection=noAcl&prettyPrint=false"
MEDIA = "/download/storage/v1/b/b/o/o?alt=media&generation=7"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[objectservers.Emulator]:
    with objectservers.emulator(tmp_path_factory.mktemp("emulator")) as running:
        running.put("disk.img", DATA)
        yield running


@pytest.fixture
def guard(store: objectservers.Emulator) -> Iterator[objectservers.Service]:
    with objectservers.guarded(store, TOKEN) as running:
        yield running


def opened(
    endpoint: str, access: base.Access | None = None, credentials_file: Path | str = ""
) -> gcs.GcsSource:
    location = base.Location(
        endpoint=endpoint, access=access or base.Access(), credentials_file=str(credentials_file)
    )
    return gcs.source(location, threading.Event())


def refusal(endpoint: str, credentials_file: Path | str = "") -> str:
    with pytest.raises(errors.Unreachable) as caught, opened(endpoint, None, credentials_file):
        pass
    return str(caught.value)


def serve(server: misbehave.Server, *turns: Any, data: bytes = DATA, **more: object) -> str:
    """Serve an object as Google does: a generation, a CRC, and the media of that generation alone."""
    crc = base64.b64encode(google_crc32c.value(data).to_bytes(4)).decode()
    resource = {"generation": "7", "size": str(len(data)), "crc32c": crc, **more}
    page = misbehave.Page(json.dumps(resource).encode(), ranges=False, content_type="application/json")
    server.serve(METADATA, page)
    server.serve(MEDIA, *turns)
    return server.url("/b/o")


def media(data: bytes = DATA, **more: Any) -> misbehave.Page:
    return misbehave.Page(data, headers={"x-goog-generation": "7"}, **more)


def error(status: int, message: str, *reasons: str) -> misbehave.Page:
    said = {"code": status, "message": message, "errors": [{"reason": reason} for reason in reasons]}
    return misbehave.Page(
        json.dumps({"error": said}).encode(), status=status, content_type="application/json"
    )


def test_an_object_is_read_at_random_in_parallel_and_in_order(store: objectservers.Emulator) -> None:
    with opened(store.url("disk.img")) as source:
        assert (source.size, source.head) == (len(DATA), DATA[: 256 * 1024])
        assert source.identity is not None
        assert source.identity.startswith("generation 1")
        assert reading.part(source, 300_001, 70_000) == DATA[300_001:370_001]
        assert reading.part(source, len(DATA) - 5, 100) == DATA[-5:]
        assert reading.streamed(source) == DATA
        source.verify()
    with opened(store.url("disk.img")) as source:
        assert reading.drained(source.stream()) == DATA
        source.verify()
        assert reading.drained(source.stream(1000)) == DATA[1000:]


@pytest.mark.parametrize("name", ["a/b c/d+e%f.img", "é/ü.img", "x=y&z?.img", "(a)!'*#.img"])
def test_any_name_is_found(store: objectservers.Emulator, name: str) -> None:
    store.put(name, b"disk" * 1000)
    with opened(store.url(urllib.parse.quote(name))) as source:
        assert source.head == b"disk" * 1000


def test_what_is_stored_compressed_arrives_as_stored(store: objectservers.Emulator) -> None:
    packed = gzip.compress(DATA)
    store.put("packed", packed, encoding="gzip")
    with opened(store.url("packed")) as source:
        assert source.size == len(packed)
        assert reading.streamed(source) == packed
        source.verify()


def test_compressed_answers_are_asked_for_and_left_alone(server: misbehave.Server) -> None:
    packed = gzip.compress(DATA)
    page = media(packed)
    page = dataclasses.replace(page, headers={**page.headers, "Content-Encoding": "gzip"})
    with opened(serve(server, page, data=packed, contentEncoding="gzip")) as source:
        assert reading.streamed(source) == packed
        source.verify()
    assert {seen.headers["accept-encoding"] for seen in server.gets(MEDIA)} == {"gzip"}


def test_an_empty_object(store: objectservers.Emulator) -> None:
    store.put("empty", b"")
    with opened(store.url("empty")) as source:
        assert (source.size, source.head, reading.drained(source.stream())) == (0, b"", b"")
        source.verify()


def test_only_the_generation_of_the_first_contact_is_read(server: misbehave.Server) -> None:
    gone = misbehave.Page(b"No such object: b/o", status=404, content_type="text/html")
    with opened(serve(server, (media(), 2), gone)) as source:
        assert source.identity is not None
        assert source.identity.startswith("generation 7 crc32c ")
        assert reading.part(source, 5, 10) == DATA[5:15]
        with pytest.raises(errors.SourceChanged, match="generation was 7, now replaced or deleted"):
            reading.part(source, 5, 10)


def test_new_metadata_is_no_new_object(server: misbehave.Server) -> None:
    touched = media(etag='"two"', modified="Wed, 04 Nov 2026 10:00:00 GMT")
    with opened(serve(server, (media(), 1), touched)) as source:
        assert reading.streamed(source) == DATA


def test_another_generation_in_the_answer_is_noticed(server: misbehave.Server) -> None:
    other = dataclasses.replace(media(), headers={"x-goog-generation": "8"})
    with opened(serve(server, (media(), 1), other)) as source, pytest.raises(errors.SourceChanged):
        reading.part(source, 0, 10)


@pytest.mark.parametrize("ordered", [True, False])
def test_bytes_that_are_not_the_stored_ones_are_noticed(server: misbehave.Server, ordered: bool) -> None:
    url = serve(server, media(DATA[:-1] + b"?"), data=DATA[:-1] + b"!")
    with opened(url) as source:
        assert source.size is not None
        source.verify()  # not all was read: nothing to say
        reading.drained(source.stream()) if ordered else reading.streamed(source)
        with pytest.raises(errors.ChecksumMismatch, match="checksum mismatch: expected crc32c:"):
            source.verify()


def test_a_reading_from_the_beginning_is_verified_anew(server: misbehave.Server) -> None:
    """The fallback to one stream reads again what was read by ranges, and what it brings is written."""
    url = serve(server, (media(), 2), media(b"?" + DATA[1:]))
    with opened(url) as source:
        reading.part(source, 0, 1000)
        reading.drained(source.stream())
        with pytest.raises(errors.ChecksumMismatch):
            source.verify()


def test_throttling_and_resets_are_outlasted(server: misbehave.Server) -> None:
    busy = error(429, "slow down", "rateLimitExceeded")
    limited = error(403, "too many", "userRateLimitExceeded")
    torn = media(cut=100_000)
    url = serve(server, (media(), 1), (busy, 2), (torn, 5), (limited, 1), (error(503, "later"), 1), media())
    with opened(url) as source:
        assert reading.streamed(source) == DATA
        source.verify()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>log in</html>",
        b"\xff\xfe",
        b"[]",
        b"[" * 100_000,
        b"{}",
        b'{"generation": "7"}',
        b'{"generation": "new", "size": "1"}',
        b'{"generation": {}, "size": []}',
        b'{"generation": "7", "size": "1", "crc32c": "!!!"}',
        b'{"generation": "' + b"9" * 5000 + b'", "size": "1"}',
        b'{"generation": "7", "size": "1", "metadata": {"a": "' + b"a" * (2 << 20) + b'"}}',
    ],
    ids=lambda body: repr(body[:20]),
)
def test_an_answer_that_is_no_metadata_is_named(server: misbehave.Server, body: bytes) -> None:
    server.serve(METADATA, misbehave.Page(body, ranges=False))
    gc.collect()  # finalizers find no room in a stack that is full of brackets
    assert "the answer is no metadata of an object" in refusal(server.url("/b/o"))


@pytest.mark.parametrize("fault", [{"cut": 5}, {"missing": 5}])
def test_metadata_that_breaks_off_is_asked_for_again(server: misbehave.Server, fault: dict[str, Any]) -> None:
    url = serve(server, media())
    whole, _ = server.turn(METADATA, "HEAD")
    server.serve(METADATA, (dataclasses.replace(whole, **fault), 1), whole)
    with pytest.raises(errors.Transient), opened(url):
        pass
    with opened(url) as source:
        assert source.size == len(DATA)


def test_a_refusal_of_brackets_alone(server: misbehave.Server) -> None:
    server.serve(METADATA, misbehave.Page(b"[" * 60_000, status=403))
    gc.collect()
    assert "access denied" in refusal(server.url("/b/o"))


def test_a_refusal_names_its_cause(store: objectservers.Emulator, server: misbehave.Server) -> None:
    assert "no such object 'nothing' in bucket 'images'" in refusal(store.url("nothing"))
    url = serve(server, media())
    for page, cause in (
        (error(404, "The specified bucket does not exist."), "no such bucket 'b'"),
        (error(404, "No such object: b/o"), "no such object 'o' in bucket 'b'"),
        (error(403, "no permission"), "access denied without credentials: no permission"),
        (error(400, "User project specified is invalid."), "400 Bad Request: User project"),
    ):
        server.serve(METADATA, page)
        assert cause in refusal(url)


@pytest.mark.parametrize(
    "endpoint", ["gs://bucket", "gs:///name", "http://host/bucket", "https://h/b/o?sig=1"]
)
def test_a_malformed_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(errors.RequestError) as caught:
        opened(endpoint)
    assert "=1" not in str(caught.value)


def test_an_address_of_google_goes_through_proxy_and_custom_ca(
    server: misbehave.Server, tmp_path: Path
) -> None:
    authority = tls.Authority(tmp_path)
    with proxy.Proxy(authority=authority, origin=server.url("")) as between:
        access = base.Access(https_proxy=between.url, ca_files=(str(authority.certificate),))
        serve(server, media())
        with opened("gs://b/o", access) as source:
            assert source.name == "gs://b/o"
            assert reading.streamed(source) == DATA
    assert between.requests[0].target == "storage.googleapis.com:443"


def test_the_emulator_of_the_environment_is_used() -> None:
    paths = contract.Paths(data="/nowhere")
    for host in ("http://127.0.0.1:9", "127.0.0.1:9", "http://127.0.0.1:9/"):
        env = {"IMPORTER_SOURCE": "gcs", "IMPORTER_ENDPOINT": "gs://b/o o", "STORAGE_EMULATOR_HOST": host}
        assert contract.import_request(env, paths).location.endpoint == "http://127.0.0.1:9/b/o%20o"


# -- credentials ------------------------------------------------------------------------------------


def service_account(directory: Path, token_uri: str) -> Path:
    key = rsa.generate_private_key(65537, 2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file = directory / "credentials.json"
    file.write_text(json.dumps({
        "type": "service_account", "client_email": "importer@project.iam.gserviceaccount.com",
        "private_key": key.decode(), "private_key_id": "1", "token_uri": token_uri,
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


def test_a_service_account(guard: objectservers.Service, tmp_path: Path) -> None:
    file = service_account(tmp_path, f"{guard.url}/token")
    with opened(f"{guard.url}/images/disk.img", None, file) as source:
        assert reading.streamed(source) == DATA
        source.verify()
    assert len(guard.asked) == 1
    assert "assertion=" in guard.asked[0]


def test_an_external_account(guard: objectservers.Service, tmp_path: Path) -> None:
    file = external_account(tmp_path, "https://sts.googleapis.com/v1/token")
    authority = tls.Authority(tmp_path)
    with proxy.Proxy(authority=authority, origin=guard.url) as between:
        access = base.Access(https_proxy=between.url, ca_files=(str(authority.certificate),))
        with opened(f"{guard.url}/images/disk.img", access, file) as source:
            assert reading.streamed(source) == DATA
    assert "subject_token=a-token-of-the-cluster" in guard.asked[0]
    assert between.requests[0].target == "sts.googleapis.com:443"


@pytest.mark.parametrize("field", ["token_url", "service_account_impersonation_url"])
@pytest.mark.parametrize(
    "url",
    [
        "http://sts.googleapis.com/v1/token",
        "https://evil.example/token",
        "https://sts.googleapis.com.evil.example/",
    ],
)
def test_a_file_sends_no_token_of_the_surroundings_elsewhere(tmp_path: Path, field: str, url: str) -> None:
    """A file from others may name any file of this machine, or its metadata server, as what to exchange."""
    file = external_account(tmp_path, "https://sts.googleapis.com/v1/token")
    file.write_text(json.dumps({**json.loads(file.read_text()), field: url}))
    with pytest.raises(errors.RequestError, match=f"{field} is not at"):
        opened("gs://b/o", None, file)


def test_no_limit_is_on_the_whole_of_a_transfer(server: misbehave.Server) -> None:
    """Only on silence, here of half a second: Google's own library ends transfers after a fixed time."""
    data, access = DATA[:100_000], base.Access(patience=0.5)
    slow = media(data, drip=(5_000, 0.1))
    url = serve(server, (slow, 2), media(data, stall=1000), data=data)
    started = time.monotonic()
    with opened(url, access) as source:
        assert source.head == data
        assert reading.drained(source.stream()) == data
        source.verify()
        assert time.monotonic() - started > 6 * access.patience
        with pytest.raises(errors.Transient, match="timed out"):
            reading.drained(source.stream())
    assert {seen.headers["user-agent"] for seen in server.gets(MEDIA)} == {session.USER_AGENT}


def test_a_token_that_is_no_longer_accepted_is_renewed(server: misbehave.Server, tmp_path: Path) -> None:
    answer = {"access_token": TOKEN, "token_type": "Bearer", "expires_in": 3600}
    with objectservers.answering(json.dumps(answer), "application/json") as service:
        file = service_account(tmp_path, service.url)
        url = serve(server, (media(), 1), (error(401, "Invalid Credentials"), 1), media())
        with opened(url, None, file) as source:
            assert reading.streamed(source) == DATA
    assert len(service.asked) == 2


@pytest.mark.parametrize(
    ("server", "access"),
    [
        ("https://storage.example", base.Access()),
        ("http://localhost:4443", base.Access()),
        ("http://[::1]:4443", base.Access()),
        ("http://storage.example", base.Access(insecure=True)),
    ],
)
def test_no_token_goes_in_clear_beyond_this_machine(tmp_path: Path, server: str, access: base.Access) -> None:
    """Whoever sees it pass may use it."""
    file = service_account(tmp_path, "https://oauth2.googleapis.com/token")
    assert opened(f"{server}/b/o", access, file)
    for elsewhere in ("http://storage.example", "http://10.0.0.1:4443", "http://localhost.example"):
        assert opened(f"{elsewhere}/b/o")
        with pytest.raises(errors.RequestError, match=f"^{elsewhere}: .* token in clear; ask by https, give"):
            opened(f"{elsewhere}/b/o", None, file)


def test_a_token_service_out_of_reach_is_named(guard: objectservers.Service, tmp_path: Path) -> None:
    file = service_account(tmp_path, "http://127.0.0.1:1/token")
    with (
        pytest.raises(errors.Transient, match=r"^Google's token service: connection refused$"),
        opened(f"{guard.url}/images/disk.img", None, file),
    ):
        pass


def test_credentials_that_are_not_enough(guard: objectservers.Service, tmp_path: Path) -> None:
    with objectservers.answering('{"error": "invalid_grant"}', "application/json", status=400) as service:
        said = refusal(f"{guard.url}/images/disk.img", service_account(tmp_path, service.url))
    assert "Google credentials: invalid_grant" in said


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
def test_an_unusable_credentials_file(tmp_path: Path, text: str, fault: str) -> None:
    file = tmp_path / "credentials.json"
    file.write_text(text)
    with pytest.raises(errors.RequestError, match=fault) as caught:
        opened("gs://b/o", None, file)
    assert "s3cret" not in str(caught.value)
    with pytest.raises(errors.RequestError, match="no such file"):
        opened("gs://b/o", None, tmp_path / "nothing")


READ = """
import os, sys, threading, hashlib
from sources import base, gcs, session
access = base.Access(https_proxy=os.environ.get("PROXY", ""), ca_files=tuple(sys.argv[2:]))
with gcs.source(base.Location(endpoint=sys.argv[1], access=access), threading.Event()) as source:
    print(hashlib.sha256(source.head).hexdigest())
"""


def run(script: str, *argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "NO_GCE_CHECK": "true"}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", script, *argv],
        cwd=REPOSITORY, env={**kept, **variables}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_ambient_credentials_are_looked_for_where_anonymous_is_refused(
    guard: objectservers.Service, tmp_path: Path
) -> None:
    file = service_account(tmp_path, f"{guard.url}/token")
    authority = tls.Authority(tmp_path)
    with proxy.Proxy(authority=authority, origin=guard.url) as between:
        google = (READ, "gs://images/disk.img", str(authority.certificate))
        done = run(*google, PROXY=between.url, GOOGLE_APPLICATION_CREDENTIALS=str(file))
        assert done.stdout.strip() == hashlib.sha256(DATA[: 256 * 1024]).hexdigest(), done.stderr
        done = run(*google, PROXY=between.url)
        assert "access denied without credentials: Anonymous caller does not have access" in done.stderr


def test_ambient_credentials_are_not_shown_to_others(guard: objectservers.Service, tmp_path: Path) -> None:
    """A token is good for whoever has it: a server that refuses must not be given this machine's."""
    file = service_account(tmp_path, f"{guard.url}/token")
    done = run(READ, f"{guard.url}/images/disk.img", GOOGLE_APPLICATION_CREDENTIALS=str(file))
    assert "access denied without credentials" in done.stderr
    assert not guard.asked


def test_without_the_library_the_error_says_what_to_install() -> None:
    done = run(f"import sys; sys.modules['google.cloud.storage'] = None\n{READ}", "gs://b/o")
    assert "the gcs source needs the Python package google-cloud-storage" in done.stderr
    assert "pip install 'cdi-worker[gcs]'" in done.stderr
