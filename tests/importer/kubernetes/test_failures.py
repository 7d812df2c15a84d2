"""DataVolumes that cannot be run here, or fail, and their messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import disks as disks_module
from tests.support import manifests, oracle, servers, worker


@pytest.fixture
def workspace(tmp_path: Path) -> manifests.Workspace:
    return manifests.Workspace(tmp_path)


def test_failed_import_reports_the_reason(
    workspace: manifests.Workspace, web: servers.Web, disks: disks_module.Disks
) -> None:
    """The last phase has the reason, as do the last line and the exit status."""
    url = web.url(disks.raw())
    workspace.volume({"http": {"url": url, "checksum": f"sha256:{'0' * 64}"}})
    done = workspace.run()
    assert (done.status, manifests.phases(done)[-1]) == (5, "Failed")
    assert "checksum mismatch" in done.output.splitlines()[-1]
    assert "checksum mismatch" in done.error_message
    oracle.unusable(workspace.target)


def test_unreachable_source_is_reported(workspace: manifests.Workspace) -> None:
    workspace.volume({"http": {"url": "http://127.0.0.1:1/disk"}})
    done = workspace.run("--stall-timeout=1")
    assert (done.status, manifests.phases(done)) == (3, ["Pending", "ImportScheduled", "Failed"])


def test_blank_disk_without_space_is_refused(workspace: manifests.Workspace) -> None:
    workspace.volume({"blank": {}}, size="1Ei")
    done = workspace.run()
    assert (done.status, manifests.phases(done)) == (8, ["Pending", "Failed"])
    assert not workspace.target.exists()


def test_all_missing_objects_are_reported_at_once(workspace: manifests.Workspace) -> None:
    http = {"url": "http://x.invalid/", "secretRef": "keys", "certConfigMap": "ca"}
    workspace.volume({"http": {**http, "secretExtraHeaders": ["more", "bad"]}}, contentType="tar")
    workspace.secret("keys", accessKeyId="me")
    workspace.secret("bad", header="no header, a s3cret")
    done = workspace.run()
    assert done.status == 2
    assert done.error_message.split("; ") == [
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
def test_unsupported_source_is_reported(
    workspace: manifests.Workspace, source: dict[str, Any], arguments: tuple[str, ...], fault: str
) -> None:
    workspace.volume(source)
    done = workspace.run(*arguments)
    assert done.status == 2
    assert done.error_message.startswith(fault)


def test_malformed_secrets_are_reported(workspace: manifests.Workspace) -> None:
    workspace.volume({"http": {"url": "http://x.invalid/", "secretRef": "keys"}})
    workspace.documents.append(
        {"kind": "Secret", "metadata": {"name": "keys"}, "data": {"secretKey": "pa$$"}}
    )
    workspace.documents.append({"kind": "Secret", "metadata": {"name": "n"}, "stringData": {"a": 12345}})
    done = workspace.run()
    assert done.status == 2
    assert done.error_message == (
        "Secret keys: data.secretKey: is not base64; "
        "Secret n: stringData.a: is not a string; put it in quotes"
    )


def test_target_is_required(workspace: manifests.Workspace) -> None:
    workspace.volume({"blank": {}})
    path = workspace.directory / "dv.yaml"
    path.write_text(yaml.safe_dump_all(workspace.documents))
    assert worker.run("run", path).error_message.startswith("no target given: ")
