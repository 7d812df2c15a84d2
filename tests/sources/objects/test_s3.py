"""The S3 source with SeaweedFS, with rclone, and with a misbehaving server."""

from __future__ import annotations

import dataclasses
import datetime as dt
import hashlib
import resource
import subprocess
import sys
import urllib.parse

import pytest

from cdi_worker import errors
from cdi_worker.formats.zstd import zstd
from cdi_worker.sources import base
from cdi_worker.sources.web import http
from tests.support import misbehave, objectservers, reading, s3_objects, uploads, worker


@pytest.fixture(scope="module")
def store(seaweed: objectservers.Store) -> objectservers.Store:
    seaweed.put("disk.img", s3_objects.DATA)
    seaweed.put("disk.img", s3_objects.DATA, bucket="public")
    return seaweed


@pytest.fixture(scope="module")
def rclone_store(rclone: objectservers.Store) -> objectservers.Store:
    rclone.put("disk.img", s3_objects.DATA)
    return rclone


@pytest.mark.parametrize("tls_port", [False, True], ids=["http", "https"])
def test_object_is_read_by_ranges_in_parallel(
    store: objectservers.Store, certificates: uploads.Certificates, tls_port: bool
) -> None:
    access = dataclasses.replace(s3_objects.ADMIN, ca_files=(str(certificates.authority.certificate),))
    with s3_objects.opened(store.url("disk.img", tls=tls_port), access) as image:
        assert image.facts.size == len(s3_objects.DATA)
        assert image.facts.head == s3_objects.DATA[: http.HEAD_SIZE]
        assert image.facts.identity is not None
        assert hashlib.md5(s3_objects.DATA, usedforsecurity=False).hexdigest() in image.facts.identity
        assert (
            image.facts.digest == f'etag:"{hashlib.md5(s3_objects.DATA, usedforsecurity=False).hexdigest()}"'
        )
        assert reading.read_range(image.source.ranges, 300_001, 70_000) == s3_objects.DATA[300_001:370_001]
        assert reading.read_range(image.source.ranges, len(s3_objects.DATA) - 5, 100) == s3_objects.DATA[-5:]
        assert reading.read_through_engine(image) == s3_objects.DATA


def test_certificates_are_verified_unless_insecure(store: objectservers.Store) -> None:
    url = store.url("disk.img", tls=True)
    assert "certificate verify failed" in s3_objects.refusal(url)
    with s3_objects.opened(url, dataclasses.replace(s3_objects.ADMIN, insecure=True)) as image:
        assert image.facts.size == len(s3_objects.DATA)


def test_reading_needs_only_the_read_permission(store: objectservers.Store) -> None:
    with s3_objects.opened(store.url("disk.img"), s3_objects.READER) as image:
        assert reading.read_range(image.source.ranges, 0, 100) == s3_objects.DATA[:100]


def test_any_key_can_be_signed(store: objectservers.Store) -> None:
    for key in ("a/b c/d+e%f.img", "é/ü.img", "x=y&z.img", "(a)!'*.img"):
        store.put(key, b"disk" * 1000)
        with s3_objects.opened(store.url(urllib.parse.quote(key))) as image:
            assert image.facts.head == b"disk" * 1000, key


def test_explicit_keys_need_no_boto3(store: objectservers.Store) -> None:
    """Importing boto3 takes longer than many imports need until their first byte."""
    store.put("some", b"x" * 1000)
    script = (
        "import sys\nfrom cdi_worker.images.engine import cancelling\nfrom cdi_worker.sources import base\n"
        "from cdi_worker.sources.objects import locations, s3\n"
        "access = base.Access(user=sys.argv[2], password=sys.argv[3])\n"
        "location = locations.S3(sys.argv[1], access)\n"
        "print(s3.S3Source(location, cancelling.NEVER).open(base.Opening()).size)\n"
        "assert 'botocore' in sys.modules and 'boto3' not in sys.modules"
    )
    keys = (objectservers.ACCESS_KEY, objectservers.SECRET_KEY)
    argv = [sys.executable, "-c", script, store.url("some"), *keys]
    assert subprocess.run(argv, check=True, capture_output=True, text=True).stdout == "1000\n"


def test_empty_object_is_read(store: objectservers.Store) -> None:
    store.put("empty", b"")
    with s3_objects.opened(store.url("empty")) as image:
        assert (image.facts.size, image.facts.head) == (0, b"")


@pytest.mark.parametrize(
    ("key", "bucket", "keys", "cause"),
    [
        ("nothing", "images", s3_objects.ADMIN, "no such key '{folder}nothing' in bucket 'images'"),
        ("nothing", "nowhere", s3_objects.ADMIN, "no such bucket 'nowhere'"),
        ("disk.img", "public", s3_objects.READER, "access denied"),
        ("disk.img", "images", base.Access(), "access denied without credentials"),
        (
            "disk.img",
            "images",
            dataclasses.replace(s3_objects.ADMIN, password="not-the-secret"),
            "wrong signature",
        ),
        ("disk.img", "images", base.Access(user="nobody", password="s3cret-x"), "unknown access key"),
    ],
)
def test_refusal_names_its_cause(
    store: objectservers.Store, key: str, bucket: str, keys: base.Access, cause: str
) -> None:
    message = s3_objects.refusal(store.url(key, bucket=bucket), keys)
    assert cause.format(folder=store.folder) in message
    assert not keys.password or keys.password not in message


def test_public_object_needs_no_keys(store: objectservers.Store) -> None:
    with s3_objects.opened(store.url("disk.img", bucket="public"), base.Access()) as image:
        assert reading.read_through_engine(image) == s3_objects.DATA


def test_changed_object_is_detected(store: objectservers.Store) -> None:
    store.put("fickle", s3_objects.DATA)
    with s3_objects.opened(store.url("fickle")) as image:
        assert reading.read_range(image.source.ranges, 0, 10) == s3_objects.DATA[:10]
        store.put("fickle", s3_objects.DATA[::-1])
        with pytest.raises(errors.SourceChanged):
            reading.read_range(image.source.ranges, 0, 10)


def test_every_later_request_is_for_the_version_of_the_first(server: misbehave.Server) -> None:
    """The server itself refuses another version, before a byte of it is read."""
    url = server.serve("/b/k", misbehave.Page(s3_objects.DATA, etag='"one"'))
    with s3_objects.opened(url) as image:
        assert reading.read_range(image.source.ranges, 1000, 5000) == s3_objects.DATA[1000:6000]
        server.serve("/b/k", misbehave.Page(status=412))
        with pytest.raises(errors.SourceChanged, match='etag was "one", now another'):
            reading.read_range(image.source.ranges, 1000, 5000)
    first, *later = (request.headers.get("if-match") for request in server.gets("/b/k"))
    assert first is None
    assert {*later} == {'"one"'}


@pytest.mark.parametrize("etag", ['W/"one"', None])
def test_weak_etag_is_no_condition(server: misbehave.Server, etag: str | None) -> None:
    """If-Match compares strongly (RFC 9110, 13.1.1): every request would be refused."""
    url = server.serve("/b/k", misbehave.Page(s3_objects.DATA, etag=etag))
    with s3_objects.opened(url) as image:
        assert reading.read_range(image.source.ranges, 1000, 5000) == s3_objects.DATA[1000:6000]
    assert {request.headers.get("if-match") for request in server.gets("/b/k")} == {None}


def test_server_answering_ranges_with_200_is_supported(rclone_store: objectservers.Store) -> None:
    with s3_objects.opened(rclone_store.url("disk.img")) as image:
        assert (image.facts.size, image.facts.head) == (
            len(s3_objects.DATA),
            s3_objects.DATA[: http.HEAD_SIZE],
        )
        assert reading.read_through_engine(image) == s3_objects.DATA
        assert reading.read_range(image.source.ranges, 300_001, 70_000) == s3_objects.DATA[300_001:370_001]
    assert "no such key" in s3_objects.refusal(rclone_store.url("nothing"))
    assert "no such bucket" in s3_objects.refusal(rclone_store.url("nothing", bucket="nowhere"))
    assert "wrong signature" in s3_objects.refusal(
        rclone_store.url("disk.img"), dataclasses.replace(s3_objects.ADMIN, password="no")
    )
    assert "no keys were given" in s3_objects.refusal(rclone_store.url("disk.img"), base.Access())


def test_malformed_endpoint_is_refused() -> None:
    for endpoint in (
        "s3://bucket",
        "s3:///key",
        "http://host/bucket",
        "ftp://host/b/k",
        "https://h/b/k?X-Amz-Signature=1",
    ):
        with pytest.raises(errors.RequestError) as caught:
            s3_objects.source(endpoint)
        assert "=1" not in str(caught.value)


def test_half_a_key_pair_is_refused() -> None:
    with pytest.raises(errors.RequestError, match="only one of access key and secret key"):
        s3_objects.source("s3://b/k", base.Access(user="me"))


def test_clock_skew_is_reported(server: misbehave.Server) -> None:
    theirs = (dt.datetime.now(dt.UTC) - dt.timedelta(hours=2)).strftime("%Y-%m-%dT%H:%M:%SZ")
    page = misbehave.Page(s3_objects.document("RequestTimeTooSkewed", ServerTime=theirs), status=403)
    message = s3_objects.refusal(server.serve("/b/k", page))
    assert "clock skew" in message
    assert " 720" in message


def test_temporary_error_is_transient(server: misbehave.Server) -> None:
    url = server.url("/b/k")
    for status, code in (
        (503, "SlowDown"),
        (429, "TooManyRequests"),
        (500, "InternalError"),
        (400, "RequestTimeout"),
    ):
        busy = misbehave.Page(s3_objects.document(code), status=status, headers={"Retry-After": "7"})
        server.serve("/b/k", (misbehave.Page(s3_objects.DATA), 1), busy)
        with s3_objects.opened(url) as image, pytest.raises(errors.Transient, match=code) as caught:
            reading.read_range(image.source.ranges, 0, 10)
        assert caught.value.retry_after == (None if status == 400 else 7.0)


def test_compressed_error_document_is_bounded(server: misbehave.Server) -> None:
    packer = zstd.ZstdCompressor(level=1)
    bomb = b"".join(packer.compress(bytes(1 << 24)) for _ in range(64)) + packer.flush()
    headers = {"Content-Encoding": "zstd"}
    url = server.serve("/b/k", misbehave.Page(bomb, status=403, ranges=False, headers=headers))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "403" in s3_objects.refusal(url)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


def test_unknown_error_has_the_message_of_the_server(server: misbehave.Server) -> None:
    page = misbehave.Page(
        s3_objects.document("Odd", Message="a &quot;b&quot;\n\x1b[31m" + "c" * 90), status=403
    )
    assert 'Odd: a "b" \ufffd[31mc' in s3_objects.refusal(server.serve("/b/k", page))
    assert "403" in s3_objects.refusal(server.serve("/b/l", misbehave.Page(b"", status=403)))


def test_version_is_the_digest(server: misbehave.Server) -> None:
    page = misbehave.Page(s3_objects.DATA, headers={"x-amz-version-id": "3HL4kqtJvjVBH40Nrjfkd"})
    url = server.serve("/b/k", page)
    assert s3_objects.source(url).digest() == "version:3HL4kqtJvjVBH40Nrjfkd"
    done = worker.call("digest", "--source=s3", url, "--user=me", env={"IMPORTER_SECRET_KEY": "s3cret"})
    assert done.output == "version:3HL4kqtJvjVBH40Nrjfkd\n", done.errors
