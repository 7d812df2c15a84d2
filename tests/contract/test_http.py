"""The contract of the http source: credentials, headers, certificates, proxies, node pull."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import disks as disks_module
from tests.support import misbehave, oracle, processes, proxy, tls, worker

MiB = 1 << 20
COMPLETE = {"scratchSpaceRequired": False, "preallocationApplied": False, "message": "Import Complete"}


@pytest.fixture
def authority(tmp_path: Path) -> tls.Authority:
    return tls.Authority(tmp_path / "ca")


def page(disks: disks_module.Disks, **faults: str) -> misbehave.Page:
    return misbehave.Page(disks.raw().read_bytes(), **faults)


def mounted(directory: Path, files: dict[str, str]) -> Path:
    """Create files as Kubernetes mounts a Secret: links to ``..data``, itself a link."""
    real = directory / "..2026_11_20"
    real.mkdir(parents=True)
    (directory / "..data").symlink_to(real.name)
    for name, text in files.items():
        (real / name).write_text(text)
        (directory / name).symlink_to(f"..data/{name}")
    return directory


def check_done(pod: worker.Pod, done: worker.Completed, disks: disks_module.Disks) -> None:
    assert done.status == 0, done.errors
    assert pod.outcome == COMPLETE
    oracle.same(pod.disk, disks.raw())


def test_basic_auth_is_sent(pod: worker.Pod, server: misbehave.Server, disks: disks_module.Disks) -> None:
    url = server.serve("/disk", page(disks, password="me:s3cret"))
    keys = {"IMPORTER_ACCESS_KEY_ID": "me", "IMPORTER_SECRET_KEY": "s3cret"}
    check_done(pod, pod.call(IMPORTER_ENDPOINT=url, **keys), disks)
    pod.disk.unlink()
    done = pod.call(IMPORTER_ENDPOINT=url, IMPORTER_ACCESS_KEY_ID="me", IMPORTER_SECRET_KEY="wr0ng")
    assert (done.status, "401" in pod.message) == (1, True)
    assert "wr0ng" not in pod.message + done.errors + done.output


def test_extra_headers_are_sent(pod: worker.Pod, server: misbehave.Server, disks: disks_module.Disks) -> None:
    mounted(pod.headers / "first", {"secret": "X-Secret: s3cret\n"})
    mounted(pod.headers, {"plain": "X-Plain: of a file"})
    url = server.serve("/disk", page(disks))
    env = {"IMPORTER_EXTRA_HEADER_0": "X-Zero: 0", "IMPORTER_EXTRA_HEADER_1": "X-One: a: b"}
    done = pod.call(IMPORTER_ENDPOINT=url, **env)
    check_done(pod, done, disks)
    for request in server.requests:
        found = {name: value for name, value in request.headers.items() if name.startswith("x-")}
        assert found == {"x-secret": "s3cret", "x-plain": "of a file", "x-zero": "0", "x-one": "a: b"}
        assert request.headers["user-agent"].startswith("cdi-worker")
    assert "s3cret" not in done.errors + done.output


def test_secrets_are_sent_to_the_origin_only(
    pod: worker.Pod, server: misbehave.Server, disks: disks_module.Disks
) -> None:
    with misbehave.Server() as other:
        start = server.serve("/disk", misbehave.Page(to=(other.serve("/disk", page(disks)),)))
        env = {"IMPORTER_ACCESS_KEY_ID": "me", "IMPORTER_SECRET_KEY": "s3cret"}
        done = pod.call(IMPORTER_ENDPOINT=start, IMPORTER_EXTRA_HEADER_0="X-Token: hush", **env)
        check_done(pod, done, disks)
        assert {"authorization", "x-token"} <= {*server.requests[0].headers}
        assert all(not {"authorization", "x-token"} & {*request.headers} for request in other.requests)


def test_mounted_certificates_are_trusted(
    pod: worker.Pod, authority: tls.Authority, disks: disks_module.Disks, tmp_path: Path
) -> None:
    files = {"ca.crt": authority.certificate.read_text(), "README": "not all that is mounted is PEM"}
    trusted = mounted(tmp_path / "certs", files)
    with misbehave.Server(authority.issue()) as server:
        url = server.serve("/disk", page(disks))
        check_done(pod, pod.call(IMPORTER_ENDPOINT=url, IMPORTER_CERT_DIR=str(trusted)), disks)
        pod.disk.unlink()
        check_done(pod, pod.call(IMPORTER_ENDPOINT=url, INSECURE_TLS="true"), disks)
        pod.disk.unlink()
        assert pod.call(IMPORTER_ENDPOINT=url, INSECURE_TLS="false").status == 1
        assert pod.message.startswith("Unable to connect to http data source: ")
        assert "certificate" in pod.message


@pytest.mark.parametrize("upper", [False, True])
def test_proxies_are_used(
    pod: worker.Pod, authority: tls.Authority, disks: disks_module.Disks, tmp_path: Path, upper: bool
) -> None:
    middle = tls.Authority(tmp_path / "middle", "Proxy CA")
    trusted = mounted(tmp_path / "proxycerts", {"tls.crt": middle.certificate.read_text()})
    names = ["http_proxy", "https_proxy", "no_proxy"]
    with (
        misbehave.Server(authority.issue()) as server,
        proxy.Proxy(authority=middle, password="me:s3cret") as between,
    ):
        server.serve("/disk", page(disks))
        url = server.url("/disk", host=tls.FAR)
        env = dict(zip(names, ["", between.url, "elsewhere.example"], strict=True))
        env = {name.upper() if upper else name: value for name, value in env.items()}
        done = pod.call(IMPORTER_ENDPOINT=url, IMPORTER_PROXY_CERT_DIR=str(trusted), **env)
        check_done(pod, done, disks)
        assert between.requests
        assert "s3cret" not in done.errors


def test_no_proxy_is_honoured(pod: worker.Pod, server: misbehave.Server, disks: disks_module.Disks) -> None:
    with proxy.Proxy() as between:
        url = server.serve("/disk", page(disks))
        far = server.url("/disk", host=tls.FAR)
        # Without a scheme, as many set it.
        env = {"http_proxy": between.url.removeprefix("http://"), "https_proxy": "", "no_proxy": "*.svc"}
        check_done(pod, pod.call(IMPORTER_ENDPOINT=url, **env), disks)
        assert not between.requests
        pod.disk.unlink()
        check_done(pod, pod.call(IMPORTER_ENDPOINT=far, **env), disks)
        assert between.requests
        pod.disk.unlink()
        # The name does not resolve without the proxy.
        assert pod.call(IMPORTER_ENDPOINT=far, **{**env, "no_proxy": "*.test"}).status == 1
        assert "unknown host; check the name of the host" in pod.message


def test_node_pull_imports_disk_and_labels(
    pod: worker.Pod, server: misbehave.Server, disks: disks_module.Disks, tmp_path: Path
) -> None:
    ready, finished = tmp_path / "ready", tmp_path / "done"
    env = {
        "IMPORTER_PULL_METHOD": "node",
        "IMPORTER_READY_FILE": str(ready),
        "IMPORTER_DONE_FILE": str(finished),
        "IMPORTER_ENDPOINT": server.url("/disk.img"),
    }
    variables = ["PATH=/bin", "KUBEVIRT_IO_FOO_BAR=1", "INSTANCETYPE_KUBEVIRT_IO_DEFAULT_PREFERENCE=fedora"]
    server.serve("/info", misbehave.Page(json.dumps({"env": variables}).encode()))
    server.serve("/fedora%20disk.raw", page(disks))
    with worker.started(*pod.arguments, env={**pod.env, **env}) as process:
        while_waiting = tmp_path / "ready.unfinished"
        while_waiting.write_text("fedora disk.raw")
        assert process.poll() is None
        assert not server.requests
        while_waiting.rename(ready)
        assert process.wait(30) == 0
    processes.wait_for(finished.exists, "the done file")
    labels = {"kubevirt.io/foo-bar": "1", "instancetype.kubevirt.io/default-preference": "fedora"}
    assert pod.outcome == {**COMPLETE, "labels": labels}
    oracle.same(pod.disk, disks.raw())


@pytest.mark.parametrize("ready", [False, True])
def test_failed_node_pull_is_reported(
    pod: worker.Pod, server: misbehave.Server, disks: disks_module.Disks, tmp_path: Path, ready: bool
) -> None:
    """The server is stopped before the ready file appears or later; without it the next attempt fails."""
    env = {
        "IMPORTER_PULL_METHOD": "node",
        "IMPORTER_READY_FILE": str(tmp_path / "ready"),
        "IMPORTER_DONE_FILE": str(tmp_path / "done"),
        "IMPORTER_ENDPOINT": server.url("/disk.img"),
    }
    server.serve("/fedora.raw", page(disks, stall=100_000))
    if ready:
        (tmp_path / "ready").write_text("fedora.raw")
    with worker.started(*pod.arguments, env={**pod.env, **env}) as process:
        assert process.stderr is not None
        assert any("waiting for the disk's server" in line for line in process.stderr)
        if ready:
            processes.wait_for(lambda: server.sent("/fedora.raw"), "the stall")
        process.terminate()
        assert process.wait(20) == 1
    assert pod.message == "Unable to process data: cancelled"
    assert not (tmp_path / "done").exists()
    oracle.unusable(pod.disk)
