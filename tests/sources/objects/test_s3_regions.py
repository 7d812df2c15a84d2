"""The region of a bucket, and redirects to another one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.sources.objects import s3
from tests.support import misbehave, proxy, reading, s3_objects, tls


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
    url = server.serve("/b/k", misbehave.Page(s3_objects.DATA))
    payer = (("x-amz-request-payer", "requester"),)
    with s3_objects.opened(
        url, dataclasses.replace(s3_objects.ADMIN, session_token="token-1", headers=payer)
    ) as image:
        reading.read_range(image.source.ranges, 0, 10)
    with s3_objects.opened(url, region="eu-central-1"):
        pass
    first, second, third = server.gets("/b/k")
    assert (s3_objects.scope(first), s3_objects.scope(third)) == (
        "127/s3/aws4_request",
        "eu-central-1/s3/aws4_request",
    )
    assert first.headers["x-amz-security-token"] == "token-1"
    assert "x-amz-request-payer;x-amz-security-token" in first.headers["authorization"]
    assert "if-match" not in first.headers
    assert second.headers["if-match"] == '"one"'


def test_s3_url_is_on_aws() -> None:
    address = s3.parse("s3://bucket/some/key%20.img")
    assert address.url("eu-west-1") == "https://s3.eu-west-1.amazonaws.com/bucket/some/key%2520.img"
    assert address.url("cn-north-1").startswith("https://s3.cn-north-1.amazonaws.com.cn/bucket/")


@pytest.mark.parametrize("key", ["a/../k", "../other/k", "./k", "a/.", "..", "a/%2e%2e/k", "%2E/k"])
def test_key_that_would_be_another_one_is_refused(server: misbehave.Server, key: str) -> None:
    """The client removes such parts from a path, and imported another object, or one of another bucket."""
    root = server.serve("/b/k", misbehave.Page(s3_objects.DATA)).removesuffix("k")
    for path in ("/other/k", "/b/", "/b/a/"):
        server.serve(path, misbehave.Page(s3_objects.DATA))
    with pytest.raises(errors.RequestError, match="which HTTP does not keep"):
        s3_objects.refusal(f"{root}{key}")
    assert not any(server.sent(path) for path in ("/b/k", "/other/k", "/b/", "/b/a/"))


def test_fragment_is_not_cut_from_a_key() -> None:
    with pytest.raises(errors.RequestError, match="write %23"):
        s3.parse("https://store.example/bucket/a#1.img")
    assert s3.parse("https://store.example/bucket/a%231.img").key == s3.parse("s3://bucket/a#1.img").key
    for address in ("s3://../k", "s3://./k"):
        with pytest.raises(errors.RequestError, match="which HTTP does not keep"):
            s3.parse(address)


def test_region_named_by_the_server_is_used(server: misbehave.Server) -> None:
    wrong = misbehave.Page(s3_objects.document("AuthorizationHeaderMalformed", Region="eu-1"), status=400)
    url = server.serve("/b/k", (wrong, 2), misbehave.Page(s3_objects.DATA))
    with s3_objects.opened(url) as image:
        assert image.facts.size == len(s3_objects.DATA)
    assert s3_objects.scope(server.gets("/b/k")[-1]) == "eu-1/s3/aws4_request"
    assert "wrong region 'eu-1'" in s3_objects.refusal(server.serve("/b/l", wrong))


def test_region_of_a_moved_bucket_is_reported(server: misbehave.Server) -> None:
    moved = misbehave.Page(
        s3_objects.document("PermanentRedirect"), status=301, headers={"x-amz-bucket-region": "eu-west-3"}
    )
    message = s3_objects.refusal(server.serve("/b/k", moved))
    assert "wrong region '127': the bucket is in 'eu-west-3'" in message


@pytest.mark.parametrize(
    "moved",
    [
        misbehave.Page(s3_objects.document("PermanentRedirect"), status=301),
        misbehave.Page(
            s3_objects.document("TemporaryRedirect"), status=307, to=("https://elsewhere.invalid/b/k",)
        ),
    ],
    ids=["301", "307"],
)
def test_s3_url_is_followed_to_its_region_through_the_proxy(
    server: misbehave.Server, tmp_path: Path, moved: misbehave.Page
) -> None:
    moved = dataclasses.replace(moved, headers={"x-amz-bucket-region": "eu-west-3"})
    server.serve("/b/k", (moved, 1), misbehave.Page(s3_objects.DATA))
    authority = tls.Authority(tmp_path)
    with proxy.Proxy(authority=authority, origin=server.url("")) as between:
        access = dataclasses.replace(
            s3_objects.ADMIN, https_proxy=between.url, ca_files=(str(authority.certificate),)
        )
        with s3_objects.opened("s3://b/k", access, region="eu-west-1") as image:
            assert image.facts.name == "s3://b/k"
            assert reading.read_through_engine(image) == s3_objects.DATA
    hosts = [request.target for request in between.requests if request.method == "CONNECT"]
    assert hosts[:2] == ["s3.eu-west-1.amazonaws.com:443", "s3.eu-west-3.amazonaws.com:443"]
    assert s3_objects.scope(server.gets("/b/k")[-1]) == "eu-west-3/s3/aws4_request"
