"""The other roles and sources of the image in real containers, as in a restricted namespace."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.image.test_image import COMPLETE
from tests.image.test_servers import clone, upload_server
from tests.importer.commands import test_cron
from tests.support import (
    chains,
    clones,
    containers,
    nbd_exports,
    objectservers,
    oracle,
    ovirt_disks,
    pods,
    policy,
    processes,
    registries,
    repository,
    servers,
    uploads,
    vmware,
    worker,
)
from tests.support import disks as disks_module
from tests.support import engine as engine_module

cluster, pair = test_cron.cluster, test_cron.pair


def trust(pod: pods.Pod, certificate: Path) -> None:
    """Mount a CA as CDI's controllers do."""
    certificate.chmod(0o644)
    pod.files[certificate] = "/certs/ca.crt"
    pod.env["IMPORTER_CERT_DIR"] = "/certs"


# -- sources ---------------------------------------------------------------------------------------


def test_disk_of_a_registry_is_imported(
    container: pods.Pod, guarded: registries.Registry, disks: disks_module.Disks
) -> None:
    image = containers.Image((containers.layer(*containers.disk(disks.image("qcow2").read_bytes())),))
    guarded.push("image-role", image)
    assert guarded.authority
    trust(container, guarded.authority.certificate)
    done = container.run(
        IMPORTER_SOURCE="registry",
        IMPORTER_ENDPOINT=guarded.reference("image-role"),
        IMPORTER_ACCESS_KEY_ID=registries.USER,
        IMPORTER_SECRET_KEY=registries.PASSWORD,
    )
    pods.check(container, done, COMPLETE, disks.expected("qcow2"))


def test_object_of_gcs_is_imported(
    container: pods.Pod, emulator: objectservers.Emulator, disks: disks_module.Disks
) -> None:
    emulator.put("role.qcow2", disks.image("qcow2").read_bytes())
    done = container.run(IMPORTER_SOURCE="gcs", IMPORTER_ENDPOINT=emulator.url("role.qcow2"))
    pods.check(container, done, COMPLETE, disks.expected("qcow2"))


def test_disk_of_ovirt_is_imported(container: pods.Pod, ovirt_disk: ovirt_disks.Setup) -> None:
    trust(container, ovirt_disk.authority.certificate)
    done = container.run(
        IMPORTER_SOURCE="imageio",
        IMPORTER_ENDPOINT=ovirt_disk.engine.url,
        IMPORTER_DISK_ID="disk",
        IMPORTER_ACCESS_KEY_ID=engine_module.USER,
        IMPORTER_SECRET_KEY=engine_module.PASSWORD,
    )
    pods.check(container, done, COMPLETE, ovirt_disk.now)


def test_export_of_nbd_is_imported(container: pods.Pod, disks: disks_module.Disks, tmp_path: Path) -> None:
    with nbd_exports.nbdkit(tmp_path, "-r", "file", disks.raw()) as port:
        done = container.run(IMPORTER_SOURCE="nbd", IMPORTER_ENDPOINT=f"nbd://127.0.0.1:{port}/")
    pods.check(container, done, COMPLETE, disks.raw())


def test_disk_of_a_lease_is_imported(container: pods.Pod, tmp_path: Path) -> None:
    """Without VMware's library, as with our image as ``initImageURL``."""
    vcsim = vmware.Vcsim(tmp_path / "vmware", 16 << 20, exports=True)
    vcsim.write((0, b"boot" * 1000), (9 << 20, b"data" * 5000))
    vcsim.power = "poweredOff"
    with vcsim.running():
        done = container.run(**vcsim.variables())
    assert done.returncode == 0, done.stderr
    oracle.same(container.disk, vcsim.content(0))


def test_archive_is_unpacked(container: pods.Pod, tmp_path: Path) -> None:
    tree, root = clones.fill_volume(tmp_path / "tree"), tmp_path / "www"
    root.mkdir()
    processes.run("tar", "--create", "--gzip", f"--file={root / 'tree.tar.gz'}", f"--directory={tree}", ".")
    with servers.nginx(tmp_path, root) as web:
        url = web.url("tree.tar.gz")
        done = container.run(IMPORTER_ENDPOINT=url, IMPORTER_CONTENTTYPE="archive")
    assert (done.returncode, container.message) == (0, COMPLETE), done.stderr
    clones.same_tree(tree, container.data)


# -- other roles -----------------------------------------------------------------------------------


@pytest.fixture
def source(image: str, tmp_path: Path) -> Iterator[pods.Pod]:
    """Return the pod of a clone source with a device of 16 MiB."""
    with pods.device(tmp_path, owner=107) as block:
        clones.write_disk(block, 16 << 20)
        yield pods.Pod(tmp_path / "source", image, user="107:107", block=block)


def test_device_is_cloned_to_a_file(
    source: pods.Pod, image: str, tmp_path: Path, certificates: uploads.Certificates
) -> None:
    target = pods.Pod(tmp_path / "target", image)
    with upload_server(target, certificates) as (server, port):
        clone(source, certificates, port)
        assert server.wait(20) == 0
    expected = clones.write_disk(tmp_path / "expected", 16 << 20)
    pods.check(target, subprocess.CompletedProcess([], 0, "", ""), clones.DONE, expected)


def test_poller_asks_for_a_new_digest(
    container: pods.Pod, cluster: test_cron.Cluster, guarded: registries.Registry
) -> None:
    digest = guarded.push("cron-role", containers.Image((containers.layer(*containers.disk(bytes(512))),)))
    assert guarded.authority
    account = "/var/run/secrets/kubernetes.io/serviceaccount"
    container.files = {cluster.account: account, guarded.authority.certificate: "/certs/ca.crt"}
    guarded.authority.certificate.chmod(0o644)
    arguments = ["-ns", "images", "-cron", "fedora", "-url", guarded.reference("cron-role")]
    keys = {"IMPORTER_ACCESS_KEY_ID": registries.USER, "IMPORTER_SECRET_KEY": registries.PASSWORD}
    program = "/usr/bin/cdi-source-update-poller"
    done = container.run(*arguments, "-certdir", "/certs", entrypoint=program, **cluster.env, **keys)
    assert (done.returncode, done.stdout) == (0, f"wanted: {digest}\n"), done.stderr
    assert cluster.cron["metadata"]["annotations"] == {test_cron.DESIRED: digest}


def test_job_runs_all_stages_and_the_disk_is_verified(image: str, tmp_path: Path) -> None:
    """The Job of a manifest with two checkpoints, then ``cdi-worker verify`` in the same volume."""
    root = tmp_path / "www"
    root.mkdir()
    chain = chains.Chain(root)
    chain.base("16M", "write -P 1 0 1M")
    chain.overlay("write -P 2 1M 64k")
    expected = chain.disk()
    volume = yaml.safe_load((repository.DATAVOLUMES / "http.yaml").read_text())
    with servers.nginx(tmp_path, root) as web:
        volume["spec"]["source"]["http"]["url"] = web.url(chain.top)
        names = [path.name for path in chain.files]
        pairs = zip(["", *names[:-1]], names, strict=True)
        volume["spec"] |= {
            "checkpoints": [{"previous": before, "current": name} for before, name in pairs],
            "finalCheckpoint": True,
        }
        (tmp_path / "dv.yaml").write_text(yaml.safe_dump(volume))
        printed = worker.run("manifest", tmp_path / "dv.yaml", "--image", image)
        assert printed.status == 0, printed.errors
        _, job = yaml.safe_load_all(printed.output)
        spec = job["spec"]["template"]["spec"]
        user = "{runAsUser}:{runAsGroup}".format(**spec["securityContext"])
        pod = pods.Pod(tmp_path / "pod", image, user=user, has_scratch=True)
        stages = [*spec.get("initContainers", []), *spec["containers"]]
        assert len(stages) == 2
        for stage in stages:
            env = {item["name"]: item["value"] for item in stage["env"] if "value" in item}
            done = pod.run(*stage["args"], **env)
            assert done.returncode == 0, done.stderr
        assert pod.disk.stat().st_size == 64 << 20
        (root / "expected.raw").write_bytes(expected.read_bytes())
        with (root / "expected.raw").open("r+b") as file:
            file.truncate(64 << 20)
        done = pod.run("verify", web.url("expected.raw"), "/data/disk.img")
        assert done.returncode == 0, done.stderr
        with pod.disk.open("r+b") as file:
            file.seek(5 << 20)
            file.write(b"x")
        assert pod.run("verify", web.url("expected.raw"), "/data/disk.img").returncode != 0


# -- a policy --------------------------------------------------------------------------------------


#: Whether the image's Python and its cryptography are under the policy.
CHECK = """
import hashlib
from cryptography.hazmat.backends.openssl import backend
try:
    hashlib.new("md5")
except ValueError:
    print("refused", end=" ")
print("refused" if backend._fips_enabled else "offered")
"""


@pytest.fixture
def under_policy(container: pods.Pod, tmp_path: Path) -> pods.Pod:
    """Return the container under a policy without MD5 and SHA-1 for security."""
    (tmp_path / "policy").mkdir()
    made = policy.make(tmp_path / "policy", "/policy")
    container.files |= {tmp_path / "policy": "/policy", policy.HERE / "site": "/site"}
    container.env |= {**made, "PYTHONPATH": "/site"}
    return container


def test_image_works_under_a_policy(
    under_policy: pods.Pod, certificates: uploads.Certificates, disks: disks_module.Disks, tmp_path: Path
) -> None:
    done = under_policy.run("-c", CHECK, entrypoint="/usr/lib/cdi-worker/bin/python3")
    assert done.stdout == "refused refused\n", done.stderr
    trust(under_policy, certificates.authority.certificate)
    settings = servers.Settings(pair=certificates.server)
    with servers.nginx(tmp_path, disks.directory, settings) as web:
        url = web.url(disks.image("qcow2"), host="localhost")
        checksum = f"md5:{disks_module.digest(disks.image('qcow2'), 'md5')}"
        done = under_policy.run(IMPORTER_ENDPOINT=url, IMPORTER_CHECKSUM=checksum)
        pods.check(under_policy, done, COMPLETE, disks.expected("qcow2"))
