"""References to images, by the rules of docker and skopeo."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdi_worker import errors
from cdi_worker.sources import reference as oci_reference
from cdi_worker.sources.reference import ArchiveReference, Reference

DIGEST = "sha256:" + "ab" * 32
DIGEST_512 = "sha512:" + "cd" * 64


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("docker://quay.io/disks/fedora", Reference("quay.io", "disks/fedora")),
        ("docker://quay.io/disks/fedora:40", Reference("quay.io", "disks/fedora", "40")),
        (f"docker://quay.io/a@{DIGEST}", Reference("quay.io", "a", digest=DIGEST)),
        (f"docker://quay.io/a:1@{DIGEST_512}", Reference("quay.io", "a", "1", DIGEST_512)),
        ("docker://registry:5000/a/b/c:x", Reference("registry:5000", "a/b/c", "x")),
        ("docker://localhost/a", Reference("localhost", "a")),
        ("docker://127.0.0.1:5000/a", Reference("127.0.0.1:5000", "a")),
        ("docker://[::1]:5000/a:b", Reference("[::1]:5000", "a", "b")),
        ("docker://fedora", Reference("docker.io", "library/fedora")),
        ("docker://fedora:40", Reference("docker.io", "library/fedora", "40")),
        ("docker://kubevirt/fedora:40", Reference("docker.io", "kubevirt/fedora", "40")),
        ("docker://docker.io/fedora", Reference("docker.io", "library/fedora")),
        ("docker://index.docker.io/a/b", Reference("docker.io", "a/b")),
        ("docker://quay.io/a:t#disk.qcow2", Reference("quay.io", "a", "t", choice="disk.qcow2")),
        (f"docker://quay.io/a#{DIGEST}", Reference("quay.io", "a", choice=DIGEST)),
        ("oci-archive:/tmp/a.tar", ArchiveReference("/tmp/a.tar")),
        ("oci-archive:/tmp/a.tar:v1", ArchiveReference("/tmp/a.tar", "v1")),
        ("oci-archive:/tmp:1/a.tar", ArchiveReference("/tmp:1/a.tar")),
        ("oci-archive:a.tar#file", ArchiveReference("a.tar", choice="file")),
    ],
)
def test_reference_is_parsed(endpoint: str, expected: object) -> None:
    assert oci_reference.parse(endpoint) == expected


def test_api_of_docker_hub_is_on_another_host() -> None:
    reference = oci_reference.parse("docker://fedora")
    assert isinstance(reference, Reference)
    assert reference.api_host == "registry-1.docker.io"


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "docker://",
        "docker:quay.io/a",
        "http://quay.io/a",
        "docker://quay.io/",
        "docker://quay.io/Upper",
        "docker://quay.io/a/../b",
        "docker://quay.io/a:",
        "docker://quay.io/a:b:c",
        "docker://quay.io/a:-x",
        "docker://quay.io/a@sha256:short",
        "docker://quay.io/a@md5:d41d8cd98f00b204e9800998ecf8427e",
        "docker://quay.io:port/a",
        "docker://quay.io/a?b=c",
        "oci-archive:",
        "oci-archive:/a:",
    ],
)
def test_malformed_reference_is_refused(endpoint: str) -> None:
    with pytest.raises(errors.RequestError):
        oci_reference.parse(endpoint)


def test_secrets_are_not_repeated() -> None:
    with pytest.raises(errors.RequestError) as caught:
        oci_reference.parse("docker://user:hunter2@quay.io/a")
    assert "hunter2" not in str(caught.value)


@given(st.text(max_size=60))
def test_any_text_is_a_reference_or_refused(text: str) -> None:
    try:
        found = oci_reference.parse(f"docker://{text}")
    except errors.RequestError:
        return
    assert isinstance(found, Reference)
    assert not set("/?#@ ") & set(found.api_host)
    # A printed reference parses to the same one.
    assert oci_reference.parse(str(found)) in (
        found,
        oci_reference.parse(str(found).replace("docker.io/", "")),
    )
