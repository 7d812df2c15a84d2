"""Sources of DataVolumes, contacted to find out whether their pods need scratch space."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from cdi_worker.importer.kubernetes import contact, datavolume, documents
from tests.support import (
    chains,
    containers,
    manifests,
    misbehave,
    objectservers,
    registries,
    repository,
    servers,
    tls,
)
from tests.support import disks as disks_module

EXAMPLES = sorted(
    path
    for path in repository.DATAVOLUMES.glob("*.yaml")
    if datavolume.parse(datavolume.find(documents.read(str(path)))[0], []).source.kind
    in contact.UNKNOWN_SCRATCH
)


@pytest.fixture
def workspace(tmp_path: Path) -> manifests.Workspace:
    return manifests.Workspace(tmp_path)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> tls.Authority:
    return tls.Authority(tmp_path_factory.mktemp("ca"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_documented_examples_make_requests(example: Path, tmp_path: Path) -> None:
    """Every field of the source arrives in the request, with its Secrets and ConfigMaps."""
    found = documents.read(str(example))
    (volume,) = datavolume.parse_all(datavolume.find(found))
    reading = contact.Reading(volume, contact.References(found), str(tmp_path), {})
    location = reading.request(Fraction(0)).location
    assert reading.faults == []
    assert location.endpoint == volume.source.url
    assert bool(location.access.password) == (volume.source.secret == "endpoint-secret")
    assert len(location.access.ca_files) == bool(volume.source.value("certConfigMap"))
    headers = [*volume.source.value("extraHeaders", ()), *volume.source.value("secretExtraHeaders", ())]
    assert len(location.access.headers) == len(headers)
    assert bool(getattr(location, "credentials_file", "")) == (example.stem == "gcs")


def test_https_source_gets_certificates_and_password(
    workspace: manifests.Workspace, disks: disks_module.Disks, authority: tls.Authority
) -> None:
    settings = servers.Settings(pair=authority.issue(), password=("me", "s3cret"))
    with servers.nginx(workspace.directory, disks.directory, settings) as web:
        url = web.url(disks.raw(), host="localhost")
        workspace.volume({"http": {"url": url, "secretRef": "keys", "certConfigMap": "ca"}})
        workspace.secret("keys", accessKeyId="me", secretKey="s3cret\n")
        workspace.config_map("ca", **{"ca.pem": authority.certificate.read_text()})
        assert not workspace.gets_scratch()


def test_headers_of_manifest_and_secrets_are_sent(
    workspace: manifests.Workspace, server: misbehave.Server, disks: disks_module.Disks
) -> None:
    url = server.serve("/disk", misbehave.Page(disks.raw().read_bytes()))
    workspace.volume({"http": {"url": url, "extraHeaders": ["X-One: 1"], "secretExtraHeaders": ["more"]}})
    folder = workspace.directory / "secrets/more"
    folder.mkdir(parents=True)
    (folder / "header").write_text("X-Two: s3cret\n")
    assert not workspace.gets_scratch(f"--secrets={folder.parent}")
    assert server.requests
    for request in server.requests:
        assert (request.headers["x-one"], request.headers["x-two"]) == ("1", "s3cret")


def test_file_of_the_first_checkpoint_is_contacted(
    workspace: manifests.Workspace, server: misbehave.Server
) -> None:
    chain = chains.Chain(workspace.directory)
    chain.base("16M", "write -P 1 0 1M")
    chain.overlay("write -P 2 1M 64k")
    urls = [server.serve(f"/{path.name}", misbehave.Page(path.read_bytes())) for path in chain.files]
    names = [path.name for path in chain.files]
    pairs = zip(["", *names[:-1]], names, strict=True)
    checkpoints = [{"previous": before, "current": name} for before, name in pairs]
    workspace.volume({"http": {"url": urls[0]}}, checkpoints=checkpoints, finalCheckpoint=True)
    workspace.gets_scratch()
    assert {request.path for request in server.requests} == {f"/{names[0]}"}


def test_s3_source_is_contacted(
    workspace: manifests.Workspace, seaweed: objectservers.Store, disks: disks_module.Disks
) -> None:
    seaweed.put("contacted/disk", disks.image("qcow2").read_bytes())
    workspace.volume({"s3": {"url": seaweed.url("contacted/disk"), "secretRef": "keys"}})
    workspace.secret("keys", accessKeyId=objectservers.READER[0], secretKey=objectservers.READER[1])
    assert not workspace.gets_scratch()


def test_gcs_source_is_contacted(
    workspace: manifests.Workspace, emulator: objectservers.Emulator, disks: disks_module.Disks
) -> None:
    emulator.put("contacted/disk", disks.image("qcow2").read_bytes())
    workspace.volume({"gcs": {"url": f"gs://{objectservers.BUCKET}/{emulator.folder}contacted/disk"}})
    assert not workspace.gets_scratch(STORAGE_EMULATOR_HOST=emulator.host)


def test_registry_source_is_contacted(
    workspace: manifests.Workspace, guarded: registries.Registry, disks: disks_module.Disks
) -> None:
    guarded.push("contacted/disk", containers.image_of(disks.image("qcow2")))
    source = {"url": guarded.reference("contacted/disk"), "secretRef": "keys", "certConfigMap": "ca"}
    workspace.volume({"registry": source})
    workspace.secret("keys", accessKeyId=registries.USER, secretKey=registries.PASSWORD)
    assert guarded.authority
    workspace.config_map("ca", **{"ca.pem": guarded.authority.certificate.read_text()})
    # Whether the disk needs scratch is known, so no fault means that it was reached.
    workspace.gets_scratch()


def test_unreachable_source_is_reported(workspace: manifests.Workspace, server: misbehave.Server) -> None:
    workspace.volume({"http": {"url": server.serve("/disk", misbehave.Page(b"", status=404))}})
    done = workspace.printed("--contact")
    assert (done.status, done.output) == (3, "")


def test_all_missing_objects_are_reported_at_once(workspace: manifests.Workspace) -> None:
    http = {"url": "http://x.invalid/", "secretRef": "keys", "certConfigMap": "ca"}
    workspace.volume({"http": {**http, "secretExtraHeaders": ["more", "bad"]}})
    workspace.secret("keys", accessKeyId="me")
    workspace.secret("bad", header="no header, a s3cret")
    done = workspace.printed("--contact")
    assert done.status == 2
    assert done.error_message.split("; ") == [
        "spec.source.http.secretRef: Secret keys has no key secretKey",
        "spec.source.http.secretExtraHeaders[0]: no Secret more in the manifest or below --secrets",
        "spec.source.http.secretExtraHeaders[1]: Secret bad, key header: malformed extra header",
        "spec.source.http.certConfigMap: no ConfigMap ca in the manifest or below --secrets",
    ]


def test_image_stream_is_not_contacted(workspace: manifests.Workspace) -> None:
    workspace.volume({"registry": {"imageStream": "s", "pullMethod": "node"}})
    done = workspace.printed("--contact")
    assert done.status == 2
    assert done.error_message.startswith("spec.source.registry.imageStream: image streams exist only")


def test_malformed_secrets_are_reported(workspace: manifests.Workspace) -> None:
    workspace.volume({"http": {"url": "http://x.invalid/", "secretRef": "keys"}})
    workspace.documents.append(
        {"kind": "Secret", "metadata": {"name": "keys"}, "data": {"secretKey": "pa$$"}}
    )
    workspace.documents.append({"kind": "Secret", "metadata": {"name": "n"}, "stringData": {"a": 12345}})
    done = workspace.printed("--contact")
    assert done.status == 2
    assert done.error_message == (
        "Secret keys: data.secretKey: is not base64; "
        "Secret n: stringData.a: is not a string; put it in quotes"
    )
