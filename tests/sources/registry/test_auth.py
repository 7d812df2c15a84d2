"""Which credentials a registry receives: challenges, Docker's files, tokens."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import threading
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.sources import base
from cdi_worker.sources import reference as oci_reference
from cdi_worker.sources.registry import auth, locations
from cdi_worker.sources.registry.auth import Credentials
from tests.support import containers, misbehave, proxy, pulled, reading, registries, tls

IMAGE = containers.Image((containers.layer(*containers.disk(b"disk" * 1000)),))
LATE = 2.6


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("", {}),
        ("Basic", {"basic": {}}),
        ('Basic realm="a, b=c"', {"basic": {"realm": "a, b=c"}}),
        ('bearer REALM="https://x/t",service=reg', {"bearer": {"realm": "https://x/t", "service": "reg"}}),
        (
            'Basic realm="r", Bearer realm="https://x/t?a=b",scope="repository:a:pull,push"',
            {
                "basic": {"realm": "r"},
                "bearer": {"realm": "https://x/t?a=b", "scope": "repository:a:pull,push"},
            },
        ),
        (r'Bearer realm="quo\"te"', {"bearer": {"realm": 'quo"te'}}),
        ("Bearer realm = x , service = y", {"bearer": {"realm": "x", "service": "y"}}),
    ],
)
def test_challenge_is_parsed(header: str, expected: object) -> None:
    assert auth.parse_challenges(header) == expected


@given(st.text(max_size=80))
def test_any_challenge_is_parsed_or_ignored(header: str) -> None:
    auth.parse_challenges(header)


def test_password_that_is_not_utf_8_is_sent_as_it_is() -> None:
    """As from the environment of a process."""
    sent = Credentials("user", os.fsdecode(b"p\xff")).basic()
    assert base64.b64decode(sent.removeprefix("Basic ")) == b"user:p\xff"


# -- Docker's files ----------------------------------------------------------------------------


def test_long_challenge_is_parsed_quickly() -> None:
    """A client may receive 100 headers of 64 KiB; quadratic time would mean minutes even for 400 KB."""
    for filling in (" ", ",", " ,", "\\", "a", 'a="b",', "a=", '"', "= "):
        header = 'Bearer a="b"' + filling * (400_000 // len(filling)) + "!"
        started = time.process_time()
        auth.parse_challenges(header)
        assert time.process_time() - started < 2, filling


def packed(user: str, password: str) -> dict[str, str]:
    return {"auth": base64.b64encode(f"{user}:{password}".encode()).decode()}


def from_docker(document: dict[str, Any], endpoint: str = "docker://quay.io/team/disk") -> Credentials:
    reference = oci_reference.parse(endpoint)
    assert isinstance(reference, oci_reference.Reference)
    return auth.from_docker(document, reference, "file")


def test_docker_key_matches_the_registry() -> None:
    for key in ("quay.io", "https://quay.io", "https://quay.io/v2/", "http://quay.io/v1", "quay.io/team"):
        document = {"auths": {"other": packed("a", "b"), key: packed("u", "p:w")}}
        assert from_docker(document) == Credentials("u", "p:w"), key
    for key in ("quay.io:443", "ay.io", "quay.io/te", "quay.io/team/disk/x", "https://docker.io"):
        assert from_docker({"auths": {key: packed("u", "p")}}) == Credentials(), key
    auths = {key: packed(key, "1") for key in ("quay.io", "quay.io/team/disk", "quay.io/team")}
    assert from_docker({"auths": auths}).user == "quay.io/team/disk"
    hub = {"auths": {"https://index.docker.io/v1/": packed("u", "p")}}
    assert from_docker(hub, "docker://fedora").user == "u"


def test_docker_entry_is_read() -> None:
    for entry, expected in (
        ({"username": "u", "password": "p"}, Credentials("u", "p")),
        ({"identitytoken": "t", **packed("u", "")}, Credentials(identity="t")),
        ({}, Credentials()),
    ):
        assert from_docker({"auths": {"quay.io": entry}}) == expected
    assert from_docker({"quay.io": packed("u", "p")}).user == "u"  # a .dockercfg


def test_credential_helpers_are_not_run(caplog: pytest.LogCaptureFixture) -> None:
    assert from_docker({"auths": {"quay.io": {}}, "credsStore": "desktop"}) == Credentials()
    assert from_docker({"credHelpers": {"quay.io": "rm"}}) == Credentials()
    assert caplog.text.count("credential helper") == 2


@pytest.mark.parametrize("text", ["", "[]", "{", '{"auths": {"quay.io": {"auth": "???"}}}'])
def test_malformed_docker_file_is_reported(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    reference = oci_reference.parse("docker://quay.io/a")
    assert isinstance(reference, oci_reference.Reference)
    with pytest.raises(errors.RequestError, match=str(path)):
        auth.credentials(base.Access(), str(path), reference)


def test_secrets_are_not_shown() -> None:
    assert "hunter2" not in repr(Credentials("u", "hunter2", "hunter2"))


# -- against registries ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> tls.Authority:
    return tls.Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def guarded(guarded: registries.Registry) -> registries.Registry:
    guarded.push("team/disk", IMAGE)
    return guarded


@contextlib.contextmanager
def by_token(
    authority: tls.Authority, directory: Path, **options: Any
) -> Iterator[tuple[registries.Registry, registries.Tokens]]:
    with (
        registries.Tokens(authority, **options) as tokens,
        registries.registry(directory, authority=authority, tokens=tokens) as served,
    ):
        for repository in ("team/disk", "public/disk"):
            served.push(repository, IMAGE)
        yield served, tokens


def pull(endpoint: str, access: base.Access, **more: str) -> int:
    with pulled.at(locations.Registry(endpoint, access, **more)) as found:
        data = reading.read_all(found.ordered(cancelling.Cancel(), lambda _: None))
        found.verify()
    return len(data)


def test_basic_authentication_is_used(guarded: registries.Registry) -> None:
    assert pull(guarded.reference("team/disk"), guarded.access()) == 4000


def test_password_of_a_docker_file_is_used(guarded: registries.Registry, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"auths": {guarded.host: packed(registries.USER, registries.PASSWORD)}}))
    access = guarded.access(user="", password="")
    assert pull(guarded.reference("team/disk"), access, auth_file=str(path)) == 4000


@pytest.mark.parametrize("wrong", [{"password": "wrong"}, {"user": "", "password": ""}])
def test_wrong_password_is_reported(guarded: registries.Registry, wrong: dict[str, str]) -> None:
    match = "401 Unauthorized; (check user and password|log in)"
    with pytest.raises(errors.Unreachable, match=match) as caught:
        pull(guarded.reference("team/disk"), guarded.access(**wrong))
    assert "wrong" not in str(caught.value)


@pytest.mark.parametrize("member", ["token", "access_token"])
def test_token_is_requested(authority: tls.Authority, tmp_path: Path, member: str) -> None:
    with by_token(authority, tmp_path, member=member) as (served, tokens):
        assert pull(served.reference("team/disk"), served.access()) == 4000
        assert len(tokens.issued) == 1
        assert pull(served.reference("public/disk"), served.access(user="", password="")) == 4000
        tokens.trouble = [429]
        with pytest.raises(errors.Transient, match="429"):
            pull(served.reference("team/disk"), served.access())
        for wrong in ({"password": "wrong"}, {"user": "", "password": ""}):
            with pytest.raises(errors.Unreachable, match="401 Unauthorized; check user and password"):
                pull(served.reference("team/disk"), served.access(**wrong))


def test_identity_token_is_exchanged(authority: tls.Authority, tmp_path: Path) -> None:
    with by_token(authority, tmp_path / "registry") as (served, tokens):
        path = tmp_path / "config.json"
        path.write_text(json.dumps({"auths": {served.host: {"identitytoken": tokens.refresh}}}))
        access = served.access(user="", password="")
        assert pull(served.reference("team/disk"), access, auth_file=str(path)) == 4000
        tokens.refresh = "another"
        with pytest.raises(errors.Unreachable, match="401"):
            pull(served.reference("team/disk"), access, auth_file=str(path))


def test_expired_token_is_renewed_while_reading(authority: tls.Authority, tmp_path: Path) -> None:
    data = bytes(range(256)) * (20 << 12)
    image = containers.Image((containers.layer(*containers.disk(data), compression=""),))
    with by_token(authority, tmp_path, lifetime=2) as (served, tokens):
        served.push("team/large", image)
        location = locations.Registry(served.reference("team/large"), served.access())
        with pulled.at(location) as found:
            before = len(tokens.issued)
            threading.Event().wait(LATE)
            reader, into, done = (
                found.ordered(cancelling.Cancel(), lambda _: None),
                memoryview(bytearray(len(data))),
                0,
            )
            while done < len(data):
                done += reader.readinto(into[done : done + 100_000])
            found.verify()
            assert bytes(into) == data
        # Renewed once for all connections, not by each.
        assert before < len(tokens.issued) <= before + 3


def test_registry_is_reached_through_a_proxy(authority: tls.Authority, tmp_path: Path) -> None:
    """Both the registry and its token server are reached through the proxy."""
    with by_token(authority, tmp_path, host=tls.FAR) as (served, tokens), proxy.Proxy() as between:
        access = served.access(https_proxy=between.url)
        reference = served.reference("team/disk").replace("localhost", tls.FAR)
        assert pull(reference, access) == 4000
        targets = {request.target for request in between.requests}
        assert targets == {f"{tls.FAR}:{served.port}", urllib.parse.urlsplit(tokens.url).netloc}


def page(**headers: str) -> misbehave.Page:
    return misbehave.Page(
        b"", status=401, headers={name.replace("_", "-"): text for name, text in headers.items()}
    )


def test_credentials_are_not_sent_unencrypted() -> None:
    """Credentials are sent unencrypted only if ``insecure`` is set, to a registry or a token server."""
    with misbehave.Server() as server:
        server.serve(
            "/v2/a/manifests/latest", page(WWW_Authenticate=f'Bearer realm="{server.url("/token")}"')
        )
        server.serve("/token", misbehave.Page(b'{"token": "t"}'))
        access = base.Access(user="u", password="p")
        with pytest.raises(errors.Unreachable):
            pull(f"docker://127.0.0.1:{server.port}/a", access)
        assert not server.requests
        authorizer = auth.Authorizer("a", Credentials("u", "p"), access, None)
        for challenge, url in (
            (f'Bearer realm="{server.url("/token")}"', "https://127.0.0.1/v2/"),
            ("Basic", "http://127.0.0.1/v2/"),
        ):
            with pytest.raises(errors.Unreachable, match=r"unencrypted; allow plain http \(insecure\)$"):
                authorizer.renew(challenge, "", url)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"token": 1}', b'{"token": "a\\nb"}', b"x" * (2 << 20)]
)
def test_response_without_a_token_is_reported(body: bytes) -> None:
    with misbehave.Server() as server:
        server.serve(
            "/v2/a/manifests/latest", page(WWW_Authenticate=f'Bearer realm="{server.url("/token")}"')
        )
        server.serve("/token?scope=repository%3Aa%3Apull", misbehave.Page(body))
        with pytest.raises(errors.Unreachable, match="response has no token"):
            pull(f"docker://127.0.0.1:{server.port}/a", base.Access(insecure=True))


@pytest.mark.parametrize("challenge", ["", "Bearer", 'Bearer realm="file:///etc/passwd"', "Negotiate"])
def test_unusable_challenge_is_reported(challenge: str) -> None:
    with misbehave.Server() as server:
        server.serve("/v2/a/manifests/latest", page(WWW_Authenticate=challenge))
        with pytest.raises(errors.Unreachable, match=r"401|realm"):
            pull(f"docker://127.0.0.1:{server.port}/a", base.Access(insecure=True, user="u", password="p"))
