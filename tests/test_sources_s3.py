"""The S3 source against SeaweedFS, against rclone, and against a server that misbehaves."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import hashlib
import os
import random
import resource
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard

from importer import errors
from sources import aws, base, s3
from tests import misbehave, objectservers, processes, proxy, reading, tls

DATA = random.Random(11).randbytes(3 * 1024 * 1024 + 17)
ADMIN = base.Access(user=objectservers.ACCESS_KEY, password=objectservers.SECRET_KEY)
READER = base.Access(user=objectservers.READER[0], password=objectservers.READER[1])
REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> tls.Authority:
    return tls.Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def store(
    authority: tls.Authority, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[objectservers.Store]:
    with objectservers.seaweed(tmp_path_factory.mktemp("seaweed"), authority.issue()) as running:
        running.put("disk.img", DATA)
        running.put("empty", b"")
        running.client().put_object(Bucket="public", Key="disk.img", Body=DATA)
        yield running


@pytest.fixture(scope="module")
def odd_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[objectservers.Store]:
    with objectservers.rclone(tmp_path_factory.mktemp("rclone")) as running:
        running.put("disk.img", DATA)
        yield running


def opened(endpoint: str, access: base.Access = ADMIN, region: str = "") -> s3.S3Source:
    return s3.source(base.Location(endpoint=endpoint, access=access, region=region), threading.Event())


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


@pytest.mark.parametrize("tls_port", [False, True], ids=["http", "https"])
def test_an_object_is_read_at_random_and_in_parallel(
    store: objectservers.Store, authority: tls.Authority, tls_port: bool
) -> None:
    access = dataclasses.replace(ADMIN, ca_files=(str(authority.certificate),))
    with opened(store.url("disk.img", tls=tls_port), access) as source:
        assert source.size == len(DATA)
        assert source.head == DATA[: 256 * 1024]
        assert source.identity is not None
        assert hashlib.md5(DATA).hexdigest() in source.identity
        assert reading.part(source, 300_001, 70_000) == DATA[300_001:370_001]
        assert reading.part(source, len(DATA) - 5, 100) == DATA[-5:]
        assert reading.streamed(source) == DATA


def test_certificates_are_verified_unless_told_not_to(store: objectservers.Store) -> None:
    url = store.url("disk.img", tls=True)
    assert "certificate verify failed" in refusal(url)
    with opened(url, dataclasses.replace(ADMIN, insecure=True)) as source:
        assert source.size == len(DATA)


def test_reading_takes_no_right_but_to_read(store: objectservers.Store) -> None:
    with opened(store.url("disk.img"), READER) as source:
        assert reading.part(source, 0, 100) == DATA[:100]


@pytest.mark.parametrize("key", ["a/b c/d+e%f.img", "é/ü.img", "x=y&z.img", "(a)!'*.img"])
def test_any_key_can_be_signed(store: objectservers.Store, key: str) -> None:
    store.put(key, b"disk" * 1000)
    with opened(store.url(urllib.parse.quote(key))) as source:
        assert source.head == b"disk" * 1000


def test_given_keys_need_no_boto3(store: objectservers.Store) -> None:
    """Its import takes longer than many an import of a disk waits for its first byte."""
    store.put("some", b"x" * 1000)
    script = (
        "import sys\nfrom sources import base, s3\n"
        "access = base.Access(user=sys.argv[2], password=sys.argv[3])\n"
        "with s3.S3Source(base.Location(sys.argv[1], access)) as source: print(source.size)\n"
        "assert 'botocore' in sys.modules and 'boto3' not in sys.modules"
    )
    keys = (objectservers.ACCESS_KEY, objectservers.SECRET_KEY)
    argv = [sys.executable, "-c", script, store.url("some"), *keys]
    assert subprocess.run(argv, check=True, capture_output=True, text=True).stdout == "1000\n"


def test_an_empty_object(store: objectservers.Store) -> None:
    with opened(store.url("empty")) as source:
        assert (source.size, source.head) == (0, b"")


@pytest.mark.parametrize(
    ("key", "bucket", "keys", "cause"),
    [
        ("nothing", "images", ADMIN, "no such key 'nothing' in bucket 'images'"),
        ("nothing", "nowhere", ADMIN, "no such bucket 'nowhere'"),
        ("disk.img", "public", READER, "access denied"),
        ("disk.img", "images", base.Access(), "access denied without credentials"),
        ("disk.img", "images", dataclasses.replace(ADMIN, password="not-the-secret"), "wrong signature"),
        ("disk.img", "images", base.Access(user="nobody", password="s3cret-x"), "unknown access key"),
    ],
)
def test_a_refusal_names_its_cause(
    store: objectservers.Store, key: str, bucket: str, keys: base.Access, cause: str
) -> None:
    said = refusal(store.url(key, bucket=bucket), keys)
    assert cause in said
    assert not keys.password or keys.password not in said


def test_a_public_object_needs_no_keys(store: objectservers.Store) -> None:
    with opened(store.url("disk.img", bucket="public"), base.Access()) as source:
        assert reading.streamed(source) == DATA


@pytest.mark.parametrize("kind", ["store", "odd_store"])
def test_a_changed_object_is_noticed(kind: str, request: pytest.FixtureRequest) -> None:
    server: objectservers.Store = request.getfixturevalue(kind)
    server.put("fickle", DATA)
    with opened(server.url("fickle")) as source:
        assert reading.part(source, 0, 10) == DATA[:10]
        server.put("fickle", DATA[::-1])
        with pytest.raises(errors.SourceChanged):
            reading.part(source, 0, 10)


def test_a_server_that_answers_ranges_with_200(odd_store: objectservers.Store) -> None:
    with opened(odd_store.url("disk.img")) as source:
        assert (source.size, source.head) == (len(DATA), DATA[: 256 * 1024])
        assert reading.streamed(source) == DATA
        assert reading.part(source, 300_001, 70_000) == DATA[300_001:370_001]
    assert "no such key" in refusal(odd_store.url("nothing"))
    assert "no such bucket" in refusal(odd_store.url("nothing", bucket="nowhere"))
    assert "wrong signature" in refusal(odd_store.url("disk.img"), dataclasses.replace(ADMIN, password="no"))
    assert "no keys were given" in refusal(odd_store.url("disk.img"), base.Access())


@pytest.mark.parametrize(
    ("endpoint", "region"),
    [
        ("https://s3.eu-west-1.amazonaws.com/b/k", "eu-west-1"),
        ("https://s3.dualstack.eu-west-1.amazonaws.com/b/k", "eu-west-1"),
        ("https://s3-eu-west-1.amazonaws.com/b/k", "eu-west-1"),
        ("https://s3.cn-north-1.amazonaws.com.cn/b/k", "cn-north-1"),
        ("https://s3.amazonaws.com/b/k", "us-east-1"),
        ("https://minio.example.com:9000/b/k", "minio"),
        ("http://minio/b/k", "minio"),
    ],
)
def test_the_region_follows_from_the_host(endpoint: str, region: str) -> None:
    assert s3.region_of(s3.parse(endpoint).server) == region


def test_requests_are_signed_for_the_region_and_with_the_session_token(server: misbehave.Server) -> None:
    url = server.serve("/b/k", misbehave.Page(DATA))
    payer = (("x-amz-request-payer", "requester"),)
    with opened(url, dataclasses.replace(ADMIN, session_token="token-1", headers=payer)) as source:
        reading.part(source, 0, 10)
    with opened(url, region="eu-central-1"):
        pass
    first, second, third = server.gets("/b/k")
    assert (scope(first), scope(third)) == ("127/s3/aws4_request", "eu-central-1/s3/aws4_request")
    assert first.headers["x-amz-security-token"] == "token-1"
    assert "x-amz-request-payer;x-amz-security-token" in first.headers["authorization"]
    assert "if-match" not in first.headers
    assert second.headers["if-match"] == '"one"'


def test_an_s3_address_is_on_aws() -> None:
    address = s3.parse("s3://bucket/some/key%20.img")
    assert address.url("eu-west-1") == "https://s3.eu-west-1.amazonaws.com/bucket/some/key%2520.img"
    assert address.url("cn-north-1").startswith("https://s3.cn-north-1.amazonaws.com.cn/bucket/")


@pytest.mark.parametrize(
    "endpoint",
    ["s3://bucket", "s3:///key", "http://host/bucket", "ftp://host/b/k", "https://h/b/k?X-Amz-Signature=1"],
)
def test_a_malformed_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(errors.RequestError) as caught:
        opened(endpoint)
    assert "=1" not in str(caught.value)


def test_half_a_key_pair_is_refused() -> None:
    with pytest.raises(errors.RequestError, match="belong together"):
        opened("s3://b/k", base.Access(user="me"))


def test_the_region_that_the_server_names_is_learnt(server: misbehave.Server) -> None:
    wrong = misbehave.Page(document("AuthorizationHeaderMalformed", Region="eu-1"), status=400)
    url = server.serve("/b/k", (wrong, 2), misbehave.Page(DATA))
    with opened(url) as source:
        assert source.size == len(DATA)
    assert scope(server.gets("/b/k")[-1]) == "eu-1/s3/aws4_request"
    assert "wrong region 'eu-1'" in refusal(server.serve("/b/l", wrong))


def test_a_bucket_elsewhere_is_named(server: misbehave.Server) -> None:
    moved = misbehave.Page(
        document("PermanentRedirect"), status=301, headers={"x-amz-bucket-region": "eu-west-3"}
    )
    said = refusal(server.serve("/b/k", moved))
    assert "wrong region '127': the bucket is in 'eu-west-3'" in said


@pytest.mark.parametrize(
    "moved",
    [
        misbehave.Page(document("PermanentRedirect"), status=301),
        misbehave.Page(document("TemporaryRedirect"), status=307, to=("https://elsewhere.invalid/b/k",)),
    ],
    ids=["301", "307"],
)
def test_an_s3_address_is_followed_to_its_region_through_the_proxy(
    server: misbehave.Server, tmp_path: Path, moved: misbehave.Page
) -> None:
    moved = dataclasses.replace(moved, headers={"x-amz-bucket-region": "eu-west-3"})
    server.serve("/b/k", (moved, 1), misbehave.Page(DATA))
    authority = tls.Authority(tmp_path)
    with proxy.Proxy(authority=authority, origin=server.url("")) as between:
        access = dataclasses.replace(ADMIN, https_proxy=between.url, ca_files=(str(authority.certificate),))
        with opened("s3://b/k", access, region="eu-west-1") as source:
            assert source.name == "s3://b/k"
            assert reading.streamed(source) == DATA
    hosts = [seen.target for seen in between.requests if seen.method == "CONNECT"]
    assert hosts[:2] == ["s3.eu-west-1.amazonaws.com:443", "s3.eu-west-3.amazonaws.com:443"]
    assert scope(server.gets("/b/k")[-1]) == "eu-west-3/s3/aws4_request"


def test_clock_skew_is_named(server: misbehave.Server) -> None:
    theirs = (dt.datetime.now(dt.UTC) - dt.timedelta(hours=2)).strftime("%Y-%m-%dT%H:%M:%SZ")
    page = misbehave.Page(document("RequestTimeTooSkewed", ServerTime=theirs), status=403)
    said = refusal(server.serve("/b/k", page))
    assert "clock skew" in said
    assert " 720" in said


@pytest.mark.parametrize(
    ("status", "code"),
    [(503, "SlowDown"), (429, "TooManyRequests"), (500, "InternalError"), (400, "RequestTimeout")],
)
def test_trouble_that_passes_is_transient(server: misbehave.Server, status: int, code: str) -> None:
    busy = misbehave.Page(document(code), status=status, headers={"Retry-After": "7"})
    url = server.serve("/b/k", (misbehave.Page(DATA), 1), busy)
    with opened(url) as source, pytest.raises(errors.Transient, match=code) as caught:
        reading.part(source, 0, 10)
    assert caught.value.retry_after == (None if status == 400 else 7.0)


def test_throttling_and_resets_are_outlasted(server: misbehave.Server) -> None:
    good = misbehave.Page(DATA)
    busy = misbehave.Page(document("SlowDown"), status=503)
    torn = dataclasses.replace(good, cut=100_000)
    url = server.serve("/b/k", (good, 1), (busy, 3), (torn, 5), (busy, 2), (torn, 3), good)
    with opened(url) as source:
        assert reading.streamed(source) == DATA


def test_a_compressed_refusal_is_not_inflated_without_a_bound(server: misbehave.Server) -> None:
    packer = zstandard.ZstdCompressor(level=1).compressobj()
    bomb = b"".join(packer.compress(bytes(1 << 24)) for _ in range(64)) + packer.flush()
    headers = {"Content-Encoding": "zstd"}
    url = server.serve("/b/k", misbehave.Page(bomb, status=403, ranges=False, headers=headers))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "403" in refusal(url)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


def test_an_unknown_failure_keeps_the_servers_words(server: misbehave.Server) -> None:
    page = misbehave.Page(document("Odd", Message="a &quot;b&quot;\n\x1b[31m" + "c" * 90), status=403)
    assert 'Odd: a "b"[31mc' in refusal(server.serve("/b/k", page))
    assert "403" in refusal(server.serve("/b/l", misbehave.Page(b"", status=403)))


def test_closing_ends_a_read_in_another_thread(server: misbehave.Server) -> None:
    good = misbehave.Page(DATA)
    url = server.serve("/b/k", (good, 1), dataclasses.replace(good, stall=1000))
    source = opened(url)
    source.__enter__()

    def read() -> None:
        with contextlib.suppress(errors.Error):
            reading.part(source, 0, 1_000_000)

    thread = threading.Thread(target=read)
    thread.start()
    processes.wait_for(lambda: server.sent("/b/k") > 1000 and len(server.gets("/b/k")) > 1, "the read")
    source.close()
    thread.join(5)
    assert not thread.is_alive()


# -- credentials that a request does not bring: each in a process of its own ----------------------

READ = """
import os, sys, threading, hashlib
from sources import base, s3
access = base.Access(https_proxy=os.environ.get("PROXY", ""), ca_files=tuple(sys.argv[2:]))
with s3.source(base.Location(endpoint=sys.argv[1], access=access), threading.Event()) as source:
    print(hashlib.sha256(source.head).hexdigest())
"""


def run(script: str, *argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "AWS_EC2_METADATA_DISABLED": "true"}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", script, *argv],
        cwd=REPOSITORY, env={**kept, **variables}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def reads(*argv: str, **variables: str) -> None:
    done = run(READ, *argv, **variables)
    assert done.stdout.strip() == hashlib.sha256(DATA[: 256 * 1024]).hexdigest(), done.stderr


def test_credentials_of_the_environment(store: objectservers.Store) -> None:
    key, secret = objectservers.READER
    keys = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret}
    reads(store.url("disk.img"), **keys, AWS_ENDPOINT_URL_S3=store.url(""))


def test_credentials_of_a_profile(store: objectservers.Store, tmp_path: Path) -> None:
    key, secret = objectservers.READER
    file = tmp_path / "credentials"
    lines = (
        f"aws_access_key_id = {key}",
        f"aws_secret_access_key = {secret}",
        f"endpoint_url = {store.url('')}",
    )
    file.write_text("\n".join(("[disks]", *lines)))
    reads(store.url("disk.img"), AWS_SHARED_CREDENTIALS_FILE=str(file), AWS_PROFILE="disks")


def test_ambient_credentials_are_for_aws(server: misbehave.Server, tmp_path: Path) -> None:
    server.serve("/b/k", (misbehave.Page(document("AccessDenied"), status=403), 1), misbehave.Page(DATA))
    authority = tls.Authority(tmp_path)
    with proxy.Proxy(authority=authority, origin=server.url("")) as between:
        variables = {"PROXY": between.url, "AWS_ACCESS_KEY_ID": "AKID", "AWS_SECRET_ACCESS_KEY": "secret"}
        reads("https://s3.eu-west-1.amazonaws.com/b/k", str(authority.certificate), **variables)
    assert scope(server.gets("/b/k")[-1]) == "eu-west-1/s3/aws4_request"


def test_ambient_credentials_are_not_shown_to_others(server: misbehave.Server) -> None:
    """Not even to the same machine by another name than that which the surroundings give it."""
    url = server.serve("/b/k", misbehave.Page(document("AccessDenied"), status=403))
    variables = {"AWS_ACCESS_KEY_ID": "AKID", "AWS_SECRET_ACCESS_KEY": "secret"}
    for named in ({}, {"AWS_ENDPOINT_URL": server.url("", host="localhost")}):
        done = run(READ, url, **variables, **named)
        assert "access denied without credentials" in done.stderr
    assert len(server.requests) == 2
    assert all("authorization" not in seen.headers for seen in server.requests)


@pytest.mark.parametrize(
    ("host", "own"),
    [
        ("s3.amazonaws.com", True),
        ("s3.eu-west-1.amazonaws.com", True),
        ("s3.dualstack.eu-west-1.amazonaws.com", True),
        ("s3-eu-west-1.amazonaws.com", True),
        ("s3-fips.us-gov-west-1.amazonaws.com", True),
        ("s3.cn-north-1.amazonaws.com.cn", True),
        ("bucket.vpce-1a2b-3c4d.s3.us-east-1.vpce.amazonaws.com", True),
        ("name-123.s3-accesspoint.us-east-1.amazonaws.com", True),
        # Whoever has an account has names of these kinds.
        ("ec2-192-0-2-1.eu-west-1.compute.amazonaws.com", False),
        ("s3-name-123.us-east-1.elb.amazonaws.com", False),
        ("s3.vpce-svc-1a2b.us-east-1.vpce.amazonaws.com", False),
        ("abc.execute-api.us-east-1.amazonaws.com", False),
        ("s3.amazonaws.com.evil.example", False),
        ("s3.amazonaws.com@evil.example", False),
        ("minio", False),
    ],
)
def test_which_servers_are_awss(host: str, own: bool) -> None:
    assert aws.is_s3(f"https://{host}/b/k") is own


def test_credentials_of_a_web_identity(server: misbehave.Server, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a-service-account-token")
    denied = misbehave.Page(document("AccessDenied"), status=403)
    url = server.serve("/b/k", (denied, 1), misbehave.Page(DATA))
    with objectservers.token_service(objectservers.READER) as service:
        reads(
            url,
            AWS_ROLE_ARN="arn:aws:iam::123456789012:role/importer",
            AWS_WEB_IDENTITY_TOKEN_FILE=str(tmp_path / "token"),
            AWS_ENDPOINT_URL_S3=server.url(""),
            AWS_ENDPOINT_URL_STS=service.url,
            AWS_REGION="us-east-1",
        )
    assert "WebIdentityToken=a-service-account-token" in service.asked[0]
    anonymous, signed = server.gets("/b/k")
    assert "authorization" not in anonymous.headers
    assert f"Credential={objectservers.READER[0]}/" in signed.headers["authorization"]
    assert signed.headers["x-amz-security-token"] == "a-session"


def test_ambient_credentials_that_fail_are_named(store: objectservers.Store, tmp_path: Path) -> None:
    done = run(READ, store.url("disk.img"), AWS_PROFILE="none")
    assert "errors.Unreachable" in done.stderr
    assert "ambient AWS credentials: The config profile (none) could not be found" in done.stderr


def test_no_secret_is_logged(server: misbehave.Server) -> None:
    script = """
import logging, sys, threading
logging.basicConfig(level=logging.DEBUG)
from sources import base, s3
access = base.Access(user="AKID", password="the-secret", session_token="the-token")
location = base.Location(endpoint=sys.argv[1], access=access)
with s3.source(location, threading.Event()) as source:
    print(location, source, source.name, file=sys.stderr)
"""
    done = run(script, server.serve("/b/k", misbehave.Page(DATA)))
    assert done.returncode == 0, done.stderr
    assert "/b/k" in done.stderr
    assert "the-secret" not in done.stderr
    assert "the-token" not in done.stderr


def test_without_boto3_the_error_says_what_to_install() -> None:
    done = run(f"import sys; sys.modules['boto3'] = None\n{READ}", "s3://b/k")
    assert "s3 source needs the Python package boto3: pip install 'cdi-worker[s3]'" in done.stderr
