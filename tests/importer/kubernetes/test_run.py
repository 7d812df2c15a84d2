"""DataVolumes run here from every source: phases and conditions."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cdi_worker.importer.kubernetes import datavolume, documents, references, run
from cdi_worker.importer.settings import DEFAULT
from tests.support import (
    containers,
    devices,
    manifests,
    misbehave,
    objectservers,
    oracle,
    ovas,
    registries,
    repository,
    servers,
    tls,
    worker,
)
from tests.support import disks as disks_module

EXAMPLES = sorted(repository.DATAVOLUMES.glob("*.yaml"))


@pytest.fixture
def workspace(tmp_path: Path) -> manifests.Workspace:
    return manifests.Workspace(tmp_path)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> tls.Authority:
    return tls.Authority(tmp_path_factory.mktemp("ca"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_documented_examples_make_requests(example: Path, tmp_path: Path) -> None:
    """Every field of the source arrives in the request, with its Secrets and ConfigMaps."""
    faults: list[str] = []
    found = documents.read(str(example))
    volume = datavolume.parse(datavolume.find(found), faults)
    origin = "/x" if example.stem in {"upload", "pvc"} else ""
    place = run.Place(target="", folder=str(tmp_path), origin=origin)
    keys = references.References(found)
    made = run.Planner(volume, keys, place, DEFAULT, {}, faults).requests()
    if example.stem == "snapshot":
        assert [fault.partition(":")[0] for fault in faults] == ["spec.source.snapshot"]
        return
    assert faults == []
    assert len(made) == max(1, len(volume.checkpoints))
    location = made[-1].location
    assert location.endpoint == (origin or volume.source.url.replace("kubevirt:", "https:"))
    assert bool(location.access.password) == (volume.source.secret == "endpoint-secret")
    assert len(location.access.ca_files) == bool(volume.source.certificates)
    assert len(location.access.headers) == len(volume.source.headers + volume.source.secret_headers)
    assert bool(getattr(location, "credentials_file", "")) == (example.stem == "gcs")
    assert bool(getattr(location, "vddk_config", "")) == (example.stem == "vddk")
    assert location.stage.previous == (volume.checkpoints[-1].previous if volume.checkpoints else "")


# -- sources -----------------------------------------------------------------------------------------


def test_http_source_is_imported(
    workspace: manifests.Workspace, web: servers.Web, disks: disks_module.Disks
) -> None:
    """The disk has the requested size, as on a volume with overhead added."""
    workspace.volume({"http": {"url": web.url(disks.image("qcow2"))}})
    done = workspace.run()
    assert done.status == 0, done.errors
    assert manifests.phases(done) == manifests.IMPORTED
    assert "Bound=True Running=True Ready=False" in done.output.splitlines()[2]
    assert "Bound=True Running=False Ready=True" in done.output.splitlines()[3]
    oracle.same(workspace.target, disks.expected("qcow2"))
    assert workspace.target.stat().st_size == manifests.SIZE


def test_disk_of_an_ova_is_chosen_by_annotation(
    workspace: manifests.Workspace, server: misbehave.Server, disks: disks_module.Disks
) -> None:
    image = disks.image("vmdk-stream").read_bytes()
    packed = ovas.ova(ovas.Disk(image), ovas.Disk(image, "b.vmdk"))
    workspace.volume({"http": {"url": server.serve("/vm.ova", misbehave.Page(packed))}})
    assert "holds 2 disks" in workspace.run().error_message
    workspace.documents[0]["metadata"]["annotations"] = {"cdi-worker/disk": "b.vmdk"}
    done = workspace.run()
    assert done.status == 0, done.errors
    oracle.same(workspace.target, disks.expected("vmdk-stream"))
    objects = worker.run("manifest", workspace.directory / "dv.yaml", "--image=worker").output
    assert "CDI_WORKER_DISK\n          value: b.vmdk" in objects


def test_layer_is_chosen_by_annotation(
    workspace: manifests.Workspace, guarded: registries.Registry, disks: disks_module.Disks
) -> None:
    root, data = (disks.wrapped("raw", "zst", content).read_bytes() for content in ("mixed", "dense"))
    guarded.push("machine", containers.machine(rootdisk=(root, "8Mi"), datadisk=(data, "4Mi")))
    access = guarded.access()
    workspace.secret("keys", accessKeyId=access.user, secretKey=access.password)
    certificate = Path(access.ca_files[0]).read_text()
    workspace.config_map("ca", **{"ca.pem": certificate})
    given = {"url": guarded.reference("machine"), "secretRef": "keys", "certConfigMap": "ca"}
    workspace.volume({"registry": given})
    name = "io.kubevirt.disk.name=datadisk"
    workspace.documents[-1]["metadata"]["annotations"] = {"cdi-worker/layer-annotation": name}
    done = workspace.run()
    assert done.status == 0, done.errors
    with workspace.target.open("r+b") as file:
        file.truncate(disks.raw("dense").stat().st_size)
    oracle.same(workspace.target, disks.raw("dense"))
    objects = worker.run("manifest", workspace.directory / "dv.yaml", "--image=worker").output.replace(
        '"', ""
    )
    assert f"CDI_WORKER_LAYER_ANNOTATION\n          value: {name}" in objects


def test_status_is_printed_as_json(
    workspace: manifests.Workspace, web: servers.Web, disks: disks_module.Disks
) -> None:
    workspace.volume({"http": {"url": web.url(disks.raw())}})
    lines = [json.loads(line) for line in workspace.run("--json").output.splitlines()]
    assert [line["phase"] for line in lines] == manifests.IMPORTED
    conditions = {condition["type"]: condition for condition in lines[-1]["conditions"]}
    assert {name: condition["status"] for name, condition in conditions.items()} == {
        "Bound": "True",
        "Running": "False",
        "Ready": "True",
    }
    assert conditions["Running"]["reason"] == "Completed"
    assert lines[-1]["progress"] == "100.0%"


def test_disk_is_imported_to_a_device(
    workspace: manifests.Workspace, web: servers.Web, disks: disks_module.Disks, device: Path
) -> None:
    storage = {"volumeMode": "Block", "resources": {"requests": {"storage": "16Mi"}}}
    workspace.volume({"http": {"url": web.url(disks.image("qcow2"))}}, storage=storage)
    done = workspace.run(target=device)
    assert done.status == 0, done.errors
    oracle.same(device, disks.expected("qcow2"), beyond=devices.DIRT)


def test_https_source_uses_certificates_password_and_checksum(
    workspace: manifests.Workspace, disks: disks_module.Disks, authority: tls.Authority
) -> None:
    settings = servers.Settings(pair=authority.issue(), password=("me", "s3cret"))
    digest = disks_module.digest(disks.raw(), "sha256")
    with servers.nginx(workspace.directory, disks.directory, settings) as web:
        url = web.url(disks.raw(), host="localhost")
        http = {"url": url, "secretRef": "keys", "certConfigMap": "ca", "checksum": f"sha256:{digest}"}
        workspace.volume({"http": http})
        workspace.secret("keys", accessKeyId="me", secretKey="s3cret\n")
        workspace.config_map("ca", **{"ca.pem": authority.certificate.read_text()})
        assert workspace.plan()["route"] == "stream"
        done = workspace.run()
    assert done.status == 0, done.errors
    oracle.same(workspace.target, disks.raw())


def test_headers_of_manifest_and_secrets_are_sent(
    workspace: manifests.Workspace, server: Any, disks: disks_module.Disks
) -> None:
    from tests.support import misbehave

    url = server.serve("/disk", misbehave.Page(disks.raw().read_bytes()))
    workspace.volume({"http": {"url": url, "extraHeaders": ["X-One: 1"], "secretExtraHeaders": ["more"]}})
    folder = workspace.directory / "secrets/more"
    folder.mkdir(parents=True)
    (folder / "header").write_text("X-Two: s3cret\n")
    done = workspace.run(f"--secrets={folder.parent}")
    assert done.status == 0, done.errors
    for request in server.requests:
        assert (request.headers["x-one"], request.headers["x-two"]) == ("1", "s3cret")


def test_archive_is_unpacked(
    workspace: manifests.Workspace, web: servers.Web, disks: disks_module.Disks
) -> None:
    workspace.volume({"http": {"url": web.url(disks.tar("gz"))}}, contentType="archive", size="64Mi")
    target = workspace.directory / "volume"
    target.mkdir()
    done = workspace.run(target=target)
    assert done.status == 0, done.errors
    assert manifests.phases(done) == manifests.IMPORTED
    assert {path.name for path in target.iterdir()} == {path.name for path in disks.tree().iterdir()}


def test_blank_disk_is_preallocated(workspace: manifests.Workspace) -> None:
    workspace.volume({"blank": {}}, preallocation=True)
    assert workspace.plan()["route"] == "blank"
    done = workspace.run()
    assert done.status == 0, done.errors
    assert manifests.phases(done) == manifests.IMPORTED
    assert workspace.target.stat().st_size == manifests.SIZE
    assert workspace.target.stat().st_blocks * 512 >= manifests.SIZE


def test_uploaded_file_is_imported(workspace: manifests.Workspace, disks: disks_module.Disks) -> None:
    workspace.volume({"upload": {}})
    done = workspace.run("--from", disks.image("vmdk"))
    assert done.status == 0, done.errors
    assert manifests.phases(done) == ["Pending", "UploadScheduled", "UploadReady", "Succeeded"]
    oracle.same(workspace.target, disks.expected("vmdk"))


def test_cloned_volume_is_always_raw(workspace: manifests.Workspace, disks: disks_module.Disks) -> None:
    """The guest's first sectors may look like an image that names other files."""
    volume = workspace.directory / "other"
    volume.mkdir()
    disk = volume / "disk.img"
    disk.write_bytes(disks.image("qcow2").read_bytes())
    os.truncate(disk, manifests.SIZE)
    workspace.volume({"pvc": {"namespace": "a", "name": "b"}}, size=None)
    assert workspace.plan("--from", volume)["format"] == "raw"
    done = workspace.run("--from", volume)
    assert done.status == 0, done.errors
    assert manifests.phases(done) == ["Pending", "CloneScheduled", "CloneInProgress", "Succeeded"]
    oracle.same(workspace.target, disk)


def test_s3_source_is_imported(workspace: manifests.Workspace, disks: disks_module.Disks) -> None:
    (workspace.directory / "s3").mkdir()
    with objectservers.seaweed(workspace.directory / "s3") as store:
        store.put("disk", disks.image("qcow2").read_bytes())
        workspace.volume({"s3": {"url": store.url("disk"), "secretRef": "keys"}})
        workspace.secret("keys", accessKeyId=objectservers.READER[0], secretKey=objectservers.READER[1])
        assert workspace.plan()["format"] == "qcow2"


def test_gcs_source_is_planned(workspace: manifests.Workspace, disks: disks_module.Disks) -> None:
    with objectservers.emulator(workspace.directory) as emulator:
        emulator.put("disk", disks.image("qcow2").read_bytes())
        workspace.volume({"gcs": {"url": f"gs://{objectservers.BUCKET}/disk"}})
        assert workspace.plan(STORAGE_EMULATOR_HOST=emulator.host)["format"] == "qcow2"


def test_registry_source_is_planned(
    workspace: manifests.Workspace, disks: disks_module.Disks, authority: tls.Authority
) -> None:
    with registries.registry(workspace.directory / "r", authority=authority, password=True) as registry:
        layer = containers.layer(*containers.disk(disks.image("qcow2").read_bytes()))
        registry.push("images/disk", containers.Image((layer,)))
        source = {"url": registry.reference("images/disk"), "secretRef": "keys", "certConfigMap": "ca"}
        workspace.volume({"registry": source})
        workspace.secret("keys", accessKeyId=registries.USER, secretKey=registries.PASSWORD)
        workspace.config_map("ca", **{"ca.pem": authority.certificate.read_text()})
        assert workspace.plan()["format"] == "qcow2"
