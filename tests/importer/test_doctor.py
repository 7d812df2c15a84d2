"""``cdi-worker doctor``, and the programs that an import needs."""

from __future__ import annotations

import datetime as dt
import json
import re
import ssl
from pathlib import Path

import click
import pytest

from cdi_worker import errors, version
from cdi_worker.images.tools import process
from cdi_worker.importer.commands import doctor, group
from tests.support import disks as disks_module
from tests.support import misbehave, repository, tls, worker


def test_every_program_that_we_run_is_examined() -> None:
    named = set()
    for folder in ("images/tools", "sources/vmware"):
        for path in (repository.ROOT / folder).glob("*.py"):
            named |= set(re.findall(r'(?:package=|PROGRAM = "[\w-]+", )"([\w-]+)"', path.read_text()))
    assert named - {"nbdkit-plugin-vddk", "pyvmomi"} <= {package for _, package, _ in doctor.PROGRAMS}


def test_every_extra_is_examined() -> None:
    text = (repository.ROOT / "pyproject.toml").read_text()
    section = re.search(r"\[project.optional-dependencies\]\n(.*?)\n\[", text, re.DOTALL)
    assert section
    declared = set(re.findall(r"^([a-z0-9]+) = ", section[1], re.MULTILINE))
    assert declared - {"all"} == {*doctor.EXTRAS}


def test_missing_extra_is_named_with_its_command(tmp_path: Path) -> None:
    done = worker.call("doctor", "--json")
    found = {each["need"]: each for each in json.loads(done.output)}
    assert found["qemu-img"]["works"]
    assert found["[s3]"]["add"].endswith("[s3]'") or "[s3]" in found["[s3]"]["add"]
    shown = worker.call("doctor")
    assert (shown.status, shown.errors) == (0, "")
    assert re.search(r"^yes  qemu-img", shown.output, re.MULTILINE)


def test_trusted_certificates_are_listed_with_their_ends(tmp_path: Path) -> None:
    authority = tls.Authority(tmp_path, "Our CA")
    expired = authority.issue(common_name="old.example.org", days=-1).certificate
    bundle, other = tmp_path / "bundle.pem", tmp_path / "other.der"
    bundle.write_bytes(authority.certificate.read_bytes() + b"-----BEGIN CERTIFICATE-----\nMIIB\n")
    other.write_bytes(ssl.PEM_cert_to_DER_cert(authority.certificate.read_text()))
    files = [each for path in (bundle, expired, other) for each in ("--ca-file", path)]
    found = json.loads(worker.call("doctor", "--json", *files).output)
    until = (dt.datetime.now(dt.UTC) + dt.timedelta(days=30)).strftime("%Y-%m-%d")
    ours = [(each["need"], each["what"], each["works"]) for each in found if str(tmp_path) in each["need"]]
    before = (dt.datetime.now(dt.UTC) - dt.timedelta(days=1)).strftime("%Y-%m-%d")
    assert ours == [
        (str(bundle), f"trust in CN=Our CA until {until}", True),
        (str(bundle), "certificate 2 of the file", False),
        (str(expired), f"trust in CN=old.example.org until {before}", False),
        (str(other), "certificates to trust", False),
    ]
    assert "openssl x509 -inform der" in found[-1]["add"]
    (system,) = [each for each in found if "public CAs" in each["what"]]
    assert system["works"]
    assert re.search(r"of [1-9]\d* public", system["what"])


def test_missing_program_stops_before_the_first_byte(
    server: misbehave.Server,
    disks: disks_module.Disks,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """inspect, --dry-run and import say the same."""
    import cdi_worker

    monkeypatch.setattr(process, "SEARCH_PATH", str(tmp_path))
    url = server.serve("/disk", misbehave.Page(disks.image("vhdx-log").read_bytes()))
    location = cdi_worker.Location(url)
    wanted = cdi_worker.Request(source="http", location=location, target=str(tmp_path / "disk.img"))
    found = cdi_worker.inspect(wanted)
    assert isinstance(found.obstacle, errors.MissingTool)
    read = server.sent("/disk")
    with pytest.raises(errors.MissingTool):
        cdi_worker.run(wanted)
    assert server.sent("/disk") <= 2 * read
    assert not (tmp_path / "disk.img").exists()


@pytest.mark.parametrize(
    ("prefix", "base", "command"),
    [
        ("/usr", "/usr", "apt-get install python3-libnbd"),
        ("/home/me/venv", "/usr", "/usr/bin/python3 -m venv --system-site-packages /home/me/venv"),
        ("/home/me/venv", "/opt/python", "the bindings are for /usr/bin/python3"),
    ],
)
def test_libnbd_is_for_this_interpreter(
    monkeypatch: pytest.MonkeyPatch, prefix: str, base: str, command: str
) -> None:
    monkeypatch.setattr("sys.prefix", prefix)
    monkeypatch.setattr("sys.base_prefix", base)
    assert version.install_libnbd().endswith(command)


def test_size_of_the_volume_is_one_number(disks: disks_module.Disks, tmp_path: Path) -> None:
    image = disks.image("qcow2")
    found = [
        json.loads(worker.call(*command, "--json").output)["volumeSize"]
        for command in (("inspect", image), ("import", image, tmp_path / "disk.img", "--dry-run"))
    ]
    assert found[0] == found[1]


def test_commands_that_need_an_extra_exist() -> None:
    names = re.findall(r"cdi-worker (\w+)", " ".join(doctor.EXTRAS.values()))
    assert names
    assert set(names) <= set(group.cli.list_commands(click.Context(group.cli)))
