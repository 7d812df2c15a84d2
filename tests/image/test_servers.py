"""The image's servers in real containers: node pull, upload and clone."""

from __future__ import annotations

import contextlib
import http.client
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import clones, contract, oracle, pods, processes, repository, uploads
from tests.support import disks as disks_module

UPLOADED = '{"preallocationApplied":false,"message":"Upload Complete"}'


@pytest.mark.every_platform
def test_node_pull_imports_disk(
    container: pods.Pod, image: str, disks: disks_module.Disks, tmp_path: Path
) -> None:
    """Copy the server to a shared folder and run it in the image of the disk, as the controllers do."""
    copied = container.run("/usr/bin/cdi-containerimage-server", "/shared/server", entrypoint="/usr/bin/cp")
    assert copied.returncode == 0, copied.stderr
    tree = tmp_path / "tree"
    (tree / "disk").mkdir(parents=True)
    (tree / "disk/fedora.qcow2").write_bytes(disks.image("qcow2").read_bytes())
    port = processes.free_port()
    files = ["-ready-file", "/shared/ready", "-done-file", "/shared/done"]
    with pods.image_of(tree, "localhost/cdi-worker-test-disk") as name:
        disk_pod = pods.Pod(
            tmp_path / "beside",
            name,
            user="107:107",
            shared=container.shared,
            env={"KUBEVIRT_IO_FOO_BAR": "1"},
        )
        arguments = ("-p", str(port), "-image-dir", "/disk", *files)
        with disk_pod.running(*arguments, port=port, entrypoint="/shared/server") as server:
            done = container.run(
                IMPORTER_ENDPOINT=f"http://localhost:{port}/disk.img",
                IMPORTER_PULL_METHOD="node",
                IMPORTER_READY_FILE="/shared/ready",
                IMPORTER_DONE_FILE="/shared/done",
            )
            assert server.wait(20) == 0
    assert done.returncode == 0, done.stderr
    assert container.outcome["labels"] == {"kubevirt.io/foo-bar": "1"}
    oracle.same(container.disk, disks.expected("qcow2"))


# -- upload and clone ------------------------------------------------------------------------


@contextlib.contextmanager
def upload_server(
    pod: pods.Pod, certificates: uploads.Certificates
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run an upload server with its key pair mounted as a Secret; yield the process and the port."""
    authority, server = certificates.authority, certificates.server
    pod.files = {authority.certificate: "/tls/ca", server.certificate: "/tls/crt", server.key: "/tls/key"}
    for path in pod.files:
        path.chmod(0o644)
    port = processes.free_port()
    env = {
        "LISTEN_ADDRESS": "127.0.0.1",
        "LISTEN_PORT": str(port),
        "TLS_CERT_FILE": "/tls/crt",
        "TLS_KEY_FILE": "/tls/key",
        "CLIENT_CERT_FILE": "/tls/ca",
        "CLIENT_NAME": uploads.CLIENT,
        "FILESYSTEM_OVERHEAD": "0",
    }
    if pod.block is not None:
        env["DESTINATION"] = "/dev/cdi-block-volume"
    with pod.running("-v=1", port=port, entrypoint="/usr/bin/cdi-uploadserver", env=env) as running:
        yield running, port


def clone(source: pods.Pod, certificates: uploads.Certificates, port: int) -> None:
    """Run a clone source, which sends its volume to an upload server."""
    done = source.run(
        "-v=3",
        entrypoint="/usr/bin/cloner_startup.sh",
        CLIENT_KEY=certificates.client.key.read_text(),
        CLIENT_CERT=certificates.client.certificate.read_text(),
        SERVER_CA_CERT=certificates.authority.certificate.read_text(),
        UPLOAD_URL=f"https://localhost:{port}/v1beta1/upload",
        OWNER_UID="1-2",
        VOLUME_MODE="block" if source.block else "filesystem",
        MOUNT_POINT=source.device_path if source.block else "/data",
    )
    assert (done.returncode, source.message) == (0, "Clone Complete"), done.stderr


@pytest.fixture(params=[pytest.param("file", marks=pytest.mark.every_platform), "device"])
def target(request: pytest.FixtureRequest, image: str, tmp_path: Path) -> Iterator[pods.Pod]:
    """Return an upload server's pod with a volume of either mode."""
    if request.param == "file":
        yield pods.Pod(tmp_path / "target", image)
    else:
        with pods.device(tmp_path) as block:
            yield pods.Pod(tmp_path / "target", image, block=block)


def test_upload_writes_disk(
    target: pods.Pod, certificates: uploads.Certificates, disks: disks_module.Disks
) -> None:
    with upload_server(target, certificates) as (server, port):
        context = certificates.context(certificates.client)
        connection = http.client.HTTPSConnection("localhost", port, context=context, timeout=60)
        connection.request("POST", "/v1beta1/upload", disks.image("qcow2").read_bytes())
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        connection.close()
        assert server.wait(20) == 0
    pods.check(target, subprocess.CompletedProcess([], 0, "", ""), UPLOADED, disks.expected("qcow2"))


def test_clone_writes_disk(
    target: pods.Pod,
    image: str,
    tmp_path: Path,
    certificates: uploads.Certificates,
    disks: disks_module.Disks,
) -> None:
    """Clone a file-system volume to a volume of either mode."""
    source = pods.Pod(tmp_path / "source", image, user="107:107")
    original = source.data / "disk.img"
    original.write_bytes(disks.raw().read_bytes())
    original.chmod(0o660)
    os.chown(original, 0, pods.GROUP)
    with upload_server(target, certificates) as (server, port):
        clone(source, certificates, port)
        assert server.wait(20) == 0
    message = clones.DONE if target.block else clones.FOLDER_DONE
    pods.check(target, subprocess.CompletedProcess([], 0, "", ""), message, disks.raw())


def test_images_of_the_cluster_check_are_served(container: pods.Pod, image: str, tmp_path: Path) -> None:
    """The image has what deploy/check/source.py needs; TLS is as strict as Debian 13's Python wants it."""
    ports = [processes.free_port() for _ in range(2)]
    check = repository.ROOT / "deploy/check"
    source = pods.Pod(tmp_path / "source", image, files={check: "/check"})
    arguments = ("/check/source.py", "/shared", "localhost", *map(str, ports))
    with source.running(*arguments, port=ports[1], entrypoint="/usr/bin/python3"):
        certificate = container.directory / "ca.pem"
        certificate.write_bytes((source.shared / "ca.pem").read_bytes())
        container.files = {certificate: "/certs/ca.pem"}
        done = container.run(
            IMPORTER_SOURCE="registry",
            IMPORTER_ENDPOINT=f"docker://localhost:{ports[1]}/disk:1",
            IMPORTER_CERT_DIR="/certs",
        )
        pods.check(container, done, contract.COMPLETE, source.shared / "disk.raw")
    printed = source.run("manifest", "--verify", "--image=worker:1", "/check/compare.yaml")
    assert (printed.returncode, printed.stdout.count("kind: Job")) == (0, 11), printed.stderr
