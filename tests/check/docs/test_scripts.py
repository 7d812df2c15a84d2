"""The scripts of docs/from-scripts.md make the disks that our commands make, and fail as the page says."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.check.docs import test_examples
from tests.support import (
    containers,
    devices,
    forked,
    nbd_exports,
    processes,
    registries,
    repository,
    servers,
    worker,
)
from tests.support import disks as disks_module

web = test_examples.web
registry = test_examples.registry


@dataclasses.dataclass(frozen=True)
class Pair:
    """A script, and our command that replaces it."""

    script: str
    ours: str

    def __str__(self) -> str:
        return self.script.replace("\n", "; ")


def pairs() -> Iterator[Pair]:
    """Yield the examples of the page that end with our command."""
    page = (repository.ROOT / "docs/from-scripts.md").read_text()
    for block in re.findall(r"(?:^    .*\n)+", page, re.MULTILINE):
        *script, ours = [line.strip() for line in re.sub(r" +# .*| *\\\n *", " ", block).splitlines()]
        if ours.startswith("cdi-worker"):
            yield Pair("\n".join(script), ours)


#: Whose servers no test machine has. tests/check/docs/test_examples.py parses our commands for them.
ELSEWHERE = re.compile(r"vcenter\.|engine\.example|\b(?:s3|gs)://")
PAIRS = [pair for pair in pairs() if not ELSEWHERE.search(pair.ours)]
COMPARED = [pair for pair in PAIRS if " verify " in pair.ours]


def run(script: str, folder: Path, here: Mapping[str, str]) -> int:
    """Return the exit status of a shell that runs a script in ``folder``, with the servers of ``here``."""
    for address, server in {**here, "cdi-worker": shlex.join(worker.COMMAND)}.items():
        script = script.replace(address, server)
    command = ["sh", "-e", "-c", script]
    return forked.run(command, cwd=folder, env=worker.ENVIRONMENT, timeout=100).returncode


@pytest.fixture
def here(web: servers.Web, registry: registries.Registry, disks: disks_module.Disks) -> dict[str, str]:
    """What stands on the page, and what it is on this machine."""
    layer = containers.layer(*containers.disk(disks.image("qcow2").read_bytes()), compression="+gzip")
    registry.push("team/plain", containers.Image((layer,)), "40")
    return {
        "https://example.org": f"http://127.0.0.1:{web.port}",
        "docker://quay.io/team/fedora": f"docker://{registry.host}/team/plain",
        "skopeo copy": "skopeo copy --src-tls-verify=false",
        ":40 disk.img": ":40 disk.img --insecure",
    }


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair not in COMPARED], ids=str)
def test_script_and_command_make_the_same_disk(
    pair: Pair, here: dict[str, str], disks: disks_module.Disks, tmp_path: Path
) -> None:
    processes.need("curl", "qemu-img", "nbdcopy", "skopeo", "zstd")
    expected = disks.image("raw")
    for script in (pair.script, pair.ours):
        folder = tmp_path / f"{script is pair.ours}"
        folder.mkdir()
        if "://" not in script:
            shutil.copy(disks.image("qcow2"), folder / "disk.qcow2")
        target = folder / "disk.img"
        with contextlib.ExitStack() as stack:
            if "/dev/vdb" in script:
                size = expected.stat().st_size + devices.MiB
                here["/dev/vdb"] = str(target := stack.enter_context(devices.loop(folder, size)))
            if "nbd://" in script:
                port = stack.enter_context(nbd_exports.nbdkit(folder, "-r", "file", expected))
                here["nbd://host"] = f"nbd://127.0.0.1:{port}"
            assert run(script, folder, here) == 0
            if (folder / "vm.qcow2").exists():
                disks_module.to_raw(folder / "vm.qcow2", "qcow2", target)
            processes.run("cmp", f"--bytes={expected.stat().st_size}", expected, target)
            if "/dev/vdb" not in script:
                assert target.stat().st_size == expected.stat().st_size


def test_script_and_command_compare_disks(
    here: dict[str, str], disks: disks_module.Disks, tmp_path: Path
) -> None:
    (pair,) = COMPARED
    shutil.copy(disks.image("raw"), tmp_path / "disk.img")
    assert [run(script, tmp_path, here) for script in (pair.script, pair.ours)] == [0, 0]
    devices.change(tmp_path / "disk.img", devices.MiB, b"changed")
    assert [run(script, tmp_path, here) for script in (pair.script, pair.ours)] == [1, 9]


@pytest.mark.parametrize(
    ("script", "ours", "status"),
    [
        ("curl -sLo disk.img https://example.org/no", "cdi-worker import https://example.org/no disk.img", 3),
        (
            "curl -sfL https://example.org/no | zstd -dc | dd of=disk.img",
            "cdi-worker import https://example.org/no disk.img",
            3,
        ),
        ("qemu-img convert -O raw overlay.qcow2 disk.img", "cdi-worker import overlay.qcow2 disk.img", 4),
    ],
    ids=["error page", "pipe", "backing file"],
)
def test_script_does_not_notice_what_our_command_does(
    script: str, ours: str, status: int, here: dict[str, str], disks: disks_module.Disks, tmp_path: Path
) -> None:
    base = disks.image("qcow2")
    overlay = tmp_path / "overlay.qcow2"
    processes.run("qemu-img", "create", "-q", "-f", "qcow2", "-b", base, "-F", "qcow2", overlay)
    assert run(script, tmp_path, here) == 0
    (tmp_path / "disk.img").unlink()
    assert run(ours, tmp_path, here) == status
    assert not (tmp_path / "disk.img").exists()


def test_curl_appends_to_another_version(here: dict[str, str], web: servers.Web, tmp_path: Path) -> None:
    (tmp_path / "disk.qcow2").write_bytes(b"old" * 1000)
    (script,) = {line for pair in PAIRS for line in pair.script.splitlines() if " -C - " in line}
    assert run(script, tmp_path, here) == 0
    new = (web.root / "disk.qcow2").read_bytes()
    assert (tmp_path / "disk.qcow2").read_bytes() == b"old" * 1000 + new[3000:]
