"""The image in real containers: every role, as a user without privileges, with a pod's limits.

Run by `make test-image`, which builds the image; `make test` skips all modules in this folder.
"""

from __future__ import annotations

import json
import os
import re
import ssl
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.support import disks as disks_module
from tests.support import objectservers, oracle, pods, processes, repository, servers, vmware, worker

MiB = 1 << 20
COMPLETE = '{"scratchSpaceRequired":false,"preallocationApplied":false,"message":"Import Complete"}'
#: MiB unpacked: the figure in docs/pods/image.md and some reserve.
LARGEST = 270


# -- the importer ----------------------------------------------------------------------------


# ranges, our reader, qemu-img
@pytest.mark.parametrize(
    "variant", ["raw", pytest.param("qcow2", marks=pytest.mark.every_platform), "vhdx-log"]
)
def test_import_writes_file(
    container: pods.Pod, web: servers.Web, disks: disks_module.Disks, variant: str
) -> None:
    done = container.run("-v=3", "-alsologtostderr", IMPORTER_ENDPOINT=web.url(disks.image(variant)))
    pods.check(container, done, COMPLETE, disks.expected(variant))


@pytest.mark.parametrize("variant", ["qcow2", "vhdx-log"])
def test_import_writes_device(
    container: pods.Pod, web: servers.Web, disks: disks_module.Disks, tmp_path: Path, variant: str
) -> None:
    with pods.device(tmp_path) as container.block:
        done = container.run(IMPORTER_ENDPOINT=web.url(disks.image(variant)))
        pods.check(container, done, COMPLETE, disks.expected(variant))


def test_import_uses_scratch_and_xz(container: pods.Pod, web: servers.Web, disks: disks_module.Disks) -> None:
    container.has_scratch = True
    done = container.run(IMPORTER_ENDPOINT=web.url(disks.wrapped("vhdx-log", "xz")))
    pods.check(container, done, COMPLETE, disks.expected("vhdx-log"))
    assert not [*container.scratch.iterdir()]


@pytest.mark.parametrize("user", ["107:107", "1001:1001", "65534:4242"])
def test_import_runs_as_any_user(
    image: str, tmp_path: Path, web: servers.Web, disks: disks_module.Disks, user: str
) -> None:
    pod = pods.Pod(tmp_path / "pod", image, user=user, env={"IMPORTER_SOURCE": "http"})
    done = pod.run(IMPORTER_ENDPOINT=web.url(disks.image("vhdx-log")))
    pods.check(pod, done, COMPLETE, disks.expected("vhdx-log"))
    assert disks.expected("vhdx-log").stat().st_size == pod.disk.stat().st_size


def test_import_works_with_volume_mounted_at_opt(
    container: pods.Pod, tmp_path: Path, web: servers.Web, disks: disks_module.Disks
) -> None:
    """CDI's controllers mount the volume with VMware's library at /opt."""
    (tmp_path / "opt").mkdir()
    container.files = {tmp_path / "opt": "/opt"}
    done = container.run(IMPORTER_ENDPOINT=web.url(disks.image("vhdx-log")))
    pods.check(container, done, COMPLETE, disks.expected("vhdx-log"))


def test_init_container_for_the_library_ends_with_0(image: str, tmp_path: Path) -> None:
    """As CDI starts the image of ``initImageURL``: its entry point, without arguments, as any user."""
    (tmp_path / "opt").mkdir()
    pod = pods.Pod(tmp_path / "pod", image, files={tmp_path / "opt": "/opt"})
    command = pod.command(KUBERNETES_SERVICE_HOST="10.96.0.1")
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, "no VDDK library" in done.stderr) == (0, True), done.stderr


def test_upstream_commands_run_without_shell(
    container: pods.Pod, web: servers.Web, disks: disks_module.Disks
) -> None:
    container.files = {Path("/dev/null"): "/usr/bin/dash"}
    assert container.run("-c", "true", entrypoint="/bin/sh").returncode != 0
    url = web.url(disks.image("vhdx-log"))
    for name in ("cdi-importer", "cdi-uploadserver", "cloner_startup.sh"):
        done = container.run("-v=2", entrypoint=f"/usr/bin/{name}", IMPORTER_ENDPOINT=url)
        pods.check(container, done, COMPLETE, disks.expected("vhdx-log"))


def test_helper_programs_of_controllers_exist(container: pods.Pod) -> None:
    """CDI runs other programs from the importer's image, too."""
    container.disk.write_bytes(bytes(4096))
    done = container.run("-image-path", "/data/disk.img", entrypoint="/usr/bin/cdi-image-size-detection")
    assert (done.returncode, container.message) == (0, "4096"), done.stderr
    arguments = ("-ns", "a", "-cron", "b", "-url", "docker://localhost:1/x")
    done = container.run(*arguments, entrypoint="/usr/bin/cdi-source-update-poller")
    assert (done.returncode, "KUBERNETES_SERVICE_HOST" in done.stderr) == (2, True)


def test_job_from_manifest_imports_disk(
    image: str, tmp_path: Path, web: servers.Web, disks: disks_module.Disks
) -> None:
    """Run the Job printed by `cdi-worker manifest` as a node would."""
    example = (repository.DATAVOLUMES / "http.yaml").read_text()
    path = tmp_path / "dv.yaml"
    path.write_text(example.replace("http://images.invalid/cirros.img", web.url(disks.image("qcow2"))))
    _, job = yaml.safe_load_all(worker.run("manifest", path, "--image", image).output)
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    env = {item["name"]: item["value"] for item in container["env"] if "value" in item}
    user = "{runAsUser}:{runAsGroup}".format(**spec["securityContext"])
    pod = pods.Pod(tmp_path / "pod", container["image"], user=user, has_scratch=True)
    pods.check(pod, pod.run(*container["args"], **env), COMPLETE, disks.expected("qcow2"))
    assert pod.disk.stat().st_size == 64 * MiB
    done = pod.run(*container["args"], **env | {"IMPORTER_CHECKSUM": f"sha256:{'0' * 64}"})
    assert (done.returncode, "checksum mismatch" in pod.message) == (5, True)


def test_disk_larger_than_memory_limit_is_imported(container: pods.Pod, tmp_path: Path) -> None:
    """The page cache counts too; the disk is one and a half times the pod's memory limit."""
    root = tmp_path / "www"
    root.mkdir()
    piece = os.urandom(MiB)
    with (root / "large.img").open("wb") as stream:
        for number in range(900):
            stream.write(number.to_bytes(8, "little") + piece[8:])
    with servers.nginx(tmp_path, root) as web:
        done = container.run(IMPORTER_ENDPOINT=web.url("large.img"))
    pods.check(container, done, COMPLETE, root / "large.img")


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[str]:
    """Serve a disk of 8 MiB at 256 KiB/s; its URL."""
    root = tmp_path / "www"
    root.mkdir()
    (root / "slow.img").write_bytes(os.urandom(8 * MiB))
    with servers.nginx(tmp_path, root, servers.Settings(limit_rate=MiB // 4)) as web:
        yield web.url("slow.img")


def test_pod_serves_metrics(container: pods.Pod, slow: str) -> None:
    port = processes.free_port()
    with container.running(f"--metrics-port={port}", port=port, env={"IMPORTER_ENDPOINT": slow}):
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with urllib.request.urlopen(f"https://127.0.0.1:{port}/metrics", context=context) as answer:
            assert 'cdi_worker_read_bytes_total{ownerUID="1-2"}' in answer.read().decode()


def test_sigterm_stops_process_1(container: pods.Pod, slow: str) -> None:
    port = processes.free_port()
    with container.running(f"--metrics-port={port}", port=port, env={"IMPORTER_ENDPOINT": slow}) as running:
        running.terminate()  # podman forwards the signal
        assert running.wait(20) == 1
    assert container.message == "Unable to process data: cancelled"
    oracle.unusable(container.disk)


def test_s3_object_is_imported(container: pods.Pod, disks: disks_module.Disks, tmp_path: Path) -> None:
    """boto3 works without the service descriptions that the image leaves out."""
    with objectservers.seaweed(tmp_path) as store:
        store.put("disk.qcow2", disks.image("qcow2").read_bytes())
        done = container.run(
            IMPORTER_SOURCE="s3",
            IMPORTER_ENDPOINT=store.url("disk.qcow2"),
            IMPORTER_ACCESS_KEY_ID=objectservers.ACCESS_KEY,
            IMPORTER_SECRET_KEY=objectservers.SECRET_KEY,
        )
    pods.check(container, done, COMPLETE, disks.expected("qcow2"))


def test_vddk_disk_is_imported(image: str, tmp_path: Path) -> None:
    """Load nbdkit's VDDK plugin and a library from another distribution, read-only and unprivileged."""
    vcsim = vmware.Vcsim(tmp_path / "vmware", 16 * MiB)
    vcsim.take_snapshot((0, os.urandom(MiB)), (9 * MiB, os.urandom(5000)))
    del vcsim.settings["log"]
    pod = pods.Pod(tmp_path / "pod", image)
    datastores = tmp_path / "vmware/datastores"
    pod.files = {datastores: str(datastores), vcsim.libdir: "/opt/vmware-vix-disklib-distrib"}
    with vcsim.running():
        done = pod.run(**vcsim.variables())
    assert done.returncode == 0, done.stderr
    assert pod.outcome["vddkInfo"]["Version"]
    oracle.same(pod.disk, vcsim.content(1))


#: Prints what the kernel says of the process, and the folders in which it may write.
PROBE = """
import json, os
fields = dict(line.split(":\\t") for line in open("/proc/self/status").read().splitlines())
names = ("Uid", "Gid", "Groups", "NoNewPrivs", "Seccomp", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
found = {name: fields[name].split() for name in names}
shown = [where for where, _, _ in os.walk("/") if not where.startswith(("/proc", "/sys", "/dev/"))]
print(json.dumps(found | {"writable": sorted(where for where in shown if os.access(where, os.W_OK))}))
"""


def test_container_is_that_of_a_restricted_namespace(container: pods.Pod) -> None:
    done = container.run("-c", PROBE, entrypoint="/usr/bin/python3")
    found = json.loads(done.stdout)
    assert {tuple(found[f"Cap{name}"]) for name in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {("0" * 16,)}
    # 2: SECCOMP_MODE_FILTER.
    assert (found["NoNewPrivs"], found["Seccomp"]) == (["1"], ["2"])
    assert (found["Uid"], found["Gid"]) == ([str(pods.USER)] * 4, ["0"] * 4)
    assert found["Groups"] == ["0", str(pods.GROUP)]
    assert found["writable"] == ["/data", "/shared"]


@pytest.mark.parametrize(
    "change",
    [
        lambda words: [each for each in words if each != "--cap-drop=ALL"],
        lambda words: [*words[:3], "--security-opt=seccomp=unconfined", *words[3:]],
        lambda words: [*words[:3], "--user=0:0", *words[3:]],
        lambda words: [*words[:1], "exec", *words[2:]],
    ],
    ids=["capabilities", "seccomp", "root", "exec"],
)
def test_container_with_more_rights_is_not_started(
    container: pods.Pod, change: Callable[[list[str]], list[str]]
) -> None:
    with pytest.raises(AssertionError, match="a container with"):
        subprocess.run(change(container.command()), check=True)


def test_container_has_limits(container: pods.Pod) -> None:
    done = container.run("-c", "print(len(bytes(500 << 20)))", entrypoint="/usr/bin/python3")
    assert done.returncode == 0, done.stderr
    done = container.run("-c", "print(len(bytearray(b'x' * (700 << 20))))", entrypoint="/usr/bin/python3")
    assert done.returncode == 137


# -- contents of the image -------------------------------------------------------------------


def test_image_has_labels_user_and_bounded_size(image: str) -> None:
    facts = json.loads(processes.run("podman", "image", "inspect", image).stdout)[0]
    assert facts["Config"]["User"] == "1001"
    assert facts["Config"]["Entrypoint"] == ["/usr/bin/cdi-worker"]
    assert facts["Labels"]["org.opencontainers.image.title"] == "cdi-worker"
    assert facts["Labels"]["org.opencontainers.image.version"] not in {"", "unknown"}
    assert re.fullmatch("[0-9a-f]{40}", facts["Labels"]["org.opencontainers.image.revision"])
    assert facts["Size"] < LARGEST * MiB


#: Modules of a single source or role are imported on use: a missing one would go unnoticed.
EVERYTHING = """
import importlib, pkgutil
import anycrc, boto3, google.cloud.storage, jsonschema, nbd, ovirt_imageio, ovirtsdk4, pyVim.connect
import cdi_worker
for module in pkgutil.walk_packages(cdi_worker.__path__, "cdi_worker."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
for service in ("s3", "sts", "sso", "sso-oidc"):
    boto3.client(service, region_name="x", aws_access_key_id="x", aws_secret_access_key="x")
"""


@pytest.mark.timeout(600)
@pytest.mark.every_platform
def test_all_modules_can_be_imported(container: pods.Pod) -> None:
    # Emulated, with the CPU of a pod, it takes minutes.
    done = container.run("-c", EVERYTHING, entrypoint="/usr/lib/cdi-worker/bin/python3", timeout=580)
    assert done.returncode == 0, done.stderr


def test_tools_are_installed(container: pods.Pod) -> None:
    for command in (
        "qemu-img --version",
        "prlimit --version",
        "setpriv --version",
        "tar --version",
    ):
        tool, argument = command.split()
        assert container.run(argument, entrypoint=f"/usr/bin/{tool}").returncode == 0
    output = container.run("vddk", "--dump-plugin", entrypoint="/usr/bin/nbdkit")
    # The plugin is installed; the library that it loads is VMware's and is not.
    assert "vddk" in output.stdout + output.stderr
    assert "cannot open plugin" not in output.stderr
