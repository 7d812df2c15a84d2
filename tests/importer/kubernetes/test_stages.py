"""DataVolumes with checkpoints, carried out here stage by stage."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support import engine as engine_module
from tests.support import imageiod, manifests, oracle, ovirt_stages, vmware


@pytest.fixture
def place(tmp_path: Path) -> manifests.Place:
    return manifests.Place(tmp_path)


def migration(place: manifests.Place, ovirt: ovirt_stages.Place, *, final: bool) -> imageiod.Chain:
    """Make a disk with two checkpoints and the manifest that brings both."""
    engine, authority = ovirt.engine, ovirt.authority
    raw = place.directory / "raw"
    raw.write_bytes(os.urandom(manifests.MIB) + bytes(7 * manifests.MIB))
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


def test_stages(place: manifests.Place, ovirt: ovirt_stages.Place) -> None:
    """Stage after stage; paused where the last checkpoint is not the final one."""
    chain = migration(place, ovirt, final=False)
    scratch = f"--scratch={place.directory / 'scratch'}"
    assert place.plan(scratch)["format"] == "raw"
    done = place.run(scratch)
    assert done.status == 0, done.errors
    stage = ["ImportScheduled", "ImportInProgress", "Paused"]
    assert manifests.phases(done) == ["Pending", *stage, *stage]
    assert f"continue with --after {chain.volumes[1].id}" in done.output.splitlines()[-1]
    oracle.same(place.target, chain.content(chain.volumes[1].id, place.directory / "content"))

    spec = place.documents[0]["spec"]
    chain.snapshot("write -P 2 5M 64k")
    spec["checkpoints"].append({"previous": chain.volumes[1].id, "current": chain.active.id})
    spec["finalCheckpoint"] = True
    done = place.run(scratch, f"--after={chain.volumes[1].id}")
    assert done.status == 0, done.errors
    assert manifests.phases(done) == manifests.IMPORTED
    oracle.same(place.target, chain.content(chain.active.id, place.directory / "last"))


def test_stages_that_all_are_there(place: manifests.Place, ovirt: ovirt_stages.Place) -> None:
    migration(place, ovirt, final=True)
    done = place.run(f"--scratch={place.directory / 'scratch'}")
    assert done.status == 0, done.errors
    assert manifests.phases(done)[-1] == "Succeeded"


def test_stages_from_vmware(place: manifests.Place) -> None:
    pytest.importorskip("pyVmomi")
    estate = vmware.Estate(place.directory / "vmware", 8 * manifests.MIB)
    estate.take((0, os.urandom(manifests.MIB)), (5 * manifests.MIB, b"first" * 999))
    estate.take((manifests.MIB, os.urandom(70_000)), (5 * manifests.MIB, bytes(4096)))
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
    assert manifests.phases(done) == ["Pending", *stage, "Paused", *stage, "Succeeded"]
    oracle.same(place.target, estate.content(1))
