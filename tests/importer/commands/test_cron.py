"""The programs that CDI starts from the importer's image, by their upstream names."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import containers, misbehave, registries, tls, uploads, worker

DESIRED = "cdi.kubevirt.io/storage.import.sourceDesiredDigest"
PATH = "/apis/cdi.kubevirt.io/v1beta1/namespaces/images/dataimportcrons/fedora"
TOKEN = "token-of-the-pod"


class Cluster(http.server.ThreadingHTTPServer):
    """A minimal API server with one object; the first ``conflicts`` updates are rejected."""

    def __init__(self, directory: Path, pair: tls.KeyPair) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pair.certificate, pair.key)
        self.socket = context.wrap_socket(self.socket, server_side=True)
        self.account = directory / "account"
        self.cron: dict[str, Any] = {"metadata": {"name": "fedora", "resourceVersion": "1"}}
        self.conflicts = 0
        self.updates = 0
        #: Answers everything.
        self.odd: bytes | None = None

    @property
    def env(self) -> dict[str, str]:
        port = str(self.server_address[1])
        return {"KUBERNETES_SERVICE_HOST": "localhost", "KUBERNETES_SERVICE_PORT": port}


class Handler(http.server.BaseHTTPRequestHandler):
    server: Cluster

    def do_GET(self) -> None:
        self._answer(200)

    def do_PUT(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.conflicts:
            self.server.conflicts -= 1
            self._answer(409)
            return
        self.server.cron = body
        self.server.updates += 1
        self._answer(200)

    def _answer(self, status: int) -> None:
        allowed = self.path == PATH and self.headers["Authorization"] == f"Bearer {TOKEN}"
        data = json.dumps(self.server.cron if allowed else {}).encode()
        data = self.server.odd if allowed and self.server.odd is not None else data
        self.send_response(status if allowed else 403)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def pair(certificates: uploads.Certificates) -> tls.KeyPair:
    return certificates.authority.issue()


@pytest.fixture
def cluster(tmp_path: Path, certificates: uploads.Certificates, pair: tls.KeyPair) -> Iterator[Cluster]:
    with Cluster(tmp_path, pair) as server:
        server.account.mkdir()
        (server.account / "token").write_text(TOKEN)
        (server.account / "ca.crt").write_text(certificates.authority.certificate.read_text())
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        with contextlib.ExitStack() as stack:
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            yield server


@pytest.fixture(scope="module")
def pushed_disk(guarded: registries.Registry) -> tuple[registries.Registry, str]:
    image = containers.Image((containers.layer(*containers.disk(bytes(512))),))
    return guarded, guarded.push("cron-fedora", image)


def poll(cluster: Cluster, registry: registries.Registry, **env: str) -> worker.Completed:
    assert registry.authority
    certificates = cluster.account.parent / "certs"
    certificates.mkdir(exist_ok=True)
    (certificates / "ca.crt").write_text(registry.authority.certificate.read_text())
    keys = {"IMPORTER_ACCESS_KEY_ID": registries.USER, "IMPORTER_SECRET_KEY": registries.PASSWORD}
    arguments = ["-ns", "images", "-cron", "fedora", "-url", registry.reference("cron-fedora")]
    arguments += ["-certdir", str(certificates), "--account", str(cluster.account)]
    return worker.call("cdi-source-update-poller", *arguments, env={**cluster.env, **keys, **env})


def test_new_digest_is_requested_once(cluster: Cluster, pushed_disk: tuple[registries.Registry, str]) -> None:
    registry, digest = pushed_disk
    cluster.conflicts = 1
    assert poll(cluster, registry).output == f"wanted: {digest}\n"
    assert cluster.cron["metadata"]["annotations"] == {DESIRED: digest}
    assert poll(cluster, registry).output == f"known: {digest}\n"
    assert cluster.updates == 1


def test_imported_digest_is_not_requested_again(
    cluster: Cluster, pushed_disk: tuple[registries.Registry, str]
) -> None:
    registry, digest = pushed_disk
    cluster.cron["status"] = {"currentImportDigest": digest}
    assert poll(cluster, registry).output == f"known: {digest}\n"
    assert cluster.updates == 0


def test_missing_permission_is_reported(
    cluster: Cluster, pushed_disk: tuple[registries.Registry, str]
) -> None:
    (cluster.account / "token").write_text("another")
    done = poll(cluster, pushed_disk[0])
    assert (done.status, "403" in done.error_message) == (3, True)
    assert "another" not in done.errors


def test_advice_names_the_field_of_the_cron(
    cluster: Cluster, pushed_disk: tuple[registries.Registry, str]
) -> None:
    url = pushed_disk[0].reference("cron-fedora")
    done = watch(cluster, url)
    assert "(spec.template.spec.source.registry.certConfigMap), or" in done.errors
    assert "do not verify it (insecureRegistries in the configuration of CDI)" in done.errors
    assert (done.status, "--ca-file" in done.errors) == (3, False)


def test_advice_names_what_a_cronjob_sets(cluster: Cluster, tmp_path: Path) -> None:
    with misbehave.Server(tls.Authority(tmp_path / "another").issue()) as server:
        done = watch(cluster, server.url("/disk"))
    assert "(-certdir), or do not verify it (INSECURE_TLS)" in done.errors
    assert (done.status, "--ca-file" in done.errors) == (3, False)


def watch(cluster: Cluster, url: str, *arguments: str) -> worker.Completed:
    """Run the poller for a disk that is not in a registry."""
    common = ["-ns", "images", "-cron", "fedora", "--account", str(cluster.account), "-url", url]
    return worker.call("cdi-source-update-poller", *common, *arguments, env=cluster.env)


def test_file_on_a_web_server_is_watched_by_its_etag(cluster: Cluster, server: misbehave.Server) -> None:
    """CDI's controller takes only digests that begin with sha256: (``createDvName``)."""
    url = server.serve("/disk", misbehave.Page(bytes(512), etag='"one"'))
    assert watch(cluster, url).output == 'wanted: etag:"one"\n'
    first = cluster.cron["metadata"]["annotations"][DESIRED]
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", first)
    assert watch(cluster, url).output == 'known: etag:"one"\n'
    server.serve("/disk", misbehave.Page(bytes(512), etag='"two"'))
    assert watch(cluster, url).output == 'wanted: etag:"two"\n'
    assert cluster.cron["metadata"]["annotations"][DESIRED] != first
    assert cluster.updates == 2


def test_line_of_a_checksum_file_is_watched(cluster: Cluster, server: misbehave.Server) -> None:
    url = server.serve("/f/disk.qcow2", misbehave.Page(bytes(512), etag=None))
    sums = server.serve("/f/SHA256SUMS", misbehave.Page(f"{'a' * 64}  disk.qcow2\n".encode()))
    assert watch(cluster, url, f"--checksum-file={sums}").output == f"wanted: sha256:{'a' * 64}\n"
    assert cluster.cron["metadata"]["annotations"][DESIRED] == f"sha256:{'a' * 64}"
    assert not server.gets("/f/disk.qcow2")


GOOD = {"metadata": {"name": "fedora", "resourceVersion": "1"}}


ANSWERS = (
    b"[]",
    b"7",
    b"null",
    b"{}",
    b"<html>",
    b'{"metadata": []}',
    b'{"metadata": {"name": "another"}}',
    json.dumps({"metadata": {**GOOD["metadata"], "annotations": "none"}}).encode(),
    json.dumps({**GOOD, "status": [1]}).encode(),
    b"[" * 100_000,
    b" " * (5 << 20),
)


def test_answer_that_is_not_a_cron_is_reported(cluster: Cluster, server: misbehave.Server) -> None:
    url = server.serve("/disk", misbehave.Page(bytes(512)))
    for cluster.odd in ANSWERS:
        done = watch(cluster, url)
        assert (done.status, "the answer is not the DataImportCron" in done.error_message) == (3, True)
    assert cluster.updates == 0


def test_absent_fields_are_added(cluster: Cluster, server: misbehave.Server) -> None:
    """Kubernetes leaves empty maps out; others write null."""
    cluster.cron = {"metadata": {**GOOD["metadata"], "annotations": None}, "status": None}
    assert watch(cluster, server.serve("/disk", misbehave.Page(bytes(512)))).status == 0
    assert list(cluster.cron["metadata"]["annotations"]) == [DESIRED]


def test_missing_cluster_is_reported(cluster: Cluster, pushed_disk: tuple[registries.Registry, str]) -> None:
    done = poll(cluster, pushed_disk[0], KUBERNETES_SERVICE_HOST="")
    assert (done.status, "KUBERNETES_SERVICE_HOST" in done.error_message) == (2, True)


def test_size_of_disk_is_reported(tmp_path: Path) -> None:
    """The program is called by its name, as in the image: a link."""
    disk, log = tmp_path / "disk.img", tmp_path / "log"
    disk.write_bytes(b"QFI\xfb" + bytes(4096 - 4))
    program = tmp_path / "cdi-image-size-detection"
    script = tmp_path / "cdi-worker"
    script.write_text("from cdi_worker.importer import cli\ncli.main()\n")
    program.symlink_to(script)
    command = [worker.COMMAND[0], program, "-image-path", disk, f"--termination-log={log}"]
    subprocess.run(command, env=worker.ENVIRONMENT, check=True)
    assert log.read_text() == "4096"


def test_size_of_other_file_is_an_error(tmp_path: Path) -> None:
    done = worker.call("cdi-image-size-detection", "-image-path", tmp_path / "none")
    assert (done.status, "no such file" in done.error_message) == (6, True)


def test_size_that_cannot_be_reported_is_a_failure(tmp_path: Path) -> None:
    """The controller would read an empty message as the size, for ever."""
    disk = tmp_path / "disk.img"
    disk.write_bytes(bytes(4096))
    done = worker.call("cdi-image-size-detection", "-image-path", disk, "--termination-log=/dev/full")
    assert (done.status, "cannot write the termination message" in done.errors) == (1, True)


def test_size_of_a_device_is_its_capacity(device: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    done = worker.call("cdi-image-size-detection", "-image-path", device, f"--termination-log={log}")
    assert (done.status, log.read_text()) == (0, str(16 << 20))


def test_size_of_what_is_not_a_disk_is_an_error(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, reason in ((tmp_path, "is a directory"), (pipe, "illegal seek")):
        done = worker.call("cdi-image-size-detection", "-image-path", path)
        assert (done.status, reason in done.error_message) == (6, True), done.errors
