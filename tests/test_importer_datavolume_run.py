"""DataVolumes carried out here: phases, conditions, stages, and what is missing for them."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from importer import datavolume, datavolume_run, documents, keyring
from tests import (
    containers,
    devices,
    imageiod,
    objectservers,
    oracle,
    registries,
    servers,
    tls,
    vmware,
    worker,
)
from tests import disks as disks_module
from tests import engine as engine_module

EXAMPLES = sorted((Path(__file__).parent / "datavolumes").glob("*.yaml"))
MIB = 1 << 20
SIZE = 32 * MIB
IMPORTED = ["Pending", "ImportScheduled", "ImportInProgress", "Succeeded"]


@dataclasses.dataclass
class Place:
    """A directory with a manifest, what it needs, and the target."""

    directory: Path
    documents: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    @property
    def target(self) -> Path:
        return self.directory / "disk.img"

    def volume(self, source: dict[str, Any], *, size: str | None = "32Mi", **spec: Any) -> None:
        requests = {} if size is None else {"resources": {"requests": {"storage": size}}}
        self.documents.append(
            {
                "apiVersion": datavolume.API_VERSION,
                "kind": "DataVolume",
                "metadata": {"name": "x"},
                "spec": {"source": source, "storage": requests} | spec,
            }
        )

    def secret(self, name: str, **data: str) -> None:
        encoded = {key: base64.b64encode(value.encode()).decode() for key, value in data.items()}
        self.documents.append({"kind": "Secret", "metadata": {"name": name}, "data": encoded})

    def config_map(self, name: str, **data: str) -> None:
        self.documents.append({"kind": "ConfigMap", "metadata": {"name": name}, "data": data})

    def run(self, *arguments: str | Path, target: Path | None = None, **env: str) -> worker.Done:
        path = self.directory / "dv.yaml"
        path.write_text(yaml.safe_dump_all(self.documents))
        where = f"--target={target or self.target}"
        return worker.run("run", path, where, "--stall-timeout=5", *arguments, env=env)

    def plan(self, *arguments: str | Path, **env: str) -> dict[str, Any]:
        """Return what a dry run tells, which leaves nothing behind."""
        done = self.run("--dry-run", "--json", *arguments, **env)
        assert done.status == 0, done.errors
        assert not self.target.exists()
        return dict(json.loads(done.output))


def phases(done: worker.Done) -> list[str]:
    return [line.split()[0] for line in done.output.splitlines()]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


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
    settings = datavolume_run.Settings(target="", folder=str(tmp_path), origin=origin)
    keys = keyring.Keyring(found)
    made = datavolume_run.Planner(volume, keys, settings, {}, faults).requests()
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
    assert bool(location.credentials_file) == (example.stem == "gcs")
    assert bool(location.vddk_config) == (example.stem == "vddk")
    assert location.previous == (volume.checkpoints[-1].previous if volume.checkpoints else "")


# -- sources -----------------------------------------------------------------------------------------


def test_http(place: Place, web: servers.Web, disks: disks_module.Disks) -> None:
    """The disk is as large as was asked for, as it is on a volume with the overhead counted in."""
    place.volume({"http": {"url": web.url(disks.image("qcow2"))}})
    done = place.run()
    assert done.status == 0, done.errors
    assert phases(done) == IMPORTED
    assert "Bound=True Running=True Ready=False" in done.output.splitlines()[2]
    assert "Bound=True Running=False Ready=True" in done.output.splitlines()[3]
    oracle.same(place.target, disks.expected("qcow2"))
    assert place.target.stat().st_size == SIZE


def test_status_as_json(place: Place, web: servers.Web, disks: disks_module.Disks) -> None:
    place.volume({"http": {"url": web.url(disks.raw())}})
    lines = [json.loads(line) for line in place.run("--json").output.splitlines()]
    assert [line["phase"] for line in lines] == IMPORTED
    conditions = {condition["type"]: condition for condition in lines[-1]["conditions"]}
    assert {name: condition["status"] for name, condition in conditions.items()} == {
        "Bound": "True",
        "Running": "False",
        "Ready": "True",
    }
    assert conditions["Running"]["reason"] == "Completed"
    assert lines[-1]["progress"] == "100.0%"


def test_to_a_device(place: Place, web: servers.Web, disks: disks_module.Disks, device: Path) -> None:
    storage = {"volumeMode": "Block", "resources": {"requests": {"storage": "16Mi"}}}
    place.volume({"http": {"url": web.url(disks.image("qcow2"))}}, storage=storage)
    done = place.run(target=device)
    assert done.status == 0, done.errors
    oracle.same(device, disks.expected("qcow2"), beyond=devices.DIRT)


def test_https_with_certificates_password_and_checksum(
    place: Place, disks: disks_module.Disks, authority: tls.Authority
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


def test_headers_of_the_manifest_and_of_secrets(place: Place, server: Any, disks: disks_module.Disks) -> None:
    from tests import misbehave

    url = server.serve("/disk", misbehave.Page(disks.raw().read_bytes()))
    place.volume({"http": {"url": url, "extraHeaders": ["X-One: 1"], "secretExtraHeaders": ["more"]}})
    folder = place.directory / "secrets/more"
    folder.mkdir(parents=True)
    (folder / "header").write_text("X-Two: s3cret\n")
    done = place.run(f"--secrets={folder.parent}")
    assert done.status == 0, done.errors
    for seen in server.requests:
        assert (seen.headers["x-one"], seen.headers["x-two"]) == ("1", "s3cret")


def test_archive(place: Place, web: servers.Web, disks: disks_module.Disks) -> None:
    place.volume({"http": {"url": web.url(disks.tar("gz"))}}, contentType="archive", size="64Mi")
    target = place.directory / "volume"
    target.mkdir()
    done = place.run(target=target)
    assert done.status == 0, done.errors
    assert phases(done) == IMPORTED
    assert {path.name for path in target.iterdir()} == {path.name for path in disks.tree().iterdir()}


def test_blank(place: Place) -> None:
    place.volume({"blank": {}}, preallocation=True)
    assert place.plan()["route"] == "blank"
    done = place.run()
    assert done.status == 0, done.errors
    assert phases(done) == IMPORTED
    assert place.target.stat().st_size == SIZE
    assert place.target.stat().st_blocks * 512 >= SIZE


def test_upload_of_a_file(place: Place, disks: disks_module.Disks) -> None:
    place.volume({"upload": {}})
    done = place.run("--from", disks.image("vmdk"))
    assert done.status == 0, done.errors
    assert phases(done) == ["Pending", "UploadScheduled", "UploadReady", "Succeeded"]
    oracle.same(place.target, disks.expected("vmdk"))


def test_clone_of_a_volume_is_raw_whatever_the_guest_has_written(
    place: Place, disks: disks_module.Disks
) -> None:
    """A guest's first sectors may look like an image that names other files."""
    volume = place.directory / "other"
    volume.mkdir()
    disk = volume / "disk.img"
    disk.write_bytes(disks.image("qcow2").read_bytes())
    os.truncate(disk, SIZE)
    place.volume({"pvc": {"namespace": "a", "name": "b"}}, size=None)
    assert place.plan("--from", volume)["format"] == "raw"
    done = place.run("--from", volume)
    assert done.status == 0, done.errors
    assert phases(done) == ["Pending", "CloneScheduled", "CloneInProgress", "Succeeded"]
    oracle.same(place.target, disk)


def test_s3(place: Place, disks: disks_module.Disks) -> None:
    (place.directory / "s3").mkdir()
    with objectservers.seaweed(place.directory / "s3") as store:
        store.put("disk", disks.image("qcow2").read_bytes())
        place.volume({"s3": {"url": store.url("disk"), "secretRef": "keys"}})
        place.secret("keys", accessKeyId=objectservers.READER[0], secretKey=objectservers.READER[1])
        assert place.plan()["format"] == "qcow2"


def test_gcs(place: Place, disks: disks_module.Disks) -> None:
    with objectservers.emulator(place.directory) as emulator:
        emulator.put("disk", disks.image("qcow2").read_bytes())
        place.volume({"gcs": {"url": f"gs://{objectservers.BUCKET}/disk"}})
        assert place.plan(STORAGE_EMULATOR_HOST=emulator.host)["format"] == "qcow2"


def test_registry(place: Place, disks: disks_module.Disks, authority: tls.Authority) -> None:
    with registries.registry(place.directory / "r", authority=authority, password=True) as registry:
        layer = containers.layer(*containers.disk(disks.image("qcow2").read_bytes()))
        registry.push("images/disk", containers.Image((layer,)))
        source = {"url": registry.reference("images/disk"), "secretRef": "keys", "certConfigMap": "ca"}
        place.volume({"registry": source})
        place.secret("keys", accessKeyId=registries.USER, secretKey=registries.PASSWORD)
        place.config_map("ca", **{"ca.pem": authority.certificate.read_text()})
        assert place.plan()["format"] == "qcow2"


# -- stages ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ovirt(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[engine_module.Engine, tls.Authority]]:
    with engine_module.running(tmp_path_factory.mktemp("ovirt")) as running:
        yield running


def migration(
    place: Place, ovirt: tuple[engine_module.Engine, tls.Authority], *, final: bool
) -> imageiod.Chain:
    """Make a disk with two checkpoints and the manifest that brings both."""
    engine, authority = ovirt
    raw = place.directory / "raw"
    raw.write_bytes(os.urandom(MIB) + bytes(7 * MIB))
    chain = engine.add_disk(f"disk{len(engine.chains)}", raw)
    chain.snapshot("write -P 1 3M 64k", "write -z 0 4k")
    source = {"url": engine.url, "diskId": chain.disk, "secretRef": "keys", "certConfigMap": "ca"}
    first, second = (volume.id for volume in chain.volumes)
    checkpoints = [{"previous": "", "current": first}, {"previous": first, "current": second}]
    place.volume({"imageio": source}, checkpoints=checkpoints, finalCheckpoint=final, size="8Mi")
    place.secret("keys", accessKeyId=engine_module.USER, secretKey=engine_module.PASSWORD)
    place.config_map("ca", **{"ca.pem": authority.certificate.read_text()})
    (place.directory / "scratch").mkdir()
    return chain


def test_stages(place: Place, ovirt: tuple[engine_module.Engine, tls.Authority]) -> None:
    """Stage after stage; paused where the last checkpoint is not the final one."""
    chain = migration(place, ovirt, final=False)
    scratch = f"--scratch={place.directory / 'scratch'}"
    assert place.plan(scratch)["format"] == "raw"
    done = place.run(scratch)
    assert done.status == 0, done.errors
    stage = ["ImportScheduled", "ImportInProgress", "Paused"]
    assert phases(done) == ["Pending", *stage, *stage]
    assert f"go on with --after {chain.volumes[1].id}" in done.output.splitlines()[-1]
    oracle.same(place.target, chain.content(chain.volumes[1].id, place.directory / "content"))

    spec = place.documents[0]["spec"]
    chain.snapshot("write -P 2 5M 64k")
    spec["checkpoints"].append({"previous": chain.volumes[1].id, "current": chain.active.id})
    spec["finalCheckpoint"] = True
    done = place.run(scratch, f"--after={chain.volumes[1].id}")
    assert done.status == 0, done.errors
    assert phases(done) == IMPORTED
    oracle.same(place.target, chain.content(chain.active.id, place.directory / "last"))


def test_stages_that_all_are_there(place: Place, ovirt: tuple[engine_module.Engine, tls.Authority]) -> None:
    migration(place, ovirt, final=True)
    done = place.run(f"--scratch={place.directory / 'scratch'}")
    assert done.status == 0, done.errors
    assert phases(done)[-1] == "Succeeded"


def test_stages_from_vmware(place: Place) -> None:
    pytest.importorskip("pyVmomi")
    estate = vmware.Estate(place.directory / "vmware", 8 * MIB)
    estate.take((0, os.urandom(MIB)), (5 * MIB, b"first" * 999))
    estate.take((MIB, os.urandom(70_000)), (5 * MIB, bytes(4096)))
    location = estate.location()
    source = {"url": location.endpoint, "uuid": location.uuid, "backingFile": location.backing_file}
    source |= {"thumbprint": location.thumbprint, "secretRef": "keys", "extraArgs": "more"}
    checkpoints = [estate.stage(0), estate.stage(1)]
    place.volume({"vddk": source}, checkpoints=checkpoints, finalCheckpoint=True, size="8Mi")
    place.secret("keys", accessKeyId=vmware.USER, secretKey=vmware.PASSWORD)
    place.config_map("more", **{"vddk-config-file": "VixDiskLib.nfcAio.Session.BufCount=4\n"})
    library = f"--vddk-libdir={estate.libdir}"
    with estate.running():
        assert place.plan(library)["route"] == "extents"
        done = place.run(library)
    assert done.status == 0, done.errors
    stage = ["ImportScheduled", "ImportInProgress"]
    assert phases(done) == ["Pending", *stage, "Paused", *stage, "Succeeded"]
    oracle.same(place.target, estate.content(1))


# -- failures ----------------------------------------------------------------------------------------


def test_failed(place: Place, web: servers.Web, disks: disks_module.Disks) -> None:
    """The last phase says why; so do the last line and the exit status."""
    url = web.url(disks.raw())
    place.volume({"http": {"url": url, "checksum": f"sha256:{'0' * 64}"}})
    done = place.run()
    assert (done.status, phases(done)[-1]) == (5, "Failed")
    assert "checksum mismatch" in done.output.splitlines()[-1]
    assert "checksum mismatch" in done.complaint
    oracle.unusable(place.target)


def test_unreachable(place: Place) -> None:
    place.volume({"http": {"url": "http://127.0.0.1:1/disk"}})
    done = place.run("--stall-timeout=1")
    assert (done.status, phases(done)) == (3, ["Pending", "ImportScheduled", "Failed"])


def test_too_little_room_for_a_blank_disk(place: Place) -> None:
    place.volume({"blank": {}}, size="1Ei")
    done = place.run()
    assert (done.status, phases(done)) == (6, ["Pending", "Failed"])
    assert not place.target.exists()


def test_what_is_missing_is_named_all_at_once(place: Place) -> None:
    http = {"url": "http://x.invalid/", "secretRef": "keys", "certConfigMap": "ca"}
    place.volume({"http": {**http, "secretExtraHeaders": ["more", "bad"]}}, contentType="tar")
    place.secret("keys", accessKeyId="me")
    place.secret("bad", header="no header, a s3cret")
    done = place.run()
    assert done.status == 2
    assert done.complaint.split("; ") == [
        "spec.contentType: 'tar' is none of kubevirt, archive",
        "spec.source.http.secretRef: Secret keys has no key secretKey",
        "spec.source.http.secretExtraHeaders[0]: no Secret more in the manifest, nor below --secrets",
        "spec.source.http.secretExtraHeaders[1]: Secret bad, key header: malformed extra header",
        "spec.source.http.certConfigMap: no ConfigMap ca in the manifest, nor below --secrets",
    ]


@pytest.mark.parametrize(
    ("source", "arguments", "fault"),
    [
        ({"upload": {}}, (), "spec.source.upload: name its file, device or directory with --from"),
        ({"blank": {}}, ("--from=x",), "spec.source.blank: --from is for pvc and upload"),
        ({"snapshot": {"namespace": "a", "name": "b"}}, (), "spec.source.snapshot: only the storage"),
        (
            {"registry": {"imageStream": "s", "pullMethod": "node"}},
            (),
            "spec.source.registry.imageStream: only a cluster",
        ),
        ({"blank": {}}, ("--after=x",), "spec.checkpoints: none of them has current 'x'"),
    ],
)
def test_what_cannot_be_done_here(
    place: Place, source: dict[str, Any], arguments: tuple[str, ...], fault: str
) -> None:
    place.volume(source)
    done = place.run(*arguments)
    assert done.status == 2
    assert done.complaint.startswith(fault)


def test_secrets_that_are_none(place: Place) -> None:
    place.volume({"http": {"url": "http://x.invalid/", "secretRef": "keys"}})
    place.documents.append({"kind": "Secret", "metadata": {"name": "keys"}, "data": {"secretKey": "pa$$"}})
    place.documents.append({"kind": "Secret", "metadata": {"name": "n"}, "stringData": {"a": 12345}})
    done = place.run()
    assert done.status == 2
    assert done.complaint == (
        "Secret keys: data.secretKey: is not base64; Secret n: stringData.a: is no text; put it in quotes"
    )


def test_a_target_has_to_be_named(place: Place) -> None:
    place.volume({"blank": {}})
    assert place.run("--target=").complaint.startswith("where to: ")
