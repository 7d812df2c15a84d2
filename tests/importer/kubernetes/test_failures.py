"""DataVolumes that cannot be carried out here, or fail, and what is said of that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import disks as disks_module
from tests.support import manifests, oracle, servers


@pytest.fixture
def place(tmp_path: Path) -> manifests.Place:
    return manifests.Place(tmp_path)


def test_failed(place: manifests.Place, web: servers.Web, disks: disks_module.Disks) -> None:
    """The last phase says why; so do the last line and the exit status."""
    url = web.url(disks.raw())
    place.volume({"http": {"url": url, "checksum": f"sha256:{'0' * 64}"}})
    done = place.run()
    assert (done.status, manifests.phases(done)[-1]) == (5, "Failed")
    assert "checksum mismatch" in done.output.splitlines()[-1]
    assert "checksum mismatch" in done.complaint
    oracle.unusable(place.target)


def test_unreachable(place: manifests.Place) -> None:
    place.volume({"http": {"url": "http://127.0.0.1:1/disk"}})
    done = place.run("--stall-timeout=1")
    assert (done.status, manifests.phases(done)) == (3, ["Pending", "ImportScheduled", "Failed"])


def test_too_little_room_for_a_blank_disk(place: manifests.Place) -> None:
    place.volume({"blank": {}}, size="1Ei")
    done = place.run()
    assert (done.status, manifests.phases(done)) == (6, ["Pending", "Failed"])
    assert not place.target.exists()


def test_what_is_missing_is_named_all_at_once(place: manifests.Place) -> None:
    http = {"url": "http://x.invalid/", "secretRef": "keys", "certConfigMap": "ca"}
    place.volume({"http": {**http, "secretExtraHeaders": ["more", "bad"]}}, contentType="tar")
    place.secret("keys", accessKeyId="me")
    place.secret("bad", header="no header, a s3cret")
    done = place.run()
    assert done.status == 2
    assert done.complaint.split("; ") == [
        "spec.contentType: 'tar' is not one of kubevirt, archive",
        "spec.source.http.secretRef: Secret keys has no key secretKey",
        "spec.source.http.secretExtraHeaders[0]: no Secret more in the manifest or below --secrets",
        "spec.source.http.secretExtraHeaders[1]: Secret bad, key header: malformed extra header",
        "spec.source.http.certConfigMap: no ConfigMap ca in the manifest or below --secrets",
    ]


@pytest.mark.parametrize(
    ("source", "arguments", "fault"),
    [
        ({"upload": {}}, (), "spec.source.upload: no file, device or directory given; use --from"),
        ({"blank": {}}, ("--from=x",), "spec.source.blank: --from is only for the sources pvc and upload"),
        (
            {"snapshot": {"namespace": "a", "name": "b"}},
            (),
            "spec.source.snapshot: snapshots can be read only",
        ),
        (
            {"registry": {"imageStream": "s", "pullMethod": "node"}},
            (),
            "spec.source.registry.imageStream: image streams exist only",
        ),
        ({"blank": {}}, ("--after=x",), "spec.checkpoints: no checkpoint has current 'x'"),
    ],
)
def test_what_cannot_be_done_here(
    place: manifests.Place, source: dict[str, Any], arguments: tuple[str, ...], fault: str
) -> None:
    place.volume(source)
    done = place.run(*arguments)
    assert done.status == 2
    assert done.complaint.startswith(fault)


def test_secrets_that_are_none(place: manifests.Place) -> None:
    place.volume({"http": {"url": "http://x.invalid/", "secretRef": "keys"}})
    place.documents.append({"kind": "Secret", "metadata": {"name": "keys"}, "data": {"secretKey": "pa$$"}})
    place.documents.append({"kind": "Secret", "metadata": {"name": "n"}, "stringData": {"a": 12345}})
    done = place.run()
    assert done.status == 2
    assert done.complaint == (
        "Secret keys: data.secretKey: is not base64; "
        "Secret n: stringData.a: is not a string; put it in quotes"
    )


def test_a_target_has_to_be_named(place: manifests.Place) -> None:
    place.volume({"blank": {}})
    assert place.run("--target=").complaint.startswith("no target given: ")
