"""The image in real containers: every role, as a user without rights, with a pod's limits.

Run by `make test-image`, which builds the image; `make test` leaves this file out.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests import devices, objectservers, oracle, pods, processes, servers, uploads, vmware, worker
from tests import disks as disks_module

MiB = 1 << 20
COMPLETE = '{"scratchSpaceRequired":false,"preallocationApplied":false,"message":"Import Complete"}'
UPLOADED = '{"preallocationApplied":false,"message":"Upload Complete"}'
CLONED = '{"preallocationApplied":false,"message":"Clone Complete"}'
#: Unpacked, in MiB: what docs/image.md says, and a little.
LARGEST = 300


@pytest.fixture
def image(request: pytest.FixtureRequest) -> str:
    name = request.config.getoption("--image")
    if name is None:
        pytest.skip("needs --image")
    return str(name)


@pytest.fixture
def pod(image: str, tmp_path: Path) -> pods.Pod:
    return pods.Pod(
        tmp_path / "pod",
        image,
        env={"IMPORTER_SOURCE": "http", "FILESYSTEM_OVERHEAD": "0", "OWNER_UID": "1-2"},
    )


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Path]:
    with devices.loop(tmp_path, 16 * MiB) as made:
        before = made.stat()
        # As the kubelet's runtime does (device_ownership_from_security_context).
        os.chown(made, 1001, 1001)
        yield made
        os.chown(made, before.st_uid, before.st_gid)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> uploads.Certificates:
    return uploads.certificates(tmp_path_factory.mktemp("certificates"))


def check(pod: pods.Pod, done: subprocess.CompletedProcess[str], message: str, expected: Path) -> None:
    assert (done.returncode, pod.message) == (0, message), done.stderr
    assert "Traceback" not in done.stderr
    oracle.same(pod.disk, expected, beyond=devices.DIRT if pod.block else b"\0")


# -- the importer ----------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["raw", "qcow2", "vhdx"])  # ranges, our reader, qemu-img
def test_import_to_a_file(pod: pods.Pod, web: servers.Web, disks: disks_module.Disks, variant: str) -> None:
    done = pod.run("-v=3", "-alsologtostderr", IMPORTER_ENDPOINT=web.url(disks.image(variant)))
    check(pod, done, COMPLETE, disks.expected(variant))


@pytest.mark.parametrize("variant", ["qcow2", "vhdx"])
def test_import_to_a_device(
    pod: pods.Pod, web: servers.Web, disks: disks_module.Disks, device: Path, variant: str
) -> None:
    pod.block = device
    done = pod.run(IMPORTER_ENDPOINT=web.url(disks.image(variant)))
    check(pod, done, COMPLETE, disks.expected(variant))


def test_import_through_scratch_and_xz(pod: pods.Pod, web: servers.Web, disks: disks_module.Disks) -> None:
    pod.has_scratch = True
    done = pod.run(IMPORTER_ENDPOINT=web.url(disks.wrapped("vhdx", "xz")))
    check(pod, done, COMPLETE, disks.expected("vhdx"))
    assert not [*pod.scratch.iterdir()]


@pytest.mark.parametrize("user", ["107:107", "65534:4242", "1000660000:0"])
def test_any_user(image: str, tmp_path: Path, web: servers.Web, disks: disks_module.Disks, user: str) -> None:
    pod = pods.Pod(tmp_path / "pod", image, user=user, env={"IMPORTER_SOURCE": "http"})
    done = pod.run(IMPORTER_ENDPOINT=web.url(disks.image("vhdx")))
    check(pod, done, COMPLETE, disks.expected("vhdx"))
    assert disks.expected("vhdx").stat().st_size == pod.disk.stat().st_size


def test_a_volume_over_opt(
    pod: pods.Pod, tmp_path: Path, web: servers.Web, disks: disks_module.Disks
) -> None:
    """CDI's controllers mount the volume with VMware's library over all of it."""
    (tmp_path / "opt").mkdir()
    pod.files = {tmp_path / "opt": "/opt"}
    done = pod.run(IMPORTER_ENDPOINT=web.url(disks.image("vhdx")))
    check(pod, done, COMPLETE, disks.expected("vhdx"))


def test_names_of_upstream_and_no_shell(pod: pods.Pod, web: servers.Web, disks: disks_module.Disks) -> None:
    pod.files = {Path("/dev/null"): "/usr/bin/dash"}
    assert pod.run("-c", "true", entrypoint="/bin/sh").returncode != 0
    url = web.url(disks.image("vhdx"))
    for name in ("cdi-importer", "cdi-uploadserver", "cloner_startup.sh"):
        done = pod.run("-v=2", entrypoint=f"/usr/bin/{name}", IMPORTER_ENDPOINT=url)
        check(pod, done, COMPLETE, disks.expected("vhdx"))


def test_helpers_of_controllers(pod: pods.Pod) -> None:
    """What CDI starts from the importer's image besides imports."""
    pod.disk.write_bytes(bytes(4096))
    done = pod.run("-image-path", "/data/disk.img", entrypoint="/usr/bin/cdi-image-size-detection")
    assert (done.returncode, pod.message) == (0, "4096"), done.stderr
    wanted = ("-ns", "a", "-cron", "b", "-url", "docker://localhost:1/x")
    done = pod.run(*wanted, entrypoint="/usr/bin/cdi-source-update-poller")
    assert (done.returncode, "KUBERNETES_SERVICE_HOST" in done.stderr) == (2, True)


def test_job_of_a_manifest(image: str, tmp_path: Path, web: servers.Web, disks: disks_module.Disks) -> None:
    """What `cdi-worker manifest` prints, as a node would run it."""
    example = (worker.ROOT / "tests/datavolumes/http.yaml").read_text()
    path = tmp_path / "dv.yaml"
    path.write_text(example.replace("http://images.invalid/cirros.img", web.url(disks.image("qcow2"))))
    _, job = yaml.safe_load_all(worker.run("manifest", path, "--image", image).output)
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    env = {item["name"]: item["value"] for item in container["env"] if "value" in item}
    user = "{runAsUser}:{runAsGroup}".format(**spec["securityContext"])
    pod = pods.Pod(tmp_path / "pod", container["image"], user=user, has_scratch=True)
    check(pod, pod.run(*container["args"], **env), COMPLETE, disks.expected("qcow2"))
    assert pod.disk.stat().st_size == 64 * MiB
    done = pod.run(*container["args"], **env | {"IMPORTER_CHECKSUM": f"sha256:{'0' * 64}"})
    assert (done.returncode, "checksum mismatch" in pod.message) == (5, True)


def test_more_than_the_memory(pod: pods.Pod, tmp_path: Path) -> None:
    """The page cache counts too; the disk is one and a half times what the pod has."""
    root = tmp_path / "www"
    root.mkdir()
    piece = os.urandom(MiB)
    with (root / "large.img").open("wb") as stream:
        for number in range(900):
            stream.write(number.to_bytes(8, "little") + piece[8:])
    with servers.nginx(tmp_path, root) as web:
        done = pod.run(IMPORTER_ENDPOINT=web.url("large.img"))
    check(pod, done, COMPLETE, root / "large.img")


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[str]:
    """Serve a disk of 8 MiB for some seconds; its URL."""
    root = tmp_path / "www"
    root.mkdir()
    (root / "slow.img").write_bytes(os.urandom(8 * MiB))
    with servers.nginx(tmp_path, root, servers.Settings(limit_rate=MiB // 4)) as web:
        yield web.url("slow.img")


def test_metrics_of_a_pod(pod: pods.Pod, slow: str) -> None:
    port = processes.free_port()
    with pod.running(f"--metrics-port={port}", port=port, env={"IMPORTER_ENDPOINT": slow}):
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with urllib.request.urlopen(f"https://127.0.0.1:{port}/metrics", context=context) as answer:
            assert 'kubevirt_cdi_import_progress_total{ownerUID="1-2"}' in answer.read().decode()


def test_stopped_as_process_1(pod: pods.Pod, slow: str) -> None:
    port = processes.free_port()
    with pod.running(f"--metrics-port={port}", port=port, env={"IMPORTER_ENDPOINT": slow}) as running:
        running.terminate()  # podman hands it on
        assert running.wait(20) == 1
    assert pod.message == "Unable to process data: cancelled"
    oracle.unusable(pod.disk)


def test_s3(pod: pods.Pod, disks: disks_module.Disks, tmp_path: Path) -> None:
    """Amazon's library, without the descriptions that the image leaves out."""
    with objectservers.seaweed(tmp_path) as store:
        store.put("disk.qcow2", disks.image("qcow2").read_bytes())
        done = pod.run(
            IMPORTER_SOURCE="s3",
            IMPORTER_ENDPOINT=store.url("disk.qcow2"),
            IMPORTER_ACCESS_KEY_ID=objectservers.ACCESS_KEY,
            IMPORTER_SECRET_KEY=objectservers.SECRET_KEY,
        )
    check(pod, done, COMPLETE, disks.expected("qcow2"))


def test_vddk(image: str, tmp_path: Path) -> None:
    """Nbdkit's plugin and a library of another system's, where nothing else is allowed."""
    estate = vmware.Estate(tmp_path / "vmware", 16 * MiB)
    estate.take((0, os.urandom(MiB)), (9 * MiB, os.urandom(5000)))
    del estate.settings["log"]
    pod = pods.Pod(tmp_path / "pod", image)
    datastores = tmp_path / "vmware/datastores"
    pod.files = {datastores: str(datastores), estate.libdir: "/opt/vmware-vix-disklib-distrib"}
    with estate.running():
        done = pod.run(
            IMPORTER_SOURCE="vddk",
            IMPORTER_ENDPOINT=f"https://localhost:{estate.port}/sdk",
            IMPORTER_UUID=vmware.INSTANCE_UUID,
            IMPORTER_BACKING_FILE=estate.file(0),
            IMPORTER_THUMBPRINT=estate.thumbprint,
            IMPORTER_ACCESS_KEY_ID=vmware.USER,
            IMPORTER_SECRET_KEY=vmware.PASSWORD,
        )
    assert done.returncode == 0, done.stderr
    assert pod.told["vddkInfo"]["Version"]
    oracle.same(pod.disk, estate.content(1))


# -- node pull -------------------------------------------------------------------------------


def test_node_pull(pod: pods.Pod, image: str, disks: disks_module.Disks, tmp_path: Path) -> None:
    """What the controllers do: copy the server to a shared folder, run it in the image of the disk."""
    copied = pod.run("/usr/bin/cdi-containerimage-server", "/shared/server", entrypoint="/usr/bin/cp")
    assert copied.returncode == 0, copied.stderr
    tree = tmp_path / "tree"
    (tree / "disk").mkdir(parents=True)
    (tree / "disk/fedora.qcow2").write_bytes(disks.image("qcow2").read_bytes())
    port = processes.free_port()
    files = ["-ready-file", "/shared/ready", "-done-file", "/shared/done"]
    with pods.image_of(tree, "localhost/cdi-worker-test-disk") as name:
        beside = pods.Pod(
            tmp_path / "beside", name, user="107:1001", shared=pod.shared, env={"KUBEVIRT_IO_FOO_BAR": "1"}
        )
        arguments = ("-p", str(port), "-image-dir", "/disk", *files)
        with beside.running(*arguments, port=port, entrypoint="/shared/server") as server:
            done = pod.run(
                IMPORTER_ENDPOINT=f"http://localhost:{port}/disk.img",
                IMPORTER_PULL_METHOD="node",
                IMPORTER_READY_FILE="/shared/ready",
                IMPORTER_DONE_FILE="/shared/done",
            )
            assert server.wait(20) == 0
    assert done.returncode == 0, done.stderr
    assert pod.told["labels"] == {"kubevirt.io/foo-bar": "1"}
    oracle.same(pod.disk, disks.expected("qcow2"))


# -- upload and clone ------------------------------------------------------------------------


def receiver(pod: pods.Pod, certificates: uploads.Certificates, port: int) -> dict[str, str]:
    """Return the environment of an upload server, whose key pair is mounted as a secret."""
    authority, server = certificates.authority, certificates.server
    pod.files = {authority.certificate: "/tls/ca", server.certificate: "/tls/crt", server.key: "/tls/key"}
    for path in pod.files:
        path.chmod(0o644)
    return {
        "LISTEN_ADDRESS": "127.0.0.1",
        "LISTEN_PORT": str(port),
        "TLS_CERT_FILE": "/tls/crt",
        "TLS_KEY_FILE": "/tls/key",
        "CLIENT_CERT_FILE": "/tls/ca",
        "CLIENT_NAME": uploads.CLIENT,
        "FILESYSTEM_OVERHEAD": "0",
    }


@pytest.mark.parametrize("kind", ["file", "device"])
def test_upload(
    image: str,
    tmp_path: Path,
    certificates: uploads.Certificates,
    disks: disks_module.Disks,
    device: Path,
    kind: str,
) -> None:
    pod = pods.Pod(tmp_path / "pod", image, block=device if kind == "device" else None)
    port = processes.free_port()
    env = receiver(pod, certificates, port)
    if kind == "device":
        env["DESTINATION"] = "/dev/cdi-block-volume"
    with pod.running("-v=1", port=port, entrypoint="/usr/bin/cdi-uploadserver", env=env) as server:
        context = certificates.context(certificates.client)
        connection = http.client.HTTPSConnection("localhost", port, context=context, timeout=60)
        connection.request("POST", "/v1beta1/upload", disks.image("qcow2").read_bytes())
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        connection.close()
        assert server.wait(20) == 0
    check(pod, subprocess.CompletedProcess([], 0, "", ""), UPLOADED, disks.expected("qcow2"))


@pytest.mark.parametrize("kind", ["file", "device"])
def test_clone(
    image: str,
    tmp_path: Path,
    certificates: uploads.Certificates,
    disks: disks_module.Disks,
    device: Path,
    kind: str,
) -> None:
    """From a file-system volume to a volume of either kind."""
    target = pods.Pod(tmp_path / "target", image, block=device if kind == "device" else None)
    source = pods.Pod(tmp_path / "source", image)
    original = source.data / "disk.img"
    original.write_bytes(disks.raw().read_bytes())
    original.chmod(0o660)
    os.chown(original, 0, 1001)
    port = processes.free_port()
    env = receiver(target, certificates, port)
    if kind == "device":
        env["DESTINATION"] = "/dev/cdi-block-volume"
    with target.running("-v=1", port=port, entrypoint="/usr/bin/cdi-uploadserver", env=env) as server:
        done = source.run(
            "-v=3",
            entrypoint="/usr/bin/cloner_startup.sh",
            CLIENT_KEY=certificates.client.key.read_text(),
            CLIENT_CERT=certificates.client.certificate.read_text(),
            SERVER_CA_CERT=certificates.authority.certificate.read_text(),
            UPLOAD_URL=f"https://localhost:{port}/v1beta1/upload",
            OWNER_UID="1-2",
            VOLUME_MODE="filesystem",
            MOUNT_POINT="/data",
        )
        assert (done.returncode, source.message) == (0, "Clone Complete"), done.stderr
        assert server.wait(20) == 0
    check(target, subprocess.CompletedProcess([], 0, "", ""), CLONED, disks.raw())


def test_the_limits_are_real(pod: pods.Pod) -> None:
    done = pod.run("-c", "print(len(bytes(500 << 20)))", entrypoint="/usr/bin/python3")
    assert done.returncode == 0, done.stderr
    done = pod.run("-c", "print(len(bytearray(b'x' * (700 << 20))))", entrypoint="/usr/bin/python3")
    assert done.returncode == 137
    for place in ("/data/x", "/tmp/x", "/opt/x"):
        done = pod.run("-c", f"open({place!r}, 'w')", entrypoint="/usr/bin/python3")
        assert (done.returncode == 0) == (place == "/data/x"), done.stderr


# -- what is in it ---------------------------------------------------------------------------


def test_labels_user_and_size(image: str) -> None:
    facts = json.loads(processes.run("podman", "image", "inspect", image).stdout)[0]
    assert facts["Config"]["User"] == "1001"
    assert facts["Config"]["Entrypoint"] == ["/usr/bin/cdi-worker"]
    assert facts["Labels"]["org.opencontainers.image.title"] == "cdi-worker"
    assert facts["Labels"]["org.opencontainers.image.version"] not in {"", "unknown"}
    assert facts["Size"] < LARGEST * MiB


#: What only one source or role needs is imported when it is used: nothing else would notice.
EVERYTHING = """
import importlib, pkgutil
import boto3, google.cloud.storage, google_crc32c, nbd, ovirt_imageio, ovirtsdk4, pyVim.connect
for name in ("importer", "sources", "formats", "images", "scratch"):
    for module in pkgutil.iter_modules(importlib.import_module(name).__path__, f"{name}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
for service in ("s3", "sts", "sso", "sso-oidc"):
    boto3.client(service, region_name="x", aws_access_key_id="x", aws_secret_access_key="x")
"""


def test_everything_can_be_imported(pod: pods.Pod) -> None:
    done = pod.run("-c", EVERYTHING, entrypoint="/usr/lib/cdi-worker/bin/python3")
    assert done.returncode == 0, done.stderr


def test_tools_are_there(pod: pods.Pod) -> None:
    for command in (
        "qemu-img --version",
        "xz --version",
        "prlimit --version",
        "setpriv --version",
        "tar --version",
    ):
        tool, argument = command.split()
        assert pod.run(argument, entrypoint=f"/usr/bin/{tool}").returncode == 0
    told = pod.run("vddk", "--dump-plugin", entrypoint="/usr/bin/nbdkit")
    # The plugin is there; the library that it loads is VMware's, and is not.
    assert "vddk" in told.stdout + told.stderr
    assert "cannot open plugin" not in told.stderr
