"""Demanded signatures, in a pod and on the command line: exit status 7, and a message that says which."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cdi_worker.images.engine import cancelling
from cdi_worker.importer import contract
from cdi_worker.importer.roles import run
from tests.support import containers, misbehave, oracle, registries, signing, uploads, worker
from tests.support import disks as disks_module

SIGNER = signing.Signer()
STRICT = "--strict-exit-status"


@pytest.fixture
def key(tmp_path: Path) -> str:
    return SIGNER.write(tmp_path / "key.pem")


@pytest.fixture
def registry_pod(guarded: registries.Registry, pod: worker.Pod, tmp_path: Path) -> worker.Pod:
    """Return a pod that imports from the registry."""
    certs = tmp_path / "certs"
    certs.mkdir()
    assert guarded.authority
    (certs / "ca.crt").write_bytes(guarded.authority.certificate.read_bytes())
    pod.env |= {
        "IMPORTER_SOURCE": "registry",
        "IMPORTER_CERT_DIR": str(certs),
        "IMPORTER_ACCESS_KEY_ID": registries.USER,
        "IMPORTER_SECRET_KEY": registries.PASSWORD,
    }
    return pod


@pytest.fixture
def signed(guarded: registries.Registry, disks: disks_module.Disks) -> str:
    """Push an image with a signature, and return its repository."""
    image = containers.image_of(disks.raw())
    digest = guarded.push("signed", image)
    signing.attach(guarded, "signed", digest, SIGNER.simple(digest, guarded.name("signed")))
    return "signed"


@pytest.fixture
def unsigned(guarded: registries.Registry, disks: disks_module.Disks) -> str:
    """Push an image without a signature, and return its repository."""
    guarded.push("unsigned", containers.Image((containers.layer(*containers.disk(b"unsigned" * 1000)),)))
    return "unsigned"


def test_pod_imports_what_is_signed(
    guarded: registries.Registry, registry_pod: worker.Pod, disks: disks_module.Disks, key: str, signed: str
) -> None:
    env = {"CDI_WORKER_SIGNED_BY": key, "IMPORTER_ENDPOINT": guarded.reference(signed)}
    done = registry_pod.run(**env)
    assert done.status == 0, done.errors
    oracle.same(registry_pod.disk, disks.raw())
    assert "signed by='key SHA256:" in done.errors


def test_pod_refuses_what_is_not_signed(
    guarded: registries.Registry, registry_pod: worker.Pod, key: str, unsigned: str
) -> None:
    env = {"CDI_WORKER_SIGNED_BY": key, "IMPORTER_ENDPOINT": guarded.reference(unsigned)}
    done = registry_pod.call(**env)
    assert done.status == 1
    expected = f"Unable to process data: {guarded.reference(unsigned)}: signature missing: sha256:"
    assert registry_pod.message.startswith(expected)
    assert f"and {key}" in registry_pod.message
    assert not [*registry_pod.data.iterdir()]
    done = worker.call(*registry_pod.arguments, STRICT, "--retries=3", env={**registry_pod.env, **env})
    # It is final: no retry.
    assert (done.status, "retry in" in done.errors) == (7, False)


def test_pod_with_a_missing_file_imports_nothing(
    guarded: registries.Registry, registry_pod: worker.Pod, signed: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "nothing")
    env = {"CDI_WORKER_SIGNED_BY": path, "IMPORTER_ENDPOINT": guarded.reference(signed)}
    done = registry_pod.call(**env)
    assert (done.status, "no such file or directory" in registry_pod.message) == (1, True)
    assert path in registry_pod.message
    assert not [*registry_pod.data.iterdir()]


# -- a policy.json, which is not read ------------------------------------------------------------


def test_role_that_finds_a_policy_says_that_it_is_not_read(
    paths: contract.Paths, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = tmp_path / "policy.json"
    where = paths._replace(policy=str(policy))
    said = f"{policy}: is not read; demand a signature with CDI_WORKER_SIGNED_BY"
    roles = ("importer", "uploadserver", "cloner")
    assert [run.run(role, {}, where, cancelling.Cancel()) for role in roles] == [1, 1, 1]
    assert said not in caplog.messages
    policy.write_text('{"default": [{"type": "reject"}]}')
    for number, role in enumerate(roles, 1):
        assert run.run(role, {}, where, cancelling.Cancel()) == 1
        assert caplog.messages.count(said) == number


def test_policy_is_mentioned_once_however_often_the_role_is_repeated(
    paths: contract.Paths, server: misbehave.Server, tmp_path: Path,
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(run, "FIRST_WAIT", 0)
    (tmp_path / "policy.json").write_text("{}")
    where = paths._replace(policy=str(tmp_path / "policy.json"))
    env = {"IMPORTER_SOURCE": "http", "IMPORTER_ENDPOINT": server.url("/missing")}
    assert run.run("importer", env, where, cancelling.Cancel(), retries=2) == 1
    assert sum("retry in" in each for each in caplog.messages) == 2
    assert sum("policy.json" in each for each in caplog.messages) == 1


def test_default_place_of_a_policy_is_that_of_the_containers_tools() -> None:
    assert contract.Paths().policy == "/etc/containers/policy.json"


# -- sources that cannot verify ------------------------------------------------------------------


def test_http_source_refuses_a_demand(
    server: misbehave.Server, pod: worker.Pod, key: str, disks: disks_module.Disks
) -> None:
    url = server.serve("/disk", misbehave.Page(disks.raw().read_bytes()))
    done = worker.call(
        *pod.arguments, STRICT, env={**pod.env, "IMPORTER_ENDPOINT": url, "CDI_WORKER_SIGNED_BY": key}
    )
    assert done.status == 7
    assert f"{url}: signature not verifiable: source 'http': only images in a registry" in pod.message
    assert not server.requests
    assert not [*pod.data.iterdir()]


def test_node_pull_refuses_a_demand_at_once(pod: worker.Pod, key: str, tmp_path: Path) -> None:
    env = {
        "IMPORTER_ENDPOINT": "http://localhost:1/disk.img",
        "IMPORTER_PULL_METHOD": "node",
        "IMPORTER_READY_FILE": str(tmp_path / "ready"),
        "IMPORTER_DONE_FILE": str(tmp_path / "done"),
        "CDI_WORKER_SIGNED_BY": key,
    }
    done = worker.call(*pod.arguments, STRICT, env={**pod.env, **env})
    assert done.status == 7
    assert "the node pulled the image" in pod.message
    assert "pullMethod pod" in pod.message


def test_other_sources_refuse_a_demand(pod: worker.Pod, key: str) -> None:
    env = {
        "IMPORTER_IMAGE_SIZE": "1Mi",
        "IMPORTER_DISK_ID": "x",
        "IMPORTER_IMAGE_ID": "x",
        "IMPORTER_ACCESS_KEY_ID": "x",
        "IMPORTER_SECRET_KEY": "x",
        "IMPORTER_UUID": "x",
        "IMPORTER_BACKING_FILE": "[d] x/x.vmdk",
        "IMPORTER_THUMBPRINT": ":".join(["00"] * 20),
        "CDI_WORKER_SIGNED_BY": key,
    }
    for source in ("none", "s3", "gcs", "imageio", "vddk", "glance"):
        url = "gs://bucket/disk" if source == "gcs" else "https://localhost:1/bucket/disk"
        given = {**pod.env, **env, "IMPORTER_SOURCE": source, "IMPORTER_ENDPOINT": url}
        done = worker.call(*pod.arguments, STRICT, env=given)
        assert (done.status, "signature not verifiable" in pod.message) == (7, True), (source, pod.message)
        assert not [*pod.data.iterdir()]


def test_upload_server_refuses_a_demand(
    pod: worker.Pod, key: str, certificates: uploads.Certificates
) -> None:
    env = {
        "TLS_CERT_FILE": str(certificates.server.certificate),
        "TLS_KEY_FILE": str(certificates.server.key),
        "CLIENT_CERT_FILE": str(certificates.authority.certificate),
        "CLIENT_NAME": "x",
        "CDI_WORKER_SIGNED_BY": key,
    }
    done = worker.call(*pod.arguments, STRICT, env=env)
    assert (done.status, "signature not verifiable: an upload has none" in pod.message) == (7, True)


def test_populator_refuses_a_demand(key: str, tmp_path: Path) -> None:
    arguments = ["--endpoint=https://localhost:1", "--image-id=x", f"--volume-path={tmp_path}/disk.img"]
    done = worker.call(
        "openstack-populator", *arguments, "--secret-name=x", "--pvc-size=1000", "--owner-uid=x",
        "--cr-name=x", "--cr-namespace=x",
        env={"CDI_WORKER_SIGNED_BY": key, "username": "x", "password": "x"},
    )  # fmt: skip
    assert (done.status, "signature not verifiable" in done.errors) == (1, True), done.errors


# -- commands --------------------------------------------------------------------------------------


def options(guarded: registries.Registry, tmp_path: Path) -> list[str]:
    """Return the options that log in to the registry."""
    assert guarded.authority
    password = tmp_path / "password"
    password.write_text(registries.PASSWORD)
    ca = f"--ca-file={guarded.authority.certificate}"
    return [ca, f"--user={registries.USER}", f"--password-file={password}"]


def test_command_imports_and_inspects_what_is_signed(
    guarded: registries.Registry, key: str, signed: str, disks: disks_module.Disks, tmp_path: Path
) -> None:
    target = tmp_path / "disk.img"
    common = [guarded.reference(signed), *options(guarded, tmp_path), f"--signed-by={key}"]
    done = worker.call("inspect", *common, "--json")
    (found,) = json.loads(done.output)["signatures"]
    assert found["signer"].startswith("key SHA256:")
    assert found["reference"] == guarded.name(signed)
    assert "signatures" in worker.call("inspect", *common).output
    done = worker.call("import", common[0], target, *common[1:])
    assert done.status == 0, done.errors
    oracle.same(target, disks.raw())


def test_command_refuses_another_key(
    guarded: registries.Registry, signed: str, disks: disks_module.Disks, tmp_path: Path
) -> None:
    stranger = signing.Signer().write(tmp_path / "other.pem")
    target = tmp_path / "disk.img"
    login = options(guarded, tmp_path)
    for command in (("import", guarded.reference(signed), target), ("inspect", guarded.reference(signed))):
        done = worker.call(*command, *login, f"--signed-by={stranger}")
        assert done.status == 7
        assert "signature of another key: it is not by key SHA256:" in done.error_message
    assert not target.exists()
    done = worker.call(
        "import", guarded.reference(signed), target, *login, f"--signed-by={stranger}", "--json"
    )
    error = json.loads(done.output)["error"]
    assert (error["kind"], error["fault"], error["status"]) == ("Untrusted", "of another key", 7)


def test_option_in_front_of_a_command_is_refused(key: str, tmp_path: Path) -> None:
    done = worker.call(f"--signed-by={key}", "import", "docker://h/r", tmp_path / "disk.img")
    assert (done.status, "write --signed-by after the command import" in done.errors) == (2, True)


def test_local_file_refuses_a_demand(key: str, disks: disks_module.Disks, tmp_path: Path) -> None:
    done = worker.call("import", disks.raw(), tmp_path / "disk.img", env={"CDI_WORKER_SIGNED_BY": key})
    assert (done.status, "signature not verifiable" in done.errors) == (7, True)
