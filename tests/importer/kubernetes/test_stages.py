"""DataVolumes with checkpoints, run here stage by stage."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support import engine as engine_module
from tests.support import imageiod, kubevirt, kubevirt_stages, manifests, oracle, ovirt_stages, vmware, worker


@pytest.fixture
def workspace(tmp_path: Path) -> manifests.Workspace:
    return manifests.Workspace(tmp_path)


def migration(workspace: manifests.Workspace, ovirt: ovirt_stages.Setup, *, final: bool) -> imageiod.Chain:
    """Make a disk with two checkpoints and a manifest that imports both."""
    engine, authority = ovirt.engine, ovirt.authority
    raw = workspace.directory / "raw"
    raw.write_bytes(os.urandom(manifests.MIB) + bytes(7 * manifests.MIB))
    chain = engine.add_disk(f"disk{len(engine.chains)}", raw)
    chain.snapshot("write -P 1 3M 64k", "write -z 0 4k")
    source = {"url": engine.url, "diskId": chain.disk, "secretRef": "keys", "certConfigMap": "ca"}
    first, second = (volume.id for volume in chain.volumes)
    checkpoints = [{"previous": "", "current": first}, {"previous": first, "current": second}]
    workspace.volume({"imageio": source}, checkpoints=checkpoints, finalCheckpoint=final, size="8Mi")
    workspace.secret("keys", accessKeyId=engine_module.USER, secretKey=engine_module.PASSWORD)
    workspace.config_map("ca", **{"ca.pem": authority.certificate.read_text()})
    (workspace.directory / "scratch").mkdir()
    return chain


def test_stages_run_in_order_and_pause(workspace: manifests.Workspace, ovirt: ovirt_stages.Setup) -> None:
    """Stages run one after the other; the result is paused unless the last checkpoint is final."""
    chain = migration(workspace, ovirt, final=False)
    # Only an image that does not change any more is a checkpoint.
    chain.snapshot()
    scratch = f"--scratch={workspace.directory / 'scratch'}"
    assert workspace.plan(scratch)["format"] == "raw"
    done = workspace.run(scratch)
    assert done.status == 0, done.errors
    stage = ["ImportScheduled", "ImportInProgress", "Paused"]
    assert manifests.phases(done) == ["Pending", *stage, *stage]
    assert f"continue with --after {chain.volumes[1].id}" in done.output.splitlines()[-1]
    oracle.same(workspace.target, chain.content(chain.volumes[1].id, workspace.directory / "content"))

    spec = workspace.documents[0]["spec"]
    chain.write("write -P 2 5M 64k")
    spec["checkpoints"].append({"previous": chain.volumes[1].id, "current": chain.active.id})
    spec["finalCheckpoint"] = True
    done = workspace.run(scratch, f"--after={chain.volumes[1].id}")
    assert done.status == 0, done.errors
    assert manifests.phases(done) == manifests.IMPORTED
    oracle.same(workspace.target, chain.content(chain.active.id, workspace.directory / "last"))


def test_final_stage_completes_the_migration(
    workspace: manifests.Workspace, ovirt: ovirt_stages.Setup
) -> None:
    migration(workspace, ovirt, final=True)
    done = workspace.run(f"--scratch={workspace.directory / 'scratch'}")
    assert done.status == 0, done.errors
    assert manifests.phases(done)[-1] == "Succeeded"


def test_stages_from_vmware_run(workspace: manifests.Workspace) -> None:
    pytest.importorskip("pyVmomi")
    vcsim = vmware.Vcsim(workspace.directory / "vmware", 8 * manifests.MIB)
    vcsim.take_snapshot((0, os.urandom(manifests.MIB)), (5 * manifests.MIB, b"first" * 999))
    vcsim.take_snapshot((manifests.MIB, os.urandom(70_000)), (5 * manifests.MIB, bytes(4096)))
    location = vcsim.location()
    source = {"url": location.endpoint, "uuid": location.uuid, "backingFile": location.backing_file}
    source |= {"thumbprint": location.thumbprint, "secretRef": "keys", "extraArgs": "more"}
    checkpoints = [vcsim.stage(0), vcsim.stage(1)]
    workspace.volume({"vddk": source}, checkpoints=checkpoints, finalCheckpoint=True, size="8Mi")
    workspace.secret("keys", accessKeyId=vmware.USER, secretKey=vmware.PASSWORD)
    workspace.config_map("more", **{"vddk-config-file": "VixDiskLib.nfcAio.Session.BufCount=4\n"})
    library = f"--vddk-libdir={vcsim.libdir}"
    with vcsim.running():
        assert workspace.plan(library)["route"] == "extents"
        done = workspace.run(library)
    assert done.status == 0, done.errors
    stage = ["ImportScheduled", "ImportInProgress"]
    assert manifests.phases(done) == ["Pending", *stage, "Paused", *stage, "Succeeded"]
    oracle.same(workspace.target, vcsim.content(1))


def test_backups_of_kubevirt_are_stages(workspace: manifests.Workspace) -> None:
    """Each backup has a URL of its own, so each stage is a run of its own."""
    folder = workspace.directory / "kubevirt"
    folder.mkdir()
    with kubevirt_stages.running(folder) as machine:
        source = {"url": machine.server.url("exports", "root", "map"), "secretRef": "export"}
        first = machine.checkpoint()
        checkpoints = [{"previous": "", "current": first}]
        workspace.volume({"kubevirt": source | {"certConfigMap": "ca"}}, checkpoints=checkpoints, size="16Mi")
        workspace.secret("export", token=kubevirt.TOKEN)
        workspace.config_map("ca", **{"ca.pem": machine.authority.certificate.read_text()})
        with machine.backup():
            assert workspace.plan()["route"] == "extents"
            done = workspace.run()
        assert (done.status, manifests.phases(done)[-1]) == (0, "Paused"), done.errors
        oracle.same(workspace.target, machine.content(first))
        second = machine.checkpoint(*kubevirt_stages.FIRST)
        checkpoints.append({"previous": first, "current": second})
        workspace.documents[0]["spec"]["finalCheckpoint"] = True
        with machine.backup(since=first):
            done = workspace.run(f"--after={first}")
        assert (done.status, manifests.phases(done)[-1]) == (0, "Succeeded"), done.errors
        oracle.same(workspace.target, machine.content(second))


def test_one_backup_of_kubevirt_is_not_copied_as_two_stages(workspace: manifests.Workspace) -> None:
    """The second would read the first backup again, which looks like a full one."""
    folder = workspace.directory / "kubevirt"
    folder.mkdir()
    with kubevirt_stages.running(folder) as machine:
        source = {"url": machine.server.url("exports", "root", "map"), "secretRef": "export"}
        checkpoints = [{"previous": "", "current": "a"}, {"previous": "a", "current": "b"}]
        workspace.volume({"kubevirt": source | {"certConfigMap": "ca"}}, checkpoints=checkpoints, size="16Mi")
        workspace.secret("export", token=kubevirt.TOKEN)
        workspace.config_map("ca", **{"ca.pem": machine.authority.certificate.read_text()})
        with machine.backup():
            done = workspace.run()
    manifest = "manifest", workspace.directory / "dv.yaml", "--image=x"
    for refused in (done, worker.run(*manifest)):
        assert refused.status == 2, refused.output
        assert "spec.checkpoints: 2 stages, but every backup has its own URL" in refused.errors
    assert not workspace.target.exists()
    assert worker.run(*manifest, "--after=a").status == 0
