"""A DataVolume of VMware without VMware's library: our image as ``initImageURL``."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from cdi_worker.sources.vmware import machine
from tests.support import oracle, processes, repository, vmware, vmware_stages, worker

pytest.importorskip("pyVmomi")

MiB = 1 << 20

#: Set by the kubelet in every container.
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
#: CDI mounts the volume for the library there.
MOUNTED = ("unshare", "--mount", "sh", "-euc", 'mount -t tmpfs tmpfs /opt; exec "$@"', "sh")


def test_init_container_of_our_image_ends_well() -> None:
    """CDI starts it without arguments, and the importer only when it has ended with 0."""
    processes.need_root()
    done = worker.run(env=KUBERNETES, prefix=MOUNTED)
    assert (done.status, done.output) == (0, "")
    assert done.error_message.startswith("copies nothing to /opt: this image has no VDDK library")


@pytest.mark.parametrize(
    ("arguments", "env", "prefix"),
    [
        ((), {}, MOUNTED),  # a person's machine
        ((), KUBERNETES, ()),
        # A controller's pod that lacks its variables: nothing was imported.
        (("-v=1",), KUBERNETES, MOUNTED),
    ],
)
def test_other_start_without_a_role_fails(
    arguments: tuple[str, ...], env: dict[str, str], prefix: tuple[str, ...]
) -> None:
    processes.need_root()
    done = worker.run(*arguments, env=env, prefix=prefix)
    assert (done.status, done.output.startswith("Usage: ")) == (2, True)
    # A role is never mistaken for it.
    done = worker.run(*arguments, env={**env, "IMPORTER_SOURCE": "nosuch"}, prefix=prefix)
    assert (done.status, "nosuch" in done.errors) == (1, True)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[vmware.Vcsim]:
    made = vmware.Vcsim(tmp_path_factory.mktemp("vmware"), 16 * MiB, more=(8 * MiB,), exports=True)
    made.write((0, b"another disk"), disk=1)
    made.take_snapshot((0, vmware_stages.noise(1, 3 * MiB)))
    made.take_snapshot((MiB, vmware_stages.noise(2, 70_000)), (2 * MiB, MiB))
    made.write((5 * MiB, vmware_stages.noise(3, 4096)))
    with made.running():
        yield made


@pytest.fixture
def vcsim(running: vmware.Vcsim) -> vmware.Vcsim:
    running.reset()
    return running


def variables(vcsim: vmware.Vcsim, current: str = "", previous: str = "") -> dict[str, str]:
    """Return the environment of CDI's pod of a DataVolume."""
    known = vcsim.location()
    return {
        "IMPORTER_SOURCE": "vddk",
        "IMPORTER_ENDPOINT": known.endpoint,
        "IMPORTER_CONTENTTYPE": "kubevirt",
        "IMPORTER_IMAGE_SIZE": str(vcsim.size),
        "FILESYSTEM_OVERHEAD": "0",
        "PREALLOCATION": "false",
        "INSECURE_TLS": "false",
        "IMPORTER_ACCESS_KEY_ID": vmware.USER,
        "IMPORTER_SECRET_KEY": vmware.PASSWORD,
        "IMPORTER_UUID": known.uuid,
        "IMPORTER_BACKING_FILE": known.backing_file,
        "IMPORTER_THUMBPRINT": known.thumbprint,
        "IMPORTER_CURRENT_CHECKPOINT": current,
        "IMPORTER_PREVIOUS_CHECKPOINT": previous,
        "IMPORTER_FINAL_CHECKPOINT": "",
        "OWNER_UID": "4711",
        **KUBERNETES,
    }


#: The volume of an init container that has copied nothing.
FOLDER = "/opt/vmware-vix-disklib-distrib"
EMPTY = (*MOUNTED[:4], f'mount -t tmpfs tmpfs /opt; mkdir {FOLDER}; exec "$@"', "sh")
WHY = f"{FOLDER}: VDDK library not found"


def check(vcsim: vmware.Vcsim, done: worker.Completed, pod: worker.Pod, expected: Path) -> None:
    """Check that a pod has imported the disk by a lease, says so, and leaves nothing on vSphere."""
    assert done.status == 0, pod.message + done.errors
    oracle.same(pod.disk, expected)
    info = pod.outcome["vddkInfo"]
    assert set(info) == {"Version", "Host"}
    assert (info["Version"].startswith("export lease of VMware"), WHY in info["Version"]) == (True, True)
    assert vcsim.host is not None
    assert info["Host"] in vcsim.host.url("")
    assert pod.outcome["message"] == "Import Complete"
    assert f"read by an export lease, not by VDDK: {WHY}" in done.errors
    assert vmware.PASSWORD not in pod.message + done.errors
    ended = vcsim.calls("HttpNfcLeaseComplete", "HttpNfcLeaseAbort")
    assert [each["call"] for each in ended] == ["HttpNfcLeaseComplete"]


@pytest.mark.parametrize("volume", ["file", "block"])
def test_disk_of_a_running_machine_without_the_library(
    vcsim: vmware.Vcsim, tmp_path: Path, device: Path, volume: str
) -> None:
    pod = worker.Pod(tmp_path, block=device if volume == "block" else None)
    done = pod.run(prefix=EMPTY, **variables(vcsim))
    check(vcsim, done, pod, vcsim.current())
    made, removed = vcsim.calls("CreateSnapshot_Task"), vcsim.calls("RemoveSnapshot_Task")
    assert (len(made), len(removed)) == (1, 1)


def test_stages_without_the_library(vcsim: vmware.Vcsim, tmp_path: Path) -> None:
    processes.need_root()
    pod = worker.Pod(tmp_path)
    for stage in range(2):
        vcsim.reset()
        done = pod.run(prefix=EMPTY, **variables(vcsim, **vcsim.stage(stage)))
        check(vcsim, done, pod, vcsim.content(stage))
    assert vcsim.calls("CreateSnapshot_Task") == []


def test_pods_of_two_disks_of_a_machine_run_at_once(vcsim: vmware.Vcsim, tmp_path: Path) -> None:
    """A DataVolume is one disk; a lease locks the machine, and the second pod waits for it."""
    processes.need_root()
    # The first one is slow.
    assert vcsim.host is not None
    vcsim.host.page = dataclasses.replace(vcsim.host.page, drip=(256 << 10, 0.2))
    env = variables(vcsim)
    others = [env, {**env, "IMPORTER_BACKING_FILE": vcsim.file(0, 1), "OWNER_UID": "4712"}]
    pods = [worker.Pod(tmp_path / str(number)) for number in range(2)]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        runs = [pool.submit(pod.run, prefix=EMPTY, **each) for pod, each in zip(pods, others, strict=True)]
    assert any("waiting for the machine" in each.result().errors for each in runs)
    for number, done in enumerate(each.result() for each in runs):
        assert done.status == 0, done.errors
        oracle.same(pods[number].disk, vcsim.current(number))
    assert len(vcsim.calls("HttpNfcLeaseComplete")) == 2
    assert len(vcsim.calls("removed")) == 2


@pytest.mark.parametrize("method", ["CreateSnapshot", "RemoveSnapshot"])
@pytest.mark.parametrize("moment", ["_Task", ""])
def test_locked_machine_is_waited_for(vcsim: vmware.Vcsim, tmp_path: Path, method: str, moment: str) -> None:
    """The export of another disk, or a backup, may refuse a task, or let it fail: no snapshot is left."""
    vcsim.lease = {"Faults": {f"{method}{moment}": {"Name": "TaskInProgress", "Times": 2}}}
    vcsim.save()
    pod = worker.Pod(tmp_path)
    done = pod.call(**variables(vcsim), CDI_WORKER_READ_BY="lease")
    assert done.status == 0, pod.message
    oracle.same(pod.disk, vcsim.current())
    assert done.errors.count("waiting for the machine") == 1
    assert len(vcsim.calls(f"{method}_Task")) == 3
    assert len(vcsim.calls("created")) == len(vcsim.calls("removed")) == 1


def test_lock_that_stays_is_reported(
    vcsim: vmware.Vcsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "LOCKED", 1.0)
    vcsim.lease = {"Faults": {"ExportSnapshot": {"Name": "TaskInProgress"}}}
    vcsim.save()
    pod = worker.Pod(tmp_path)
    done = pod.call(**variables(vcsim), CDI_WORKER_READ_BY="lease")
    assert (done.status, [*pod.data.iterdir()]) == (1, [])
    assert pod.message.startswith("Unable to connect to vddk data source: https://localhost:")
    assert "begin an export: " in pod.message
    assert pod.message.endswith("(TaskInProgress)")
    assert len(vcsim.calls("created")) == len(vcsim.calls("removed")) == 1


def test_library_that_is_demanded_is_not_replaced(vcsim: vmware.Vcsim, tmp_path: Path) -> None:
    processes.need_root()
    pod = worker.Pod(tmp_path)
    done = pod.run(prefix=EMPTY, **variables(vcsim), CDI_WORKER_READ_BY="vddk")
    assert (done.status, [*pod.data.iterdir()]) == (1, [])
    assert vcsim.calls() == []
    instead = "with CDI_WORKER_READ_BY auto an export lease reads the disk"
    assert pod.message == f"Unable to process data: {WHY}; {instead}"


def test_inspect_says_how_the_disk_is_read(vcsim: vmware.Vcsim, tmp_path: Path) -> None:
    known = vcsim.location(vddk_libdir=str(tmp_path), current=vcsim.snapshot(0))
    arguments = ("inspect", "--source=vddk", f"--uuid={known.uuid}", f"--backing-file={known.backing_file}")
    arguments += (f"--thumbprint={known.thumbprint}", f"--vddk-libdir={tmp_path}", known.endpoint)
    env = {"GOVC_USERNAME": vmware.USER, "GOVC_PASSWORD": vmware.PASSWORD}
    for more, why in (
        ((), f"{tmp_path}: VDDK library not found"),
        (("--read-by=lease",), "as requested"),
    ):
        done = worker.call(*arguments, f"--snapshot={known.current}", *more, "--json", env=env)
        assert done.status == 0, done.errors
        found = json.loads(done.output)
        assert (found["readBy"], found["why"], found["virtualSize"]) == ("lease", why, vcsim.size)
        assert ("not by VDDK" in done.errors) == (not more)


def test_job_of_a_manifest_imports_a_disk(vcsim: vmware.Vcsim, tmp_path: Path) -> None:
    """The environment of the Job for a DataVolume with the source vsphere, with the values of its Secret."""
    example = (repository.DATAVOLUMES / "vsphere.yaml").read_text()
    (volume, _) = yaml.safe_load_all(example)
    source = volume["spec"]["source"]["vsphere"]
    source |= {"url": f"vsphere://localhost:{vcsim.port}/{vmware.UUID}", "thumbprint": vcsim.thumbprint}
    (tmp_path / "dv.yaml").write_text(yaml.safe_dump(volume))
    done = worker.call("manifest", tmp_path / "dv.yaml", "--image=x")
    assert done.status == 0, done.errors
    (_, job) = yaml.safe_load_all(done.output)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    secret = {"accessKeyId": vmware.USER, "secretKey": vmware.PASSWORD}
    env = {}
    for each in container["env"]:
        key = each.get("valueFrom", {}).get("secretKeyRef", {}).get("key", "")
        env[each["name"]] = each["value"] if "value" in each else secret.get(key, "4711")
    pod = worker.Pod(tmp_path)
    done = worker.call(*pod.arguments, *container["args"], env={**env, "IMPORTER_IMAGE_SIZE": ""})
    assert done.status == 0, pod.message
    oracle.same(pod.disk, vcsim.current(1))
    (made,) = vcsim.calls("CreateSnapshot_Task")
    assert (made["quiesce"], made["memory"]) == (True, False)
