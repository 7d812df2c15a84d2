"""DataVolumes carried out here from every source: phases and conditions."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cdi_worker.kubernetes import datavolume, documents, keyring, run
from tests.support import (
    containers,
    devices,
    manifests,
    objectservers,
    oracle,
    registries,
    repository,
    servers,
    tls,
)
from tests.support import disks as disks_module

EXAMPLES = sorted(repository.DATAVOLUMES.glob("*.yaml"))


@pytest.fixture
def place(tmp_path: Path) -> manifests.Place:
    return manifests.Place(tmp_path)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> tls.Authority:
    return tls.Authority(tmp_path_factory.mktemp("ca"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_documented_examples_make_requests(example: Path, tmp_path: Path) -> None:
    """All there is to say of a source arrives, with the Secrets and ConfigMaps beside it."""
    faults: list[str] = []
    found = documents.read(str(example))
    volume = datavolume.parse(datavolume.find(found), faults)
    origin = "/x" if example.stem in {"upload", "pvc"} else ""
    settings = run.Settings(target="", folder=str(tmp_path), origin=origin)
    keys = keyring.Keyring(found)
    made = run.Planner(volume, keys, settings, {}, faults).requests()
    if example.stem == "snapshot":
        assert [fault.partition(":")[0] for fault in faults] == ["spec.source.snapshot"]
        return
    assert faults == []
    assert len(made) == max(1, len(volume.checkpoints))
    location = made[-1].location
    assert location.endpoint == (origin or volume.source.url)
    assert bool(location.access.password) == (volume.source.secret == "endpoint-secret")
    assert len(location.access.ca_files) == bool(volume.source.certificates)
    assert len(location.access.headers) == len(volume.source.headers + volume.source.secret_headers)
    assert bool(getattr(location, "credentials_file", "")) == (example.stem == "gcs")
    assert bool(getattr(location, "vddk_config", "")) == (example.stem == "vddk")
    assert location.stage.previous == (volume.checkpoints[-1].previous if volume.checkpoints else "")


# -- sources -----------------------------------------------------------------------------------------


def test_http(place: manifests.Place, web: servers.Web, disks: disks_module.Disks) -> None:
    """The disk is as large as was asked for, as it is on a volume with the overhead counted in."""
    place.volume({"http": {"url": web.url(disks.image("qcow2"))}})
    done = place.run()
    assert done.status == 0, done.errors
    assert manifests.phases(done) == manifests.IMPORTED
    assert "Bound=True Running=True Ready=False" in done.output.splitlines()[2]
    assert "Bound=True Running=False Ready=True" in done.output.splitlines()[3]
    oracle.same(place.target, disks.expected("qcow2"))
    assert place.target.stat().st_size == manifests.SIZE


def test_status_as_json(place: manifests.Place, web: servers.Web, disks: disks_module.Disks) -> None:
    place.volume({"http": {"url": web.url(disks.raw())}})
    lines = [json.loads(line) for line in place.run("--json").output.splitlines()]
    assert [line["phase"] for line in lines] == manifests.IMPORTED
    conditions = {condition["type"]: condition for condition in lines[-1]["conditions"]}
    assert {name: condition["status"] for name, condition in conditions.items()} == {
        "Bound": "True",
        "Running": "False",
        "Ready": "True",
    }
    assert conditions["Running"]["reason"] == "Completed"
    assert lines[-1]["progress"] == "100.0%"


def test_to_a_device(
    place: manifests.Place, web: servers.Web, disks: disks_module.Disks, device: Path
) -> None:
    storage = {"volumeMode": "Block", "resources": {"requests": {"storage": "16Mi"}}}
    place.volume({"http": {"url": web.url(disks.image("qcow2"))}}, storage=storage)
    done = place.run(target=device)
    assert done.status == 0, done.errors
    oracle.same(device, disks.expected("qcow2"), beyond=devices.DIRT)


def test_https_with_certificates_password_and_checksum(
    place: manifests.Place, disks: disks_module.Disks, authority: tls.Authority
) -> None:
    settings = servers.Settings(pair=authority.issue(), password=("me", "s3cret"))
    digest = disks_module.digest(disks.raw(), "sha256")
    with servers.nginx(place.directory, disks.directory, settings) as web:
        url = web.url(disks.raw(), host="localhost")
        http = {"url": url, "secretRef": "keys", "certConfigMap": "ca", "checksum": f"sha256:{digest}"}
        place.volume({"http": http})
        place.secret("keys", accessKeyId="me", secretKey="s3cret\n")
        place.config_map("ca", **{"ca.pem": authority.certificate.read_text()})
        assert place.plan()["route"] == "stream"
        done = place.run()
    assert done.status == 0, done.errors
    oracle.same(place.target, disks.raw())


def test_headers_of_the_manifest_and_of_secrets(
    place: manifests.Place, server: Any, disks: disks_module.Disks
) -> None:
    from tests.support import misbehave

    url = server.serve("/disk", misbehave.Page(disks.raw().read_bytes()))
    place.volume({"http": {"url": url, "extraHeaders": ["X-One: 1"], "secretExtraHeaders": ["more"]}})
    folder = place.directory / "secrets/more"
    folder.mkdir(parents=True)
    (folder / "header").write_text("X-Two: s3cret\n")
    done = place.run(f"--secrets={folder.parent}")
    assert done.status == 0, done.errors
    for seen in server.requests:
        assert (seen.headers["x-one"], seen.headers["x-two"]) == ("1", "s3cret")


def test_archive(place: manifests.Place, web: servers.Web, disks: disks_module.Disks) -> None:
    place.volume({"http": {"url": web.url(disks.tar("gz"))}}, contentType="archive", size="64Mi")
    target = place.directory / "volume"
    target.mkdir()
    done = place.run(target=target)
    assert done.status == 0, done.errors
    assert manifests.phases(done) == manifests.IMPORTED
    assert {path.name for path in target.iterdir()} == {path.name for path in disks.tree().iterdir()}


def test_blank(place: manifests.Place) -> None:
    place.volume({"blank": {}}, preallocation=True)
    assert place.plan()["route"] == "blank"
    done = place.run()
    assert done.status == 0, done.errors
    assert manifests.phases(done) == manifests.IMPORTED
    assert place.target.stat().st_size == manifests.SIZE
    assert place.target.stat().st_blocks * 512 >= manifests.SIZE


def test_upload_of_a_file(place: manifests.Place, disks: disks_module.Disks) -> None:
    place.volume({"upload": {}})
    done = place.run("--from", disks.image("vmdk"))
    assert done.status == 0, done.errors
    assert manifests.phases(done) == ["Pending", "UploadScheduled", "UploadReady", "Succeeded"]
    oracle.same(place.target, disks.expected("vmdk"))


def test_clone_of_a_volume_is_raw_whatever_the_guest_has_written(
    place: manifests.Place, disks: disks_module.Disks
) -> None:
    """A guest's first sectors may look like an image that names other files."""
    volume = place.directory / "other"
    volume.mkdir()
    disk = volume / "disk.img"
    disk.write_bytes(disks.image("qcow2").read_bytes())
    os.truncate(disk, manifests.SIZE)
    place.volume({"pvc": {"namespace": "a", "name": "b"}}, size=None)
    assert place.plan("--from", volume)["format"] == "raw"
    done = place.run("--from", volume)
    assert done.status == 0, done.errors
    assert manifests.phases(done) == ["Pending", "CloneScheduled", "CloneInProgress", "Succeeded"]
    oracle.same(place.target, disk)


def test_s3(place: manifests.Place, disks: disks_module.Disks) -> None:
    (place.directory / "s3").mkdir()
    with objectservers.seaweed(place.directory / "s3") as store:
        store.put("disk", disks.image("qcow2").read_bytes())
        place.volume({"s3": {"url": store.url("disk"), "secretRef": "keys"}})
        place.secret("keys", accessKeyId=objectservers.READER[0], secretKey=objectservers.READER[1])
        assert place.plan()["format"] == "qcow2"


def test_gcs(place: manifests.Place, disks: disks_module.Disks) -> None:
    with objectservers.emulator(place.directory) as emulator:
        emulator.put("disk", disks.image("qcow2").read_bytes())
        place.volume({"gcs": {"url": f"gs://{objectservers.BUCKET}/disk"}})
        assert place.plan(STORAGE_EMULATOR_HOST=emulator.host)["format"] == "qcow2"


def test_registry(place: manifests.Place, disks: disks_module.Disks, authority: tls.Authority) -> None:
    with registries.registry(place.directory / "r", authority=authority, password=True) as registry:
        layer = containers.layer(*containers.disk(disks.image("qcow2").read_bytes()))
        registry.push("images/disk", containers.Image((layer,)))
        source = {"url": registry.reference("images/disk"), "secretRef": "keys", "certConfigMap": "ca"}
        place.volume({"registry": source})
        place.secret("keys", accessKeyId=registries.USER, secretKey=registries.PASSWORD)
        place.config_map("ca", **{"ca.pem": authority.certificate.read_text()})
        assert place.plan()["format"] == "qcow2"
