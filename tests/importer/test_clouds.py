"""The variables of each cloud's own tools, on the command line."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import click
import pytest

from cdi_worker import sources
from cdi_worker.importer.commands import import_, options
from tests.support import containers, objectservers, openstack, oracle, registries, worker
from tests.support import disks as disks_module

SOURCE = 3


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "--endpoint-url"])
def test_variables_of_aws(
    seaweed: objectservers.Store, disks: disks_module.Disks, tmp_path: Path, name: str
) -> None:
    seaweed.put("a disk/+.qcow2", disks.image("qcow2").read_bytes())
    key, secret = objectservers.READER
    env = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret, "AWS_REGION": "eu-west-1"}
    server = seaweed.endpoint()
    given = (f"{name}={server}",) if name.startswith("--") else ()
    env |= {} if given else {"AWS_ENDPOINT_URL": "http://127.0.0.1:1", name: server}
    done = worker.run("import", seaweed.uri("a disk/+.qcow2"), tmp_path, *given, env=env)
    assert done.status == 0, done.errors
    oracle.same(tmp_path / "disk.img", disks.expected("qcow2"))


def test_certificates_of_aws(seaweed: objectservers.Store, disks: disks_module.Disks, tmp_path: Path) -> None:
    seaweed.put("disk.img", disks.raw().read_bytes())
    key, secret = objectservers.READER
    env = {"IMPORTER_ACCESS_KEY_ID": key, "IMPORTER_SECRET_KEY": secret, "AWS_ENDPOINT_URL": ""}
    env["AWS_ENDPOINT_URL"] = seaweed.endpoint(tls=True)
    done = worker.run("import", seaweed.uri("disk.img"), tmp_path, env=env)
    assert (done.status, "certificate verify failed" in done.errors) == (SOURCE, True)
    assert "(--ca-file), or do not verify it (--insecure)" in done.error_message


def test_malformed_endpoint_is_refused(tmp_path: Path) -> None:
    done = worker.call("import", "s3://b/k", tmp_path, env={"AWS_ENDPOINT_URL": "minio:9000/path"})
    assert (done.status, "malformed S3 endpoint URL" in done.error_message) == (2, True)


@pytest.mark.parametrize("name", ["REGISTRY_AUTH_FILE", "DOCKER_CONFIG"])
def test_credentials_of_container_tools(
    guarded: registries.Registry, disks: disks_module.Disks, tmp_path: Path, name: str
) -> None:
    guarded.push("clouds", containers.image_of(disks.image("qcow2")))
    login = base64.b64encode(f"{registries.USER}:{registries.PASSWORD}".encode()).decode()
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"auths": {guarded.host: {"auth": login}}}))
    assert guarded.authority
    trust = f"--ca-file={guarded.authority.certificate}"
    reference = guarded.reference("clouds")
    assert worker.call("digest", reference, trust).status == SOURCE
    env = {name: str(file if name == "REGISTRY_AUTH_FILE" else tmp_path)}
    done = worker.call("import", reference, tmp_path / "disk.img", trust, env=env)
    assert done.status == 0, done.errors
    oracle.same(tmp_path / "disk.img", disks.expected("qcow2"))


@pytest.mark.timeout(openstack.START * 2)
def test_variables_of_openstack(cloud: openstack.Cloud, disks: disks_module.Disks, tmp_path: Path) -> None:
    number = cloud.upload(disks.image("qcow2"), "qcow2")
    env = {**cloud.environment, "OS_AUTH_URL": cloud.public, "OS_CACERT": str(cloud.authority)}
    done = worker.call("import", f"glance://{number}", tmp_path / "disk.img", env=env)
    assert done.status == 0, done.errors
    oracle.same(tmp_path / "disk.img", disks.expected("qcow2"))
    done = worker.call("import", f"glance://{number}", tmp_path / "disk.img", env=cloud.environment)
    assert (done.status, "OS_AUTH_URL" in done.error_message) == (2, True)


def test_variable_wins_over_the_default_of_an_option(tmp_path: Path) -> None:
    """An option that has a default says nothing where it is not given."""
    env = {"OS_INTERFACE": "publc"}
    done = worker.call("import", "--source=glance", "--image-id=7", "https://h/", tmp_path / "disk", env=env)
    assert (done.status, "unknown interface 'publc'" in done.error_message) == (2, True), done.errors
    help_text = worker.call("help", "import", "glance").output
    assert "[default: public]" in " ".join(help_text.split())


@pytest.mark.parametrize(("name", "prefix"), [("imageio", "OVIRT"), ("vddk", "GOVC")])
def test_login_of_ovirt_and_govc(name: str, prefix: str) -> None:
    kind = sources.find(name)
    given = dict.fromkeys(("user", "password_file", "session_token_file", "header_dir", "ca_dir"))
    given |= {"ca_file": (), "header": (), "insecure": False}
    env = {f"{prefix}_USERNAME": "me", f"{prefix}_PASSWORD": "hush"}
    env[kind.location_type.variables["ca_file"]] = "/one.pem:/two.pem"
    with click.Context(import_.import_):
        access = options.make_location(kind, "https://h/", given, env).access
        other = options.make_location(kind, "https://h/", {**given, "user": "you"}, env).access
    assert (access.user, access.password, access.ca_files) == ("me", "hush", ("/one.pem", "/two.pem"))
    assert other.user == "you"
