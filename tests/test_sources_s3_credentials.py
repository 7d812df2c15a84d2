"""Credentials that an S3 request does not bring: each in a process of its own."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests import misbehave, objectservers, processes, proxy, s3_objects, tls

READ = """
import os, sys, threading, hashlib
from sources import base, s3
access = base.Access(https_proxy=os.environ.get("PROXY", ""), ca_files=tuple(sys.argv[2:]))
with s3.source(base.Location(endpoint=sys.argv[1], access=access), threading.Event()) as source:
    print(hashlib.sha256(source.head).hexdigest())
"""


def reads(*argv: str, **variables: str) -> None:
    done = processes.script(READ, *argv, **variables)
    assert done.stdout.strip() == hashlib.sha256(s3_objects.DATA[: 256 * 1024]).hexdigest(), done.stderr


@pytest.fixture(scope="module")
def stored(seaweed: objectservers.Store) -> objectservers.Store:
    seaweed.put("disk.img", s3_objects.DATA)
    return seaweed


def test_credentials_of_the_environment(stored: objectservers.Store) -> None:
    key, secret = objectservers.READER
    keys = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret}
    reads(stored.url("disk.img"), **keys, AWS_ENDPOINT_URL_S3=stored.url(""))


def test_credentials_of_a_profile(stored: objectservers.Store, tmp_path: Path) -> None:
    key, secret = objectservers.READER
    file = tmp_path / "credentials"
    lines = (
        f"aws_access_key_id = {key}",
        f"aws_secret_access_key = {secret}",
        f"endpoint_url = {stored.url('')}",
    )
    file.write_text("\n".join(("[disks]", *lines)))
    reads(stored.url("disk.img"), AWS_SHARED_CREDENTIALS_FILE=str(file), AWS_PROFILE="disks")


def test_ambient_credentials_are_for_aws(server: misbehave.Server, tmp_path: Path) -> None:
    server.serve(
        "/b/k",
        (misbehave.Page(s3_objects.document("AccessDenied"), status=403), 1),
        misbehave.Page(s3_objects.DATA),
    )
    authority = tls.Authority(tmp_path)
    with proxy.Proxy(authority=authority, origin=server.url("")) as between:
        variables = {"PROXY": between.url, "AWS_ACCESS_KEY_ID": "AKID", "AWS_SECRET_ACCESS_KEY": "secret"}
        reads("https://s3.eu-west-1.amazonaws.com/b/k", str(authority.certificate), **variables)
    assert s3_objects.scope(server.gets("/b/k")[-1]) == "eu-west-1/s3/aws4_request"


def test_ambient_credentials_are_not_shown_to_others(server: misbehave.Server) -> None:
    """Not even to the same machine by another name than that which the surroundings give it."""
    url = server.serve("/b/k", misbehave.Page(s3_objects.document("AccessDenied"), status=403))
    variables = {"AWS_ACCESS_KEY_ID": "AKID", "AWS_SECRET_ACCESS_KEY": "secret"}
    for named in ({}, {"AWS_ENDPOINT_URL": server.url("", host="localhost")}):
        done = processes.script(READ, url, **variables, **named)
        assert "access denied without credentials" in done.stderr
    assert len(server.requests) == 2
    assert all("authorization" not in seen.headers for seen in server.requests)


def test_credentials_of_a_web_identity(server: misbehave.Server, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a-service-account-token")
    denied = misbehave.Page(s3_objects.document("AccessDenied"), status=403)
    url = server.serve("/b/k", (denied, 1), misbehave.Page(s3_objects.DATA))
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


def test_ambient_credentials_that_fail_are_named(stored: objectservers.Store, tmp_path: Path) -> None:
    done = processes.script(READ, stored.url("disk.img"), AWS_PROFILE="none")
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
    done = processes.script(script, server.serve("/b/k", misbehave.Page(s3_objects.DATA)))
    assert done.returncode == 0, done.stderr
    assert "/b/k" in done.stderr
    assert "the-secret" not in done.stderr
    assert "the-token" not in done.stderr


def test_without_boto3_the_error_says_what_to_install() -> None:
    done = processes.script(f"import sys; sys.modules['boto3'] = None\n{READ}", "s3://b/k")
    assert "s3 source needs the Python package boto3: pip install 'cdi-worker[s3]'" in done.stderr
