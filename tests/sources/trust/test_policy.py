"""Policies of the containers tools: scopes, rules for references, malformed files, their own test images."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cdi_worker import errors
from cdi_worker.formats import signature
from cdi_worker.images.engine import cancelling
from cdi_worker.sources import base, reference, trust
from cdi_worker.sources.registry import locations
from cdi_worker.sources.registry import source as registry
from cdi_worker.sources.trust import identity, images, policy
from tests.support import containers, misbehave, pulled, repository, signing

#: Images that cosign and skopeo have signed (README.md there).
FIXTURES = repository.ROOT / "tests/support/cosign"
KEY = str(FIXTURES / "cosign.pub")
SAMPLE = "192.168.64.2:5000/cosign-signed-single-sample"
TAGGED = "192.168.64.2:5000/skopeo-signed"
DIGEST = f"sha256:{'a' * 64}"


def write(path: Path, *requirements: dict[str, Any], **scopes: list[dict[str, Any]]) -> str:
    """Write a policy and return its path."""
    document = {"default": list(requirements) or [{"type": "reject"}], "transports": {"docker": scopes}}
    path.write_text(json.dumps(document))
    return str(path)


def kinds(path: str, name: str) -> tuple[str, list[str]]:
    """Return scope and kinds of the requirements for an image."""
    scope, found = policy.read(path).requirements(reference.parse(name))
    return scope, [each.kind for each in found]


# -- scopes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "scope"),
    [
        ("docker://example.com/playground/a:1", "example.com/playground"),
        ("docker://example.com/playground:1", "example.com/playground"),
        ("docker://example.com/playground2:1", "*.com"),
        ("docker://example.com/hardened/x/y/z", "example.com/hardened"),
        ("docker://registry.access.redhat.com/rhel7", "registry.access.redhat.com"),
        ("docker://other.access.redhat.com/rhel7", "*.access.redhat.com"),
        ("docker://other.redhat.com:5000/rhel7", "*.redhat.com"),
        ("docker://private-mirror:5000/vendor-mirror/product-a/image1", "private-mirror:5000/vendor-mirror"),
    ],
)
def test_closest_scope_decides(name: str, scope: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    # Some scopes there are of no image: they begin without a host.
    path.write_text((FIXTURES / "policy.json").read_text().replace('"bogus/', '"bogus.example/'))
    assert kinds(str(path), name)[0] == f"docker:{scope}"


def test_scopes_are_those_of_containers_image() -> None:
    of = reference.parse("docker://a.b.example.org:8443/ns/repo:tag")
    assert isinstance(of, reference.Reference)
    assert [*policy.scopes(of)] == [
        "a.b.example.org:8443/ns/repo:tag",
        "a.b.example.org:8443/ns/repo",
        "a.b.example.org:8443/ns",
        "a.b.example.org:8443",
        "*.b.example.org",
        "*.example.org",
        "*.org",
        "",
    ]
    of = reference.parse(f"docker://busybox@{DIGEST}")
    assert isinstance(of, reference.Reference)
    assert [*policy.scopes(of)][:3] == [
        f"docker.io/library/busybox@{DIGEST}",
        "docker.io/library/busybox",
        "docker.io/library",
    ]


@pytest.mark.parametrize(
    ("scope", "hint"),
    [
        ("docker://example.org", "write example.org"),
        ("https://example.org", "write example.org"),
        ("example.org/vm/", "malformed repository"),
        ("example.org/", "malformed repository"),
        ("/vm", "begins with a host: docker.io/vm"),
        ("example.org//vm", "malformed repository"),
        ("example.org/VM", "malformed repository"),
        ("Example.org", "write example.org"),
        ("EXAMPLE.org/vm:Tag", "write example.org/vm:Tag"),
        ("example.org/vm:", "malformed tag"),
        ("example.org/vm@sha256:12", "malformed digest"),
        (f"example.org/vm:1@{DIGEST}", f"write example.org/vm@{DIGEST}"),
        (f"example.org/vm@{DIGEST.upper()}", "malformed digest"),
        ("user:pw@example.org/vm", "malformed"),
        ("example.org/vm*", "malformed repository"),
        ("example.org/*", "malformed repository"),
        ("*", "begins with a host"),
        ("*.", "malformed host"),
        ("*.Example.org", "malformed host"),
        ("*.example.org:5000", "malformed host"),
        ("*.example.org/vm", "malformed host"),
        ("a.*.example.org", "malformed host"),
        (" example.org", "malformed host"),
        ("example.org ", "malformed host"),
        ("example.org:port/vm", "malformed host"),
        ("registry/vm", "begins with a host: docker.io/registry/vm"),
        ("busybox", "begins with a host: docker.io/busybox"),
        ("index.docker.io", "write docker.io"),
        ("index.docker.io/team", "write docker.io/team"),
        ("docker.io/busybox:latest", "write docker.io/library/busybox:latest"),
    ],
)
def test_scope_that_matches_no_image_is_refused(tmp_path: Path, scope: str, hint: str) -> None:
    path = write(tmp_path / "policy.json", **{scope: [{"type": "reject"}]})
    with pytest.raises(errors.RequestError) as caught:
        policy.read(path)
    assert f"transports.docker: {scope!r} matches no image: " in str(caught.value)
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    "name", ["localhost/a", "localhost:5000/a/b", "[::1]:5000/a", "H.example/a", "a", "t/a"]
)
@pytest.mark.parametrize("version", ["", ":Tag", f"@{DIGEST}"])
def test_every_scope_of_an_image_is_accepted(tmp_path: Path, name: str, version: str) -> None:
    """What is refused is exactly what no image has."""
    of = reference.parse(f"docker://{name}{version}")
    assert isinstance(of, reference.Reference)
    for scope in policy.scopes(of):
        path = write(tmp_path / "policy.json", **{scope: [{"type": "insecureAcceptAnything"}]})
        assert kinds(path, str(of)) == (f"docker:{scope}", ["insecureAcceptAnything"])


def test_case_of_a_host_is_no_way_around_its_scope(tmp_path: Path) -> None:
    path = write(tmp_path / "p", {"type": "insecureAcceptAnything"}, **{"example.org": [{"type": "reject"}]})
    assert kinds(path, "docker://Example.ORG/vm") == ("docker:example.org", ["reject"])


@pytest.mark.parametrize("transport", ["dockre", "Docker", "http", ""])
def test_unknown_transport_is_refused(tmp_path: Path, transport: str) -> None:
    path = tmp_path / "policy.json"
    accept = [{"type": "insecureAcceptAnything"}]
    path.write_text(json.dumps({"default": accept, "transports": {transport: {"": [{"type": "reject"}]}}}))
    with pytest.raises(errors.RequestError, match=f"unknown transport '{transport}'; "):
        policy.read(str(path))


def test_paths_of_archives_that_match_no_image_are_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    path = tmp_path / "policy.json"
    for scope in ("images", "./images", f"{tmp_path}/", f"{tmp_path}/../x", f"{tmp_path}/link/a.tar:v1"):
        document = {
            "default": [{"type": "reject"}],
            "transports": {"oci-archive": {scope: [{"type": "reject"}]}},
        }
        path.write_text(json.dumps(document))
        with pytest.raises(errors.RequestError, match="absolute paths without links"):
            policy.read(str(path))


def test_transport_has_a_default_before_the_policy(tmp_path: Path) -> None:
    accept = [{"type": "insecureAcceptAnything"}]
    path = write(tmp_path / "p", **{"": accept, "quay.io/a:1": [{"type": "reject"}]})
    assert kinds(path, "docker://quay.io/a:1") == ("docker:quay.io/a:1", ["reject"])
    assert kinds(path, "docker://quay.io/a:2") == ("docker:", ["insecureAcceptAnything"])
    assert kinds(path, "oci-archive:/images/a.tar") == ("default", ["reject"])


@pytest.mark.parametrize("scope", ["{path}", "{folder}", ""])
def test_archives_have_scopes_by_path(tmp_path: Path, scope: str) -> None:
    image = tmp_path / "image.tar"
    scope = scope.format(path=image, folder=tmp_path)
    path = tmp_path / "p"
    accept = {"oci-archive": {scope: [{"type": "insecureAcceptAnything"}]}}
    path.write_text(json.dumps({"default": [{"type": "reject"}], "transports": accept}))
    assert kinds(str(path), f"oci-archive:{image}")[1] == ["insecureAcceptAnything"]


# -- signedIdentity --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "wanted", "signed", "expected"),
    [
        ("matchExact", "h.io/r:1", "h.io/r:1", True),
        ("matchExact", "h.io/r:1", "h.io/r:2", False),
        ("matchExact", "h.io/r:1", "h.io/r", False),
        ("matchExact", "h.io/r:1", "h.io/r2:1", False),
        ("matchExact", "h.io/r", "h.io/r:latest", True),
        ("matchExact", f"h.io/r@{DIGEST}", f"h.io/r@{DIGEST}", True),
        ("matchExact", f"h.io/r@{DIGEST}", "h.io/r:1", False),
        ("matchExact", "h.io/r:1", f"h.io/r:1@{DIGEST}", False),
        ("matchRepoDigestOrExact", "h.io/r:1", "h.io/r:1", True),
        ("matchRepoDigestOrExact", "h.io/r:1", "h.io/r:2", False),
        ("matchRepoDigestOrExact", f"h.io/r@{DIGEST}", "h.io/r:1", True),
        ("matchRepoDigestOrExact", f"h.io/r@{DIGEST}", "h.io/r2:1", False),
        ("matchRepoDigestOrExact", f"h.io/r@{DIGEST}", "h.io/r", False),
        ("matchRepository", "h.io/r:1", "h.io/r", True),
        ("matchRepository", "h.io/r:1", "h.io/r:2", True),
        ("matchRepository", "h.io/r:1", "h.io/r2", False),
        ("matchRepository", "busybox", "docker.io/library/busybox:1", True),
        ("matchRepository", "h.io:443/r:1", "h.io/r:1", False),
    ],
)
def test_reference_rule(rule: str, wanted: str, signed: str, expected: bool) -> None:
    check(identity.rule({"type": rule}, ""), wanted, signed, expected)


def check(rule: identity.Rule, wanted: str, signed: str, expected: bool) -> None:
    of = reference.parse(f"docker://{wanted}")
    assert isinstance(of, reference.Reference)
    assert rule(of, reference.named(signed)) == expected


def test_fixed_reference_rules() -> None:
    rule = identity.rule({"type": "exactReference", "dockerReference": "h.io/a:1"}, "")
    check(rule, "mirror/b:2", "h.io/a:1", True)
    check(rule, "mirror/b:2", "h.io/a:2", False)
    check(rule, "mirror/b:2", "h.io/a", False)
    rule = identity.rule({"type": "exactRepository", "dockerRepository": "h.io/a"}, "")
    check(rule, "mirror/b:2", "h.io/a:2", True)
    check(rule, "mirror/b:2", "h.io/b", False)


def test_remapped_reference_rule() -> None:
    fields = {"type": "remapIdentity", "prefix": "mirror:5000/vendor", "signedPrefix": "vendor.example.com"}
    rule = identity.rule(fields, "")
    check(rule, "mirror:5000/vendor/a:1", "vendor.example.com/a:1", True)
    check(rule, "mirror:5000/vendor/a:1", "vendor.example.com/a:2", False)
    check(rule, "mirror:5000/vendor/a:1", "mirror:5000/vendor/a:1", False)
    check(rule, "mirror:5000/vendor2/a:1", "vendor.example.com2/a:1", False)
    # An image outside of the prefix has its own name.
    check(rule, "h.io/a:1", "h.io/a:1", True)


# -- malformed policies ----------------------------------------------------------------------------


SIGNED = {"type": "sigstoreSigned", "keyPath": KEY}


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "nothing", "{}", '{"default": []}', '{"default": [{"type": "other"}]}', "[" * 100_000,
        '{"default": [{"type": "reject"}], "default": [{"type": "insecureAcceptAnything"}]}',
        '{"default": [{"type": "reject"}], "more": 1}',
        '{"default": [{"type": "insecureAcceptAnything", "more": 1}]}',
        '{"default": [{"type": "reject"}], "transports": {"docker": {"h.io": []}}}',
        '{"default": [{"type": "reject"}], "transports": {"docker": {"h.io": [1]}}}',
        '{"default": [{"type": "reject"}], "transports": {"docker": []}}',
    ],
)  # fmt: skip
def test_malformed_policy_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "policy.json"
    path.write_text(text)
    with pytest.raises(errors.RequestError, match=r"policy\.json"):
        policy.read(str(path))


@pytest.mark.parametrize(
    "change",
    [
        {"keyPath": ""}, {"keyPath": 1}, {"keyData": "Zm9v"}, {"more": 1}, {"keyPath": [KEY]},
        {"signedIdentity": {}}, {"signedIdentity": {"type": "other"}}, {"signedIdentity": "matchExact"},
        {"signedIdentity": {"type": "matchExact", "more": 1}},
        {"signedIdentity": {"type": "exactReference"}},
        {"signedIdentity": {"type": "exactReference", "dockerReference": "UPPER"}},
        {"signedIdentity": {"type": "exactRepository", "dockerRepository": 1}},
        {"signedIdentity": {"type": "remapIdentity", "prefix": "a"}},
        {"signedIdentity": {"type": "remapIdentity", "prefix": "a b", "signedPrefix": "c"}},
        {"rekorPublicKeyPath": KEY, "rekorPublicKeyData": "Zm9v"},
    ],
)  # fmt: skip
def test_malformed_requirement_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(errors.RequestError, match=r"sigstoreSigned|signedIdentity"):
        policy.read(write(tmp_path / "p", {**SIGNED, **change}))


@pytest.mark.parametrize("kind", ["sigstoreSigned2", "", None, "reject", "insecureAcceptAnything"])
def test_keys_of_another_type_are_refused(tmp_path: Path, kind: str | None) -> None:
    """A requirement with keys is none of sigstore because of them."""
    with pytest.raises(errors.RequestError, match="unknown requirement"):
        policy.read(write(tmp_path / "p", {**SIGNED, "type": kind}))


FULCIO = {"caPath": KEY, "oidcIssuer": "https://i", "subjectEmail": "a@b.c"}


@pytest.mark.parametrize(
    ("fulcio", "log", "words"),
    [
        (FULCIO, {}, "fulcio needs one of rekorPublicKeyPath"),
        ({}, {"rekorPublicKeyPath": KEY}, "fulcio: expected caPath or caData"),
        ({**FULCIO, "more": 1}, {"rekorPublicKeyPath": KEY}, "fulcio: expected caPath or caData"),
        ({**FULCIO, "caData": "Zm9v"}, {"rekorPublicKeyPath": KEY}, "fulcio: expected caPath or caData"),
        ({**FULCIO, "subjectEmail": ""}, {"rekorPublicKeyPath": KEY}, "fulcio: expected caPath or caData"),
        (
            {"caPath": KEY, "oidcIssuer": "https://i"},
            {"rekorPublicKeyPath": KEY},
            "expected caPath or caData",
        ),
    ],
)
def test_incomplete_fulcio_is_refused(
    tmp_path: Path, fulcio: dict[str, Any], log: dict[str, str], words: str
) -> None:
    """Without a log nothing says when a certificate was used; without a signer everybody may sign."""
    fields = {"type": "sigstoreSigned", "fulcio": fulcio, **log}
    with pytest.raises(errors.RequestError, match=words):
        policy.read(write(tmp_path / "p", fields))


@pytest.mark.parametrize("keys", [{}, {"keyPaths": []}, {"keyDatas": ["%"]}, {"fulcio": {}}])
def test_malformed_keys_are_refused(tmp_path: Path, keys: dict[str, Any]) -> None:
    with pytest.raises(errors.RequestError, match="sigstoreSigned"):
        policy.read(write(tmp_path / "p", {"type": "sigstoreSigned", **keys}))


# -- images of containers/image --------------------------------------------------------------------


@contextlib.contextmanager
def served(name: str) -> Iterator[misbehave.Server]:
    """Serve an image as a registry without referrers does, with the signatures in a folder."""
    folder = FIXTURES / name
    manifest = (folder / "manifest.json").read_bytes() if (folder / "manifest.json").exists() else b""
    digest = containers.Blob(manifest, "").digest
    with misbehave.Server() as server:
        if manifest:
            for target in ("latest", "tag", "othertag", digest):
                server.serve(f"/v2/r/manifests/{target}", misbehave.Page(manifest))
        layers = [layer(path) for path in sorted(folder.glob("signature-*"))]
        for each in layers:
            server.serve(f"/v2/r/blobs/{each.digest}", misbehave.Page(each.data))
        if layers:
            tag = f"{digest.replace(':', '-')}.sig"
            page = misbehave.Page(containers.Image(tuple(layers)).manifest.data)
            server.serve(f"/v2/r/manifests/{tag}", page)
        yield server


def layer(path: Path) -> containers.Blob:
    """Return a signature of the fixtures as cosign stores it in a registry."""
    document = json.loads(path.read_bytes().partition(b"sigstore-json\n")[2])
    payload = signing.decoded(document["payload"])
    return containers.Blob(payload, document["mimeType"], document["annotations"])


def open_image(name: str, path: str, tag: str = "latest") -> str:
    """Open an image under a policy; return ``accepted`` or the fault."""
    with served(name) as server:
        endpoint = f"docker://127.0.0.1:{server.port}/r:{tag}"
        source = registry.RegistrySource(
            locations.Registry(endpoint, base.Access(insecure=True)), cancelling.Cancel()
        )
        verified: list[signature.Signature] = []
        try:
            with pulled.demanding(source, trust.Demand(policy=path), verified):
                raise AssertionError("the fixtures have no configuration")
        except errors.Untrusted as err:
            return str(err.fields["fault"])
        except errors.Unreachable as err:
            # The configuration, which is fetched after the signatures were verified.
            blobs = [request.path for request in server.requests if "/blobs/" in request.path]
            return "accepted" if verified and blobs else f"unreachable: {err}"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("valid", "accepted"),
        ("valid-2", "accepted"),
        ("mixed", "accepted"),
        ("unknown-key", signature.OTHER_KEY),
        ("modified-manifest", signature.OTHER_DATA),
        ("valid-with-tag", signature.OTHER_REFERENCE),
        ("other-attachment", signature.MISSING),
        ("unsigned", signature.MISSING),
    ],
)
def test_image_of_containers_image(tmp_path: Path, name: str, expected: str) -> None:
    rule = {"type": "exactRepository", "dockerRepository": SAMPLE}
    path = write(tmp_path / "policy.json", {**SIGNED, "signedIdentity": rule})
    assert open_image(name, path) == expected


def test_image_without_manifest_or_with_an_old_one_is_not_accepted(tmp_path: Path) -> None:
    path = write(tmp_path / "policy.json", SIGNED)
    assert "no such repository" in open_image("no-manifest", path)
    with pytest.raises(errors.Unsupported, match="schema 1"):
        open_image("manifest-digest-error", path)


@pytest.mark.parametrize(
    ("name", "tag", "expected"),
    [
        ("valid-with-tag", "tag", "accepted"),
        ("valid-with-tag", "othertag", signature.OTHER_REFERENCE),
        ("valid", "tag", signature.OTHER_REFERENCE),
    ],
)
def test_exact_match_needs_the_tag(tmp_path: Path, name: str, tag: str, expected: str) -> None:
    path = tmp_path / "policy.json"
    # The fixtures are of another registry than the one that serves them.
    rule = {"type": "remapIdentity", "prefix": "127.0.0.1:1/r", "signedPrefix": TAGGED}
    with served(name) as server:
        rule["prefix"] = f"127.0.0.1:{server.port}/r"
        write(path, {**SIGNED, "signedIdentity": rule})
        endpoint = f"docker://127.0.0.1:{server.port}/r:{tag}"
        source = registry.RegistrySource(
            locations.Registry(endpoint, base.Access(insecure=True)), cancelling.Cancel()
        )
        verified: list[signature.Signature] = []
        demanding = pulled.demanding(source, trust.Demand(policy=str(path)), verified)
        with pytest.raises(errors.Error) as caught, demanding:
            pass
    fault = caught.value.fields.get("fault", "accepted" if verified else "")
    assert fault == expected


# -- requirements ----------------------------------------------------------------------------------


SAME = {**SIGNED, "signedIdentity": {"type": "exactRepository", "dockerRepository": SAMPLE}}


def test_all_requirements_count(tmp_path: Path) -> None:
    accept, stranger = {"type": "insecureAcceptAnything"}, signing.Signer().write(tmp_path / "key.pem")
    other = {**SAME, "keyPath": stranger}
    assert open_image("valid", write(tmp_path / "p", accept, SAME)) == "accepted"
    assert open_image("valid", write(tmp_path / "p", SAME, other)) == signature.OTHER_KEY
    assert open_image("valid", write(tmp_path / "p", SAME, {"type": "reject"})) == signature.REJECTED


def test_one_of_several_keys_is_enough(tmp_path: Path) -> None:
    stranger = signing.Signer()
    paths = {**SAME, "keyPaths": [stranger.write(tmp_path / "key.pem"), KEY]}
    del paths["keyPath"]
    assert open_image("valid", write(tmp_path / "p", paths)) == "accepted"
    contents = [signing.encoded(each) for each in (stranger.pem, Path(KEY).read_bytes())]
    for name, value, expected in (
        ("keyDatas", contents, "accepted"),
        ("keyData", contents[1], "accepted"),
        ("keyData", contents[0], signature.OTHER_KEY),
    ):
        data = {name: value, **paths}
        del data["keyPaths"]
        assert open_image("valid", write(tmp_path / "p", data)) == expected


@pytest.mark.parametrize(
    "requirement", [{"type": "signedBy", "keyType": "GPGKeys", "keyPath": "/x"}, {"type": "signedBaseLayer"}]
)
def test_requirement_that_is_not_supported_refuses_the_image(
    tmp_path: Path, requirement: dict[str, Any]
) -> None:
    assert open_image("valid", write(tmp_path / "p", requirement)) == signature.UNVERIFIABLE


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rekorPublicKeyPath": KEY}, "sigstoreSigned with a transparency log"),
        ({"fulcio": FULCIO, "rekorPublicKeyPath": KEY}, "sigstoreSigned with fulcio"),
        ({"pki": {}}, "sigstoreSigned with pki"),
    ],
)
def test_demand_beside_the_key_is_not_left_out(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    """The key has signed; what is demanded beside it, or instead of it, cannot be verified."""
    key = {} if {"fulcio", "pki"} & change.keys() else {"keyPath": KEY}
    fields = {name: value for name, value in SAME.items() if name != "keyPath"}
    path = write(tmp_path / "p", {**fields, **key, **change})
    of = reference.parse("docker://h.io/r")
    with pytest.raises(errors.Untrusted, match=reason) as caught:
        images.Judge(trust.Demand(policy=path), of)
    assert caught.value.fields["fault"] == signature.UNVERIFIABLE
    assert open_image("valid", path) == signature.UNVERIFIABLE


def test_missing_key_of_another_scope_does_not_count(tmp_path: Path) -> None:
    missing = {**SIGNED, "keyPath": "/missing"}
    assert open_image("valid", write(tmp_path / "p", SAME, **{"h.io": [missing]})) == "accepted"
    with pytest.raises(errors.RequestError, match=r"/missing: no such file"):
        open_image("valid", write(tmp_path / "p", missing))


def test_bundle_names_no_image_so_that_a_policy_refuses_it(tmp_path: Path) -> None:
    signer = signing.Signer()
    manifest = containers.Image(()).manifest
    bundle = signer.bundle(manifest.digest)
    referrer = signing.referrer(manifest.digest, bundle)
    entry = {**referrer.descriptor, "artifactType": signing.BUNDLE}
    with misbehave.Server() as server:
        for path, data in (
            ("manifests/latest", manifest.data),
            (f"referrers/{manifest.digest}", signing.listing(entry).data),
            (f"manifests/{referrer.digest}", referrer.data),
            (f"blobs/{bundle.digest}", bundle.data),
        ):
            server.serve(f"/v2/r/{path}", misbehave.Page(data))
        endpoint = f"docker://127.0.0.1:{server.port}/r"
        key = signer.write(tmp_path / "key.pem")
        required = {"type": "sigstoreSigned", "keyPath": key, "signedIdentity": {"type": "matchRepository"}}
        for demand, expected in (
            (trust.Demand(policy=write(tmp_path / "p", required)), errors.Untrusted),
            # The API of referrers is read, and what is missing is the configuration.
            (trust.Demand(signed_by=key), errors.Unreachable),
        ):
            source = registry.RegistrySource(
                locations.Registry(endpoint, base.Access(insecure=True)), cancelling.Cancel()
            )
            verified: list[signature.Signature] = []
            demanding = pulled.demanding(source, demand, verified)
            with pytest.raises(expected) as caught, demanding:
                pass
            assert bool(verified) == (expected is errors.Unreachable), caught.value


@pytest.mark.parametrize(
    "requirement",
    [
        {"type": []},
        {"type": {}},
        {"type": "sigstoreSigned", "keyData": "AAAA", "signedIdentity": {"type": []}},
        {
            "type": "sigstoreSigned",
            "keyData": "AAAA",
            "signedIdentity": {"type": "exactReference", "dockerReference": 5},
        },
        {
            "type": "sigstoreSigned",
            "keyData": "AAAA",
            "signedIdentity": {"type": "remapIdentity", "prefix": 5, "signedPrefix": "example.org"},
        },
    ],
)
def test_value_of_another_type_is_refused(tmp_path: Path, requirement: dict[str, Any]) -> None:
    path = write(tmp_path / "policy.json", **{"example.org": [requirement]})
    with pytest.raises(errors.RequestError, match=r"unknown requirement|malformed signedIdentity"):
        policy.read(path)


@pytest.mark.parametrize("scope", ["/images\0", "/images\ud800"])
def test_archive_scope_that_is_no_path_is_refused(tmp_path: Path, scope: str) -> None:
    path = tmp_path / "policy.json"
    reject = [{"type": "reject"}]
    path.write_text(json.dumps({"default": reject, "transports": {"oci-archive": {scope: reject}}}))
    with pytest.raises(errors.RequestError, match="matches no image: it is not a path"):
        policy.read(str(path))
