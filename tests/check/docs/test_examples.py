"""Every command in the documentation runs as a reader would type it, with real servers at its addresses.

An example of a new address needs a server here. What no test machine has (an oVirt engine, VDDK) is only
parsed; tests in ``tests/sources`` run these commands. NBD and vSphere have tests of their own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from cdi_worker.importer.commands import group
from tests.support import (
    chains,
    containers,
    forked,
    nbd_exports,
    objectservers,
    ovas,
    processes,
    registries,
    repository,
    servers,
    signers,
    signing,
    uploads,
    vmware,
    worker,
)
from tests.support import disks as disks_module

server = uploads.server
SIGNER = signing.Signer()
#: Of the examples.
PASSWORD = "secret"


@dataclasses.dataclass(frozen=True)
class Example:
    """A command line of a page."""

    page: str
    line: str

    def __str__(self) -> str:
        return f"{self.page}: {self.line}"


def examples() -> Iterator[Example]:
    """Yield the commands of every page, without prompts, comments and what they are piped to.

    The consoles of docs/quickstart.md run in their order, in a test of their own.
    """
    root = repository.ROOT
    seen = set()
    for page in (root / "README.md", *sorted((root / "docs").rglob("*.md"))):
        text = re.sub(r"^```console\n.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        text = text.replace("\\\n", " ")
        for line in re.findall(
            r"^(?:    |\$ )\$? ?((?:ssh .* \| )?(?:\w+=\S+ )*(?:\.venv/bin/)?cdi-worker .*)$",
            text,
            re.MULTILINE,
        ):
            command = " ".join(re.sub(r" +#.*| \| kubectl .*", "", line).split()).replace(".venv/bin/", "")
            if command not in seen:
                seen.add(command)
                yield Example(str(page.relative_to(root)), command)


EXAMPLES = list(examples())
#: Parts of examples whose servers exist elsewhere only, or that leave something out.
ELSEWHERE = re.compile(
    r"…|vcenter\.|engine\.example|cloud\.example|--credentials-file|registry:5000|uploadproxy|"
    r"--previous-checkpoint full|nbds?://host|nbd\+unix:"
)


def increments(directory: Path) -> chains.Chain:
    """Write a full image and its increments, in a folder of their own."""
    (directory / "increments").mkdir()
    chain = chains.Chain(directory / "increments")
    for number, name in enumerate(("full", "monday", "tuesday")):
        write = f"write -P {number + 1} {number}M 1M"
        path = chain.overlay(write) if number else chain.base("16M", write)
        chain.files[-1] = path.rename(path.with_name(f"{name}.qcow2"))
    return chain


@pytest.fixture(scope="module")
def web(disks: disks_module.Disks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Web]:
    """A web server with the files of the examples."""
    root = tmp_path_factory.mktemp("www")
    os.link(disks.image("qcow2"), root / "disk.qcow2")
    sums = f"{hashlib.sha256((root / 'disk.qcow2').read_bytes()).hexdigest()}  disk.qcow2\n".encode()
    (root / "SHA256SUMS").write_bytes(sums)
    with signers.people() as people:
        (root / "SHA256SUMS.gpg").write_bytes(people.sign("good", sums))
        people.exported("good", root)
    for path in increments(root).files:
        os.link(path, root / path.name)
    for compression in ("gz", "xz", "zst"):
        os.link(disks.wrapped("raw", compression), root / f"disk.raw.{compression}")
    packed = disks.wrapped("raw", "zst").read_bytes()
    image = containers.machine(rootdisk=(packed, "8Mi"), datadisk=(packed, "8Mi"))
    containers.archive(root / "export.oci.tar", {"": image})
    (root / "vm.ova").write_bytes(ovas.ova(ovas.Disk(disks.image("vmdk-stream").read_bytes())))
    with servers.nginx(tmp_path_factory.mktemp("nginx"), root) as served:
        yield served


@pytest.fixture(scope="module")
def private(web: servers.Web, tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Web]:
    """The same files for user ME only."""
    settings = servers.Settings(password=("ME", PASSWORD))
    with servers.nginx(tmp_path_factory.mktemp("private"), web.root, settings) as served:
        yield served


@pytest.fixture(scope="module")
def registry(
    disks: disks_module.Disks, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[registries.Registry]:
    """A registry with the image of the examples."""
    with registries.registry(tmp_path_factory.mktemp("registry")) as served:
        image = containers.image_of(disks.image("qcow2"))
        digest = served.push("team/fedora", image, "40")
        signature = SIGNER.simple(digest, f"{served.host}/team/fedora")
        signing.attach(served, "team/fedora", digest, signature)
        root = disks.wrapped("raw", "zst").read_bytes()
        served.push("team/machine", containers.machine(rootdisk=(root, "8Mi"), datadisk=(root, "8Mi")), "1")
        served.push("containerdisks/fedora", image)
        yield served


@pytest.fixture(scope="module")
def files(
    disks: disks_module.Disks,
    web: servers.Web,
    certificates: uploads.Certificates,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The files that the examples name."""
    made = tmp_path_factory.mktemp("files")
    (made / "disk.qcow2").write_bytes(disks.image("qcow2").read_bytes())
    second = ovas.Disk(disks.image("vmdk-stream").read_bytes(), "vm-disk2.vmdk")
    (made / "vm.ova").write_bytes(ovas.ova(ovas.Disk(bytes(512)), second))
    for path in (web.root / "increments").iterdir():
        shutil.copy(path, made)
    (made / "secret").write_text(PASSWORD)
    SIGNER.write(made / "team.pem")
    (made / "release.pub").write_bytes((web.root / "good.gpg").read_bytes())
    (made / "token").write_text("token")
    (made / "key.json").write_text("{}")
    (made / "headers").mkdir()
    (made / "headers" / "token").write_text("X-Token: secret")
    (made / "images").mkdir()
    (made / "scratch").mkdir()
    for name, file in {
        "ca.pem": certificates.authority.certificate,
        "engine.pem": certificates.authority.certificate,
        "client.crt": certificates.client.certificate,
        "client.key": certificates.client.key,
    }.items():
        (made / name).write_bytes(file.read_bytes())
    containers.archive(made / "images/fedora.tar", {"v1": containers.image_of(disks.image("qcow2"))})
    manifest = (repository.DATAVOLUMES / "http.yaml").read_text()
    manifest = manifest.replace("http://images.invalid/cirros.img", web.url("disk.qcow2"))
    for name in ("dv", "disks-of-esx-1", "disks-of-esx-2"):
        (made / f"{name}.yaml").write_text(manifest)
    return made


@pytest.fixture
def place(files: Path, tmp_path: Path) -> Path:
    """The directory in which a reader runs an example, with the files that it names."""
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    return tmp_path


def run(line: str, place: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command line by the shell, in ``place``."""
    command = line.replace("cdi-worker", f"{sys.executable} -m cdi_worker", 1)
    # What needs no shell is split as by one.
    is_plain = command.startswith(sys.executable) and not set(command) & set("|&;<>$`*?~\n#")
    argv = shlex.split(command) if is_plain else ["sh", "-c", command]
    return forked.run(argv, cwd=place, env={**worker.ENVIRONMENT, **env}, timeout=120)


def test_there_are_examples() -> None:
    assert len(EXAMPLES) > 30


@pytest.mark.parametrize("example", [each for each in EXAMPLES if not ELSEWHERE.search(each.line)], ids=str)
def test_example_runs(
    example: Example,
    place: Path,
    web: servers.Web,
    private: servers.Web,
    registry: registries.Registry,
    disks: disks_module.Disks,
    request: pytest.FixtureRequest,
) -> None:
    """The command succeeds, and an imported disk has the right bytes."""
    env: dict[str, str] = {}
    line = re.sub(r"ssh host (?:(cat \S+)|'(.*)')", r"\1\2", example.line)
    line = line.replace("/dev/vdb", "vdb.img")
    line = line.replace("https://example.org", f"http://127.0.0.1:{web.port}")
    line = line.replace("https://mirror.example.com", f"http://127.0.0.1:{private.port}")
    line = line.replace("https_proxy=http://proxy.example:3128", "https_proxy=http://127.0.0.1:9")
    line = re.sub(r"docker://quay\.io/(\S+)", rf"docker://{registry.host}/\1 --insecure", line)
    line = line.replace("oci-archive:/images", f"oci-archive:{place}/images")
    line = line.replace("SHA256-OF-THE-FILE", disks_module.digest(disks.image("qcow2"), "sha256"))
    if "s3://" in line or "--source s3" in line:
        line, env = _s3(line, request.getfixturevalue("seaweed"), disks)
    if "gs://" in line:
        emulator: objectservers.Emulator = request.getfixturevalue("emulator")
        emulator.put("images/disk.qcow2", disks.image("qcow2").read_bytes())
        env["STORAGE_EMULATOR_HOST"] = emulator.host
        line = line.replace("gs://bucket/", emulator.uri(""))
    if " verify " in line and "manifest" not in line:
        for name in ("disk.img", "vdb.img"):
            shutil.copy(disks.image("raw"), place / name)
    if "verify --all" in line:
        assert run(line.replace("verify", "import"), place, env).returncode == 0
    if "--force" in line:
        (place / "disk.img").write_bytes(b"old")
    if "manifest" in line and "--image" not in line:
        line += " --image registry.example.org/cdi-worker:1"
    done = run(line, place, env)
    assert done.returncode == 0, f"{line}\n{done.stderr}"
    if " vm.qcow2" in line:
        disks_module.to_raw(place / "vm.qcow2", "qcow2", place / "disk.img")
    if " import " in line and not {"--dry-run", ">/dev/null"} & {*line.split()}:
        target = place / ("vdb.img" if "vdb.img" in line else "disk.img")
        target = place / "images/vm-disk2.img" if "--all" in line else target
        expected = place / "expected.raw" if "full.qcow2" in line else disks.image("raw")
        if "--layer " in line:
            disks_module.to_raw(web.root / "increments/tuesday.qcow2", "qcow2", expected)
        elif "full.qcow2" in line:
            disks_module.to_raw(place / "full.qcow2", "qcow2", expected)
        processes.run("cmp", target, expected)


def _s3(line: str, store: objectservers.Store, disks: disks_module.Disks) -> tuple[str, dict[str, str]]:
    store.put("images/disk.qcow2", disks.image("qcow2").read_bytes())
    store.put("disk.vmdk", disks.image("vmdk").read_bytes())
    packed = disks.wrapped("raw", "zst").read_bytes()
    store.put("export.oci.tar", containers.archived({"": containers.machine(rootdisk=(packed, "8Mi"))}))
    line = line.replace("s3://bucket/", f"--source s3 {store.url('')}")
    line = line.replace("https://minio.example.com:9000/bucket/", store.url(""))
    # The keys of the server, in place of the example's.
    line = re.sub(r" --user \S+ --password-file \S+", "", line)
    return line, {
        "IMPORTER_ACCESS_KEY_ID": objectservers.ACCESS_KEY,
        "IMPORTER_SECRET_KEY": objectservers.SECRET_KEY,
    }


@pytest.mark.parametrize("example", [each for each in EXAMPLES if ELSEWHERE.search(each.line)], ids=str)
def test_example_of_a_server_elsewhere_parses(
    example: Example, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every option exists, for this command, and takes such a value."""
    monkeypatch.chdir(place)
    line = example.line.replace("--checksum sha256:…", "").replace("/etc/certs", str(place))
    line = line.replace("~/.docker/config.json", "key.json").replace("/scratch", "scratch")
    words = [word for word in shlex.split(line) if word != "…"]
    name, *arguments = words[words.index("cdi-worker") + 1 :]
    command = group.command_of(name)
    needed = [param for param in command.params if isinstance(param, click.Argument) and param.required]
    given = [word for word in arguments if "://" in word or word.startswith(("disk", "/dev"))]
    arguments += ["https://host/disk", "disk.img"][len(given) :][: len(needed)] if "…" in example.line else []
    command.make_context(name, arguments, obj=None)


@pytest.mark.parametrize(
    "line", sorted({each.line for each in EXAMPLES if re.search(r"nbd(s|\+unix)?://\S*/export", each.line)})
)
def test_example_of_nbd_runs(
    line: str, place: Path, disks: disks_module.Disks, certificates: uploads.Certificates
) -> None:
    own = certificates.authority
    folder = nbd_exports.credentials(place / "server", own, own.issue())
    secure = ("--tls=require", "--tls-verify-peer", f"--tls-certificates={folder}")
    options = secure if "nbds:" in line else ("--tls=off",)
    with (
        nbd_exports.nbdkit(place, "-r", *options, "file", disks.image("raw")) as port,
        nbd_exports.plain_qemu_nbd(place, disks.image("raw"), "--export-name=export") as socket,
    ):
        line = line.replace("host/", f"127.0.0.1:{port}/").replace("/run/nbd.sock", str(socket))
        done = run(line, place, {})
    assert done.returncode == 0, f"{line}\n{done.stderr}"
    processes.run("cmp", place / "disk.img", disks.image("raw"))


@pytest.mark.parametrize("bitmap", ["monday", "backup-vda"])
def test_stages_of_nbd_run(bitmap: str, place: Path) -> None:
    """The first stage, and both ways to name the changes since it, of docs/sources/nbd.md."""
    lines = [each.line for each in EXAMPLES if each.page.endswith("nbd.md") and "-checkpoint" in each.line]
    second = next(each for each in lines if "--previous" in each and ("--bitmap" in each) == ("-" in bitmap))
    image = place / "disk.qcow2"
    nbd_exports.bitmap(image, bitmap)
    for line in (lines[0], second):
        with nbd_exports.storage_daemon(place, image, "vda", bitmap) as port:
            done = run(re.sub(r"'?nbd(\+unix)?://\S+", f"nbd://127.0.0.1:{port}/vda", line), place, {})
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        if line is not second:
            nbd_exports.write(image, "write -P 9 3M 1M")
    disks_module.to_raw(image, "qcow2", place / "expected.raw")
    processes.run("cmp", place / "disk.img", place / "expected.raw")


def test_migrations_of_vmware_run(place: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Both ways of docs/sources/vmware.md: by a snapshot of the worker's own, and by stages."""
    lines = [each.line for each in EXAMPLES if each.page.endswith("vmware.md")]
    first, again = (next(each for each in lines if option in each) for option in ("--quiesce", "--update"))
    stages = [each for each in lines if "-checkpoint" in each]
    machine = vmware.Vcsim(tmp_path_factory.mktemp("vsphere"), 4 << 20, more=(1 << 20,), exports=True)
    for number in range(2):
        machine.write((number << 16, b"old"))
        machine.take_snapshot()
    env = {"GOVC_USERNAME": vmware.USER, "GOVC_PASSWORD": vmware.PASSWORD}
    (place / "disks").mkdir()
    with machine.running():
        for line in (first, again, *stages):
            if line is stages[0]:
                shutil.move(place / "disks", place / "first")
                (place / "disks").mkdir()
            address = f"vsphere://localhost:{machine.port}/{vmware.UUID}"
            command = line.replace("vsphere://vcenter.example.com/UUID", address)
            command = re.sub(r"stage-(\d)", lambda each: f"'stage {int(each[1]) - 1}'", command)
            done = run(command.replace("…", f"--thumbprint {machine.thumbprint}"), place, env)
            assert done.returncode == 0, f"{line}\n{done.stderr}"
            if line is first:
                for disk in range(2):
                    machine.write((1 << 18, b"new"), disk=disk)
                machine.power = "poweredOff"
                machine.save()
    for disk, name in enumerate(("disk.img", "disk_1.img")):
        processes.run("cmp", place / "first" / name, machine.current(disk))
        processes.run("cmp", place / "disks" / name, machine.content(1, disk))


def targets() -> list[str]:
    """Return the examples of docs/targets.md: commands that start a server, and an import to it."""
    page = (repository.ROOT / "docs/targets.md").read_text()
    blocks = re.findall(r"(?:^    .*\n)+", page, re.MULTILINE)
    return [textwrap.dedent(block) for block in blocks if "target.sock" in block and "cdi-worker" in block]


@pytest.mark.parametrize("number", range(len(targets())))
def test_server_of_a_target_gets_the_disk(number: int, place: Path, disks: disks_module.Disks) -> None:
    block = targets()[number]
    processes.need("qemu-nbd", "qemu-storage-daemon", "nbdkit", "nbd-server")
    (place / "passphrase").write_text("passphrase")
    socket = place / "target.sock"
    waiting = f"while [ ! -S {socket} ]; do sleep 0.05; done\ncdi-worker"
    script = block.replace("/run/target.sock", str(socket)).replace("\ncdi-worker", f"\n{waiting}")
    script = script.replace("cdi-worker", f"{sys.executable} -m cdi_worker")
    # By default each use of a passphrase takes two seconds of CPU time. qemu-img may fail on a
    # machine under load: see nbd_targets.
    script = script.replace("key-secret=key disk.luks", "key-secret=key,iter-time=10 disk.luks")
    # A server in the background ends with the shell, a daemon by its file.
    ending = "status=$?; kill $(jobs -p) $(cat nbd-server.pid 2>/dev/null); wait; exit $status"
    again = 'qemu-img() { for _ in {1..20}; do command qemu-img "$@" && return; done; }'
    (place / "script").write_text(f"{again}\ntrap '{ending}' EXIT\nset -e\n{script}")
    done = forked.run(["bash", "script"], cwd=place, env=worker.ENVIRONMENT, timeout=120)
    assert done.returncode == 0, f"{script}\n{done.stderr}"
    (made,) = [name for name in ("target.qcow2", "disk.luks", "disk.raw") if (place / name).exists()]
    node: dict[str, object] = {
        "driver": made.partition(".")[2],
        "file": {"driver": "file", "filename": str(place / made)},
    }
    if made == "disk.luks":
        node["key-secret"] = "key"
    expected = disks.image("raw")
    # Not the rest of the target: what LUKS makes of zeros takes 10 s to decrypt.
    disk = {"driver": "raw", "size": expected.stat().st_size, "file": node}
    read = (f"--object=secret,id=key,file={place / 'passphrase'}", "-O", "raw", f"json:{json.dumps(disk)}")
    processes.run("qemu-img", "convert", *read, place / "guest")
    processes.run("cmp", place / "guest", expected)


def test_upload_example_runs(
    server: uploads.Server, place: Path, disk: Path, disks: disks_module.Disks
) -> None:
    """The command of docs/pods/upload.md."""
    page = (repository.ROOT / "docs/pods/upload.md").read_text()
    line, *_ = re.findall(r"^    (cdi-worker upload .* --cert .*)$", page, re.MULTILINE)
    line = line.replace("https://host:8443", f"https://localhost:{server.port}")
    line = line.replace("sha256:…", f"sha256:{disks_module.digest(place / 'disk.qcow2', 'sha256')}")
    done = run(line, place, {})
    assert done.returncode == 0, done.stderr
    processes.run("cmp", disk, disks.image("raw"))
