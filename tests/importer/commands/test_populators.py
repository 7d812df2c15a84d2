"""Forklift's populators, started by their names as CDI's controllers do."""

from __future__ import annotations

import hashlib
import socket
from pathlib import Path

import pytest

from tests.support import (
    devices,
    disks,
    forked,
    meters,
    misbehave,
    openstack,
    oracle,
    ovirt_disks,
    processes,
    tls,
    worker,
)

#: The first test starts the services.
pytestmark = pytest.mark.timeout(openstack.START * 2)

UID = "6a1f8a3e-77d7-4f0c-9a2b-0f7c1d1f4a11"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A folder with the links of the image."""
    script = tmp_path / "cdi-worker"
    script.write_text("from cdi_worker.importer import cli\ncli.main()\n")
    for name in ("openstack-populator", "ovirt-populator"):
        (tmp_path / name).symlink_to(script)
    return tmp_path


def secret(cloud: openstack.Cloud) -> dict[str, str]:
    """Return the Secret as Forklift writes it."""
    return {
        "authType": "password",
        "username": openstack.USER,
        "password": openstack.PASSWORD,
        "projectName": openstack.PROJECT,
        "domainName": "Default",
        "regionName": openstack.REGION,
        "cacert": cloud.authority.read_text(),
    }


def engine_secret(setup: ovirt_disks.Setup, *, insecure: bool = False) -> dict[str, str]:
    """Return the Secret of an engine as Forklift writes it."""
    access = setup.location().access
    trust = {"insecureSkipVerify": "true"} if insecure else {"cacert": Path(access.ca_files[0]).read_text()}
    return {"user": access.user, "password": access.password, **trust}


def engine_url(setup: ovirt_disks.Setup) -> str:
    """Return the URL of an engine as Forklift passes it."""
    return setup.engine.url.removesuffix("/ovirt-engine/api")


def populate(program: Path | str, env: dict[str, str], *arguments: str) -> worker.Completed:
    """Run a program of the image, or in this process a command of its name."""
    if isinstance(program, str):
        return worker.call(program, *arguments, env=env)
    argv = [worker.COMMAND[0], program, *arguments]
    done = forked.run(argv, env={**worker.ENVIRONMENT, **env}, timeout=120)
    return worker.Completed(done.returncode, done.stdout, done.stderr)


def openstack_arguments(cloud: openstack.Cloud, image: str, target: Path, size: int = 64 << 20) -> list[str]:
    return [
        f"--endpoint={cloud.public}",
        f"--image-id={image}",
        "--secret-name=cloud",
        f"--volume-path={target}",
        f"--owner-uid={UID}",
        f"--pvc-size={size}",
        "--metrics-port=0",
    ]


@pytest.mark.parametrize(("variant", "sector"), [("raw", 512), ("qcow2", 4096), ("vhdx-log", 512)])
def test_openstack_image_fills_a_device(
    cloud: openstack.Cloud, disks: disks.Disks, tmp_path: Path, program: Path, variant: str, sector: int
) -> None:
    """The device may be larger than the claim."""
    image = cloud.upload(disks.image(variant), variant.partition("-")[0])
    with devices.loop(tmp_path, 16 << 20, sector=sector) as block:
        arguments = openstack_arguments(cloud, image, block, size=1 << 20)
        done = populate(program / "openstack-populator", secret(cloud), *arguments)
        assert done.status == 0, done.errors
        oracle.same(block, disks.expected(variant), beyond=devices.DIRT)
    assert openstack.PASSWORD not in done.errors


def test_populator_does_what_an_administrator_asks_for(
    cloud: openstack.Cloud, disks: disks.Disks, tmp_path: Path
) -> None:
    image = cloud.upload(disks.image("raw"), "raw")
    target = tmp_path / "disk.img"
    env = {**secret(cloud), "CDI_WORKER_READ_BACK": "true"}
    done = populate("openstack-populator", env, *openstack_arguments(cloud, image, target))
    assert done.status == 0, done.errors
    assert f"read back sha256={hashlib.sha256(target.read_bytes()).hexdigest()}" in done.errors


@pytest.mark.parametrize("method", ["user id", "token", "credential by id", "credential by name"])
def test_every_login_of_a_secret(
    cloud: openstack.Cloud, disks: disks.Disks, tmp_path: Path, method: str
) -> None:
    """Each without what the others need, and over the internal endpoint."""
    credential = cloud.application_credential()
    project = {"projectName": openstack.PROJECT, "projectDomainID": "default"}
    own = {
        "user id": {"userID": credential["user_id"], "password": openstack.PASSWORD, **project},
        "token": {"authType": "token", "token": cloud.token(), **project},
        "credential by id": {
            "authType": "applicationcredential",
            "applicationCredentialID": credential["id"],
            "applicationCredentialSecret": credential["secret"],
        },
        "credential by name": {
            "authType": "applicationcredential",
            "applicationCredentialName": credential["name"],
            "applicationCredentialSecret": credential["secret"],
            "username": openstack.USER,
            "defaultDomain": "default",
        },
    }[method]
    env = {**own, "availability": "internal", "insecureSkipVerify": "true"}
    (tmp_path / "mnt").mkdir()
    target = tmp_path / "mnt" / "disk.img"
    arguments = openstack_arguments(cloud, cloud.upload(disks.image("raw"), "raw"), target)
    done = populate("openstack-populator", env, *arguments)
    assert done.status == 0, done.errors
    oracle.same(target, disks.raw())
    secrets = {"password", "token", "applicationCredentialSecret"} & own.keys()
    assert not [name for name in secrets if own[name] in done.errors]


def test_openstack_populator_is_started_again_after_a_failure(
    cloud: openstack.Cloud, disks: disks.Disks, tmp_path: Path
) -> None:
    (tmp_path / "mnt").mkdir()
    target = tmp_path / "mnt" / "disk.img"
    image = cloud.upload(disks.image("qcow2"), "qcow2")
    arguments = openstack_arguments(cloud, image, target)
    wrong = {**secret(cloud), "password": "wrong"}
    failed = populate("openstack-populator", wrong, *arguments)
    assert (failed.status, "login refused" in failed.errors) == (1, True)
    assert "Traceback" not in failed.errors
    for _ in range(2):
        done = populate("openstack-populator", secret(cloud), *arguments)
        assert done.status == 0, done.errors
    oracle.same(target, disks.expected("qcow2"))
    assert [path.name for path in target.parent.iterdir()] == ["disk.img"]


@pytest.mark.parametrize("variant", ["raw", "qcow2"])
def test_disk_larger_than_the_claim_is_refused(
    cloud: openstack.Cloud, disks: disks.Disks, tmp_path: Path, variant: str
) -> None:
    """The file system may have more free space than the claim asked for. Nothing is written.

    The disk does not grow into the room that the claim has for the file system, too.
    """
    (tmp_path / "mnt").mkdir()
    target = tmp_path / "mnt" / "disk.img"
    image = cloud.upload(disks.image(variant), variant.partition("-")[0])
    size = disks.expected(variant).stat().st_size
    arguments = openstack_arguments(cloud, image, target, size=size - 512)
    failed = populate("openstack-populator", secret(cloud), *arguments)
    phrase = f"virtual image size {size} is larger than the reported available storage {size - 512}"
    assert (failed.status, phrase in failed.errors) == (1, True), failed.errors
    assert list((tmp_path / "mnt").iterdir()) == []
    for room in (size, size + (1 << 20)):
        arguments = openstack_arguments(cloud, image, target, size=room)
        assert populate("openstack-populator", secret(cloud), *arguments).status == 0
        assert target.stat().st_size == size


@pytest.mark.parametrize("insecure", ["", "false", "1", "True\n"])
def test_malformed_certificate_matters_only_if_it_is_used(tmp_path: Path, insecure: str) -> None:
    """The forms of insecureSkipVerify are those of Go's ParseBool."""
    port = processes.free_port()
    arguments = [f"--endpoint=https://127.0.0.1:{port}", "--image-id=7", "--metrics-port=0"]
    env = {"username": "a", "password": "b", "cacert": "no PEM", "insecureSkipVerify": insecure}
    done = populate("openstack-populator", env, *arguments, f"--volume-path={tmp_path / 'disk.img'}")
    expected = "refused" if insecure.strip() in {"1", "True"} else "cacert of the secret: not a valid"
    assert (done.status, expected in done.errors.lower()) == (1, True), done.errors


@pytest.mark.parametrize("name", ["openstack-populator", "ovirt-populator"])
def test_advice_names_the_keys_of_the_secret(tmp_path: Path, name: str) -> None:
    authority = tls.Authority(tmp_path)
    with misbehave.Server(authority.issue()) as server:
        place = {
            "openstack-populator": ("--endpoint", "--image-id=7"),
            "ovirt-populator": ("--engine-url", "--disk-id=7"),
        }
        option, disk = place[name]
        arguments = [f"{option}={server.url('/x')}", disk, "--secret-name=cloud", "--metrics-port=0"]
        env = {"username": "a", "user": "a", "password": "b"}
        done = populate(name, env, *arguments, f"--volume-path={tmp_path / 'disk.img'}")
    said = "(cacert in the Secret cloud), or do not verify it (insecureSkipVerify in the Secret cloud)"
    assert (done.status, said in done.errors) == (1, True), done.errors


def test_missing_argument_is_reported() -> None:
    done = populate("openstack-populator", {}, "--image-id=7")
    assert done.status == 2
    assert "--endpoint" in done.errors


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("--engine-url=https://[::1", "malformed URL of the engine"),
        ("--engine-url=file:///etc", "malformed URL of the engine"),
        ("--engine-url=engine.example.org", "malformed URL of the engine"),
        ("--engine-url=https://host:99999", "malformed URL of the engine"),
        # The SDK would ask for the disk "disk", and for no disk at all.
        ("--disk-id=disk#other", "is not an oVirt id"),
        ("--disk-id=..", "is not an oVirt id"),
        ("--volume-path=-", "is not an absolute path"),
        ("--volume-path=disk.img", "is not an absolute path"),
    ],
)
def test_hostile_argument_is_refused_at_once(tmp_path: Path, argument: str, reason: str) -> None:
    arguments = ["--engine-url=https://127.0.0.1:1", "--disk-id=disk", f"--volume-path={tmp_path}/disk.img"]
    env = {"user": "me", "password": "hidden"}
    done = populate("ovirt-populator", env, *arguments, argument, "--metrics-port=0")
    assert (done.status, reason in done.errors) == (1, True), done.errors
    assert (done.output, "no data for" in done.errors) == ("", False)


@pytest.mark.parametrize("dash", ["-", "--"])
def test_arguments_without_a_command_select_the_populator(program: Path, tmp_path: Path, dash: str) -> None:
    target = f"{dash}volume-path={tmp_path / 'disk.img'}"
    own = (f"{dash}endpoint=https://cloud", f"{dash}image-id", "7")
    done = populate(program / "cdi-worker", {"authType": "kerberos"}, target, *own, "--metrics-port=0")
    assert (done.status, "authentication type 'kerberos' is not supported" in done.errors) == (1, True)
    done = populate(program / "cdi-worker", {}, target, f"{dash}disk-id=7")
    assert (done.status, "ovirt-populator" in done.errors, "--engine-url" in done.errors) == (
        2,
        True,
        True,
    )


@pytest.mark.parametrize(("insecure", "entry"), [(False, "ovirt-populator"), (True, "cdi-worker")])
def test_ovirt_disk_fills_a_file(
    ovirt_disk: ovirt_disks.Setup, tmp_path: Path, program: Path, insecure: bool, entry: str
) -> None:
    """With Forklift's controller, which names no command, the arguments say which populator it is."""
    (tmp_path / "mnt").mkdir()
    target, port = tmp_path / "mnt" / "disk.img", processes.free_port()
    env = engine_secret(ovirt_disk, insecure=insecure)
    arguments = [f"--engine-url={engine_url(ovirt_disk)}", "--disk-id=disk", f"--volume-path={target}"]
    arguments.append("--secret-name=engine")
    arguments += [f"--owner-uid={UID}", "--pvc-size=67108864", "--cr-name=a", "--cr-namespace=b"]
    done = populate(program / entry, env, *arguments, f"--metrics-port={port}")
    assert done.status == 0, done.errors
    oracle.same(target, ovirt_disk.now)
    ovirt_disk.check_ended("finished_success")


@pytest.mark.parametrize(
    ("name", "controller"), [("openstack-populator", "CDI"), ("ovirt-populator", "Forklift")]
)
def test_metrics_are_served_while_the_source_is_waited_for(
    name: str, controller: str, tmp_path: Path, program: Path
) -> None:
    """Forklift's controller names no command."""
    port = processes.free_port()
    own = {
        "openstack-populator": ["--endpoint=http://127.0.0.1:9", "--image-id=7"],
        "ovirt-populator": ["--engine-url=https://127.0.0.1:9", "--disk-id=7"],
    }[name]
    entry = program / (name if controller == "CDI" else "cdi-worker")
    # Connections are accepted by the kernel, and never answered.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        own[0] = own[0].replace(":9", f":{silent.getsockname()[1]}")
        command = [worker.COMMAND[0], entry, f"--volume-path={tmp_path / 'disk.img'}", *own]
        command += [f"--owner-uid={UID}", f"--metrics-port={port}"]
        env = {**worker.ENVIRONMENT, "username": "x", "user": "x", "password": "x"}
        with processes.running(
            command, log=tmp_path / "log", ready=lambda: processes.is_listening(port), env=env
        ):
            connecting = f'\ncdi_worker_phase{{ownerUID="{UID}",phase="connect"}} 1.0'
            # The port listens before the import begins.
            processes.wait_for(lambda: connecting in meters.scrape(port), "the phase")
            # The volume may hold what an earlier attempt has moved.
            assert "progress" not in meters.scrape(port)
