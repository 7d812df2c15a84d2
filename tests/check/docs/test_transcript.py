"""The session in docs/quickstart.md is what a newcomer sees: empty home, installed package, real servers.

Pip installs a copy of the checkout into a new virtual environment, without the network: the environment of
the tests lends the packages that it requires. tools/try-debian runs `make import` with their download.
"""

from __future__ import annotations

import dataclasses
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdi_worker.importer import contract
from tests.support import disks as disks_module
from tests.support import processes, repository, servers, upload_relay, uploads

PAGE = repository.ROOT / "docs/quickstart.md"
MiB = 1 << 20
DISK, DATA = 64 * MiB, 16 * MiB
BLOCK = re.compile(r"(?<=^```console\n).*?(?=^```$)", re.DOTALL | re.MULTILINE)
#: What differs from run to run, in the page and in the output: everything else is compared.
VARIABLE = (
    # A slow machine prints more lines: one for every five seconds of a phase.
    (r"^ *[\d.]+% (?:connect|transfer|sync).*\n", ""),
    (r"\b\d+\.\d+ s\b", "… s"),
    (r"\b[\d.]+ (?:[KMGT]i)?B/s", "… B/s"),
    (r'("seconds": )[\d.]+', r"\1…"),
    (r"(version )\d\S*", r"\1…"),
    (r"(calculated sha1:)\w+", r"\1…"),
    (r'(etag \\?")[^"\\]+', r"\1…"),
    (r"((?:interrupted|resumed): )[\d.]+ [KMG]iB", r"\1…"),
    (r"(written  )\d+ bytes \(.*?\)", r"\1…"),
    (r"(read  )\d+ bytes \(.*?\), and \d+ bytes \(.*?\) (from an earlier attempt)", r"\1… and … \2"),
)


@dataclasses.dataclass(frozen=True)
class Session:
    """A newcomer's home directory, and the addresses behind the names of the page."""

    home: Path
    env: dict[str, str]
    addresses: dict[str, str]
    images: upload_relay.Relay

    def run(self, command: str, shown: str) -> str:
        """Run a command line, and return its output; ``^C`` in the output shown: interrupt it."""
        for name, address in self.addresses.items():
            command = command.replace(name, address)
        is_interrupted = "^C" in shown
        if is_interrupted:
            self.images.hold(DATA // 2)
        with subprocess.Popen(
            ["sh", "-c", f"exec {command}" if is_interrupted else command],
            cwd=self.home,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            try:
                if is_interrupted:
                    self.images.until(
                        lambda: process.poll() is not None or processes.written(process) > DATA / 3
                    )
                    process.send_signal(signal.SIGINT)
                    self.images.allow(math.inf)
                output, _ = process.communicate(timeout=240)
            finally:
                process.kill()
        for name, address in self.addresses.items():
            output = output.replace(address, name)
        return re.sub(r"^(cdi-worker: interrupted)", r"^C\n\1", output, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Web]:
    """A web server with a disk."""
    root = tmp_path_factory.mktemp("www")
    raw = tmp_path_factory.mktemp("raw") / "disk"
    with raw.open("wb") as file:
        file.truncate(DISK)
        file.seek(MiB)
        file.write(random.Random(1).randbytes(DATA))
    disks_module.convert(raw, root / "disk.qcow2", disks_module.FORMATS["qcow2"])
    with servers.nginx(tmp_path_factory.mktemp("nginx"), root) as served:
        yield served


@pytest.fixture
def session(
    tmp_path: Path, images: servers.Web, certificates: uploads.Certificates, paths: contract.Paths
) -> Iterator[Session]:
    """An empty home with a checkout, and the certificates of an upload server."""
    home, lent, programs = tmp_path / "home", tmp_path / "lent", tmp_path / "bin"
    for directory in (home, lent, programs):
        directory.mkdir()
    tracked = processes.run("git", "-C", repository.ROOT, "ls-files").stdout.split("\n")
    for name in filter(None, tracked):
        file, copy = repository.ROOT / name, home / "cdi-worker" / name
        if os.path.lexists(file) and not name.startswith(("tests/", "docs/")):
            copy.parent.mkdir(parents=True, exist_ok=True)
            # The folders of the package are links.
            shutil.copy(file, copy, follow_symlinks=False)
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(("cdi_worker", "__editable__", "pip")):
            (lent / entry.name).symlink_to(entry)
    (programs / "python3").symlink_to(os.path.realpath(sys.executable))
    shutil.copy(certificates.authority.certificate, home / "ca.pem")
    shutil.copy(certificates.client.certificate, home / "client.crt")
    shutil.copy(certificates.client.key, home / "client.key")
    env = {
        "HOME": str(home),
        "PATH": f"{home}/venv/bin:{programs}:/usr/sbin:/usr/bin:/sbin:/bin",
        "LC_ALL": "C.UTF-8",
        "PYTHONPATH": str(lent),
        "PIP_NO_INDEX": "1",
        # Of this name, pip reads 0 as "no isolation".
        "PIP_NO_BUILD_ISOLATION": "0",
        "PIP_NO_CACHE_DIR": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    with uploads.Server(certificates, {}, paths) as server, upload_relay.Relay(images.port) as relay:
        addresses = {
            "http://images.example.org": f"http://127.0.0.1:{relay.port}",
            "https://upload.example.org:8443": server.url(""),
        }
        yield Session(home, env, {name: url.rstrip("/") for name, url in addresses.items()}, relay)


def played(session: Session, block: str) -> str:
    """Run the commands of a block, and return it with their output."""
    made = []
    for part in re.split(r"^(?=\$ )", block, flags=re.MULTILINE):
        if part:
            command, _, shown = part.partition("\n")
            made.append(f"{command}\n{session.run(command.removeprefix('$ '), shown)}")
    return "".join(made)


def normal(text: str) -> str:
    """Return a text without what differs from run to run."""
    for pattern, replacement in VARIABLE:
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    return text


@pytest.mark.timeout(600)
def test_transcript_is_what_the_commands_print(session: Session) -> None:
    """REGOLD=1 rewrites the page."""
    page = PAGE.read_text()
    made = BLOCK.sub(lambda block: played(session, block[0]), page)
    if os.environ.get("REGOLD"):
        PAGE.write_text(made)
    assert normal(made) == normal(PAGE.read_text())


@pytest.mark.parametrize(
    ("line", "other"),
    [
        ("cdi-worker: vm.img: exists", "cdi-worker: vm.img: exists already"),
        ("    disk  67108864 bytes", "    disk  67108865 bytes"),
        ("    time  0.14 s, 1.0 MiB/s read", "    time  0.14 s"),
        ("interrupted: 3.0 MiB of 64.0 MiB are kept", "interrupted: 3.0 MiB of 65.0 MiB are kept"),
        ("status 5", "status 6"),
    ],
)
def test_other_differences_count(line: str, other: str) -> None:
    assert normal(line) != normal(other)


def test_lines_of_a_slow_machine_do_not_count() -> None:
    lines = "  0.0% connect\n 87.7% transfer 14.3 MiB of 16.3 MiB, 2.9 MiB/s, 0:01 left\n 99.9% sync\n"
    assert normal(f"{lines}{lines}100.0% done\n") == "100.0% done\n"
