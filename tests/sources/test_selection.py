"""What selects the bytes of a disk is in the key of its journal, for each field of each kind of source."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from cdi_worker import sources
from cdi_worker.sources import base, kind, selection

KINDS = {each.name: each for each in sources.own()}
ENDPOINTS = {
    "glance": "https://keystone.example/v3",
    "kubevirt": "https://host/volumes/one/disk.img",
    "nbd": "nbd://host/export",
    "registry": "docker://host/repository:tag",
    "s3": "s3://bucket/key",
    "gcs": "gs://bucket/key",
}
#: The fields that select nothing: credentials, and how bytes are fetched. A new field is expected to select.
ACCESS = {
    "password",
    "session_token",
    "ca_files",
    "insecure",
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "connections",
    "patience",
    "min_speed",
}
CREDENTIALS = {
    "glance": {
        "auth_type",
        "user_password",
        "token",
        "application_id",
        "application_name",
        "application_secret",
    },
    "kubevirt": {"token", "token_file"},
    "nbd": {"certificate", "key"},
    "registry": {"auth_file", "docker_config"},
    "gcs": {"credentials_file"},
    "vddk": {"thumbprint", "quiesce", "read_by", "vddk_libdir", "vddk_config", "vddk_connections"},
    "vsphere": {"thumbprint", "quiesce"},
    "http": {"ready_file", "done_file"},
}


def location(of: kind.Kind) -> base.Location:
    return of.location_type(ENDPOINTS.get(of.name, "http://host/disk"))


def other(value: Any) -> Any:
    """Return another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return (*value, ("name", "other"))
    return value + 1 if isinstance(value, int | float) else f"{value}2"


@pytest.mark.parametrize(
    ("name", "field"),
    [
        (name, field.name)
        for name, of in KINDS.items()
        for field in dataclasses.fields(of.location_type)
        if field.name != "access"
    ],
)
def test_field_selects_unless_it_is_a_credential(name: str, field: str) -> None:
    before = location(KINDS[name])
    after = dataclasses.replace(before, **{field: other(getattr(before, field))})
    is_same = selection.digest(before) == selection.digest(after)
    assert is_same == (field in CREDENTIALS.get(name, set()))


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(base.Access)])
def test_access_selects_by_user_and_headers(field: str) -> None:
    before = base.Access()
    after = dataclasses.replace(before, **{field: other(getattr(before, field))})
    pair = {selection.digest(base.Location("http://host/disk", each)) for each in (before, after)}
    assert len(pair) == (1 if field in ACCESS else 2)


DIFFERENT = [
    ("http://host/d?file=a", "http://host/d?file=b"),
    ("http://host/d?a=1&b=2", "http://host/d?b=2&a=1"),
    ("http://host/d", "http://host/d?"),
    ("http://host/d", "https://host/d"),
    ("http://host/d?versionId=1&X-Amz-Signature=x", "http://host/d?versionId=2&X-Amz-Signature=x"),
    # Not signatures: the other parts are missing.
    ("http://host/d?sig=a", "http://host/d?sig=b"),
    ("http://host/d?Signature=a", "http://host/d?Signature=b"),
    ("http://host/d?X-Amz-Signature=a", "http://host/d?X-Amz-Signature=b"),
    ("http://ann@host/d", "http://bob@host/d"),
    ("s3://bucket/key?X-Amz-Signature=a", "s3://bucket/key?X-Amz-Signature=b"),
    ("docker://host/name:1", "docker://host/name:2"),
    ("docker://host/name@sha256:1", "docker://host/name@sha256:2"),
    ("docker://host/name:1#a", "docker://host/name:1#b"),
    ("oci-archive:/disk:1", "oci-archive:/disk:2"),
    ("nbd://host/a", "nbd://host/b"),
    ("nbd+unix:///e?socket=/a", "nbd+unix:///e?socket=/b"),
    ("http://[host/d?file=a", "http://[host/d?file=b"),
]
SIGNED = (
    "http://host/d?X-Amz-Algorithm=A&X-Amz-Credential={0}&X-Amz-Date={0}&X-Amz-Expires=1&X-Amz-Signature={0}"
)
SAME = [
    ("http://ann:one@host/d", "http://ann:two@host/d"),
    (SIGNED.format(1), SIGNED.format(2)),
    (SIGNED.format(1) + "&X-Amz-Security-Token=1&x=1", SIGNED.format(2) + "&X-Amz-Security-Token=2&x=1"),
    (SIGNED.format(1).replace("Amz", "Goog"), SIGNED.format(2).replace("Amz", "Goog")),
    (
        "http://host/d?AWSAccessKeyId=1&Expires=1&Signature=1",
        "http://host/d?AWSAccessKeyId=2&Expires=2&Signature=2",
    ),
    (
        "http://host/d?GoogleAccessId=1&Expires=1&Signature=1",
        "http://host/d?GoogleAccessId=2&Expires=2&Signature=2",
    ),
    ("http://host/d?Key-Pair-Id=1&Policy=1&Signature=1", "http://host/d?Key-Pair-Id=2&Policy=2&Signature=2"),
    ("http://host/d?sv=1&sp=r&sr=b&se=1&sig=1", "http://host/d?sv=2&sp=r&sr=b&se=2&st=1&sig=2"),
    ("http://host/d?temp_url_sig=1&temp_url_expires=1", "http://host/d?temp_url_sig=2&temp_url_expires=2"),
]


@pytest.mark.parametrize(("one", "two"), DIFFERENT)
def test_address_selects(one: str, two: str) -> None:
    assert selection.digest(base.Location(one)) != selection.digest(base.Location(two))


@pytest.mark.parametrize(("one", "two"), SAME)
def test_renewed_credential_in_an_address_selects_nothing(one: str, two: str) -> None:
    assert selection.digest(base.Location(one)) == selection.digest(base.Location(two))


@pytest.mark.parametrize("name", ["Authorization", "proxy-authorization", "X-Auth-Token", "X-API-Key"])
def test_header_with_a_credential_selects_nothing(name: str) -> None:
    pair = [base.Location("http://host/d", base.Access(headers=((name, value),))) for value in "ab"]
    assert selection.digest(pair[0]) == selection.digest(pair[1])


@pytest.mark.parametrize("name", ["X-Disk", "Accept", "Host", "Cookie", "X-Object-Key"])
def test_other_header_selects(name: str) -> None:
    pair = [base.Location("http://host/d", base.Access(headers=((name, value),))) for value in "ab"]
    assert selection.digest(pair[0]) != selection.digest(pair[1])


def test_user_of_temporary_keys_selects_nothing() -> None:
    pair = [
        base.Location("s3://bucket/key", base.Access(user=key, password=key, session_token=key))
        for key in "ab"
    ]
    assert selection.digest(pair[0]) == selection.digest(pair[1])


def test_plain_location_selects_as_that_of_its_source() -> None:
    plain = base.Location("http://host/d?file=a")
    assert selection.digest(plain) == selection.digest(KINDS["http"].accept(plain))


def test_field_of_a_plugin_selects() -> None:
    @dataclasses.dataclass(frozen=True)
    class Part:
        number: int

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Tape(base.Location):
        part: Part = Part(0)

    assert selection.digest(Tape("tape:1", part=Part(1))) != selection.digest(Tape("tape:1", part=Part(2)))
