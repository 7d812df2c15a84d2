"""Volumes in exports of KubeVirt: raw disks, gzip and archives; tokens, certificates and wrong URLs."""

from __future__ import annotations

import dataclasses
import gzip
import json
import signal
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker import errors
from cdi_worker.importer import plan
from cdi_worker.sources.kubevirt import locations
from tests.support import devices, kubevirt, kubevirt_stages, oracle, processes, tls, worker

MIB = 1 << 20
target = devices.targets("file", "512", "4096", size=kubevirt_stages.SIZE)
RAW, GZIP = ("volumes", "root", "disk.img"), ("volumes", "root", "disk.img.gz")


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[kubevirt_stages.Setup]:
    with kubevirt_stages.running(tmp_path) as made:
        made.server.volumes["root"] = made.directory / "first.raw"
        yield made


@pytest.mark.parametrize(
    ("target", "path"), [("512", RAW), ("file", GZIP), ("4096", GZIP)], indirect=["target"]
)
def test_volume_is_imported_without_scratch(
    machine: kubevirt_stages.Setup, target: Path, path: tuple[str, ...]
) -> None:
    done = cdi_worker.run(machine.request(target, *path))
    assert (done.plan.route, done.plan.random, done.plan.scratch) == (plan.Route.STREAM, path == RAW, False)
    oracle.same(target, machine.directory / "first.raw")


@pytest.mark.parametrize("path", [RAW, GZIP])
def test_header_that_a_guest_wrote_is_data(
    machine: kubevirt_stages.Setup, tmp_path: Path, path: tuple[str, ...]
) -> None:
    """A qcow2 header, and at the end the footer of a fixed VHD."""
    disk = bytearray((machine.directory / "first.raw").read_bytes())
    processes.run("qemu-img", "create", "-f", "vpc", "-o", "subformat=fixed,force_size=on",
                  tmp_path / "fixed.vhd", str(len(disk) - 512))  # fmt: skip
    disk[:MIB] = machine.image.read_bytes()[:MIB]
    disk[-512:] = (tmp_path / "fixed.vhd").read_bytes()[-512:]
    (tmp_path / "odd.raw").write_bytes(disk)
    machine.server.volumes["root"] = tmp_path / "odd.raw"
    cdi_worker.run(machine.request(machine.disk, *path))
    oracle.same(machine.disk, tmp_path / "odd.raw")


def test_gzip_with_a_length_does_not_give_the_disk_its_size(machine: kubevirt_stages.Setup) -> None:
    """A proxy may add the length of the compressed bytes."""
    packed = gzip.compress((machine.directory / "first.raw").read_bytes())
    machine.server.trick = lambda _: (200, packed)
    done = cdi_worker.run(machine.request(machine.disk, *GZIP))
    assert done.size == kubevirt_stages.SIZE
    oracle.same(machine.disk, machine.directory / "first.raw")


DAMAGE: tuple[tuple[Callable[[bytes], bytes], str], ...] = (
    (lambda packed: packed[:-9], "truncated"),
    (lambda packed: packed + b"more", "trailing garbage"),
    (lambda packed: packed[:5000] + bytes(9) + packed[5009:], "corrupt|truncated"),
    (lambda packed: b"plain" + packed, "does not begin like gzip"),
)


def test_damaged_gzip_never_makes_a_disk(machine: kubevirt_stages.Setup) -> None:
    packed = gzip.compress((machine.directory / "first.raw").read_bytes())
    for change, message in DAMAGE:
        damaged = change(packed)
        machine.server.trick = lambda _, damaged=damaged: (200, damaged)  # type: ignore[misc]
        with pytest.raises(errors.ImageError, match=message):
            cdi_worker.run(machine.request(machine.disk, *GZIP))
        oracle.unusable(machine.disk)


def test_gzip_of_an_endless_disk_is_refused(machine: kubevirt_stages.Setup, tmp_path: Path) -> None:
    packed = gzip.compress(bytes(64 * MIB))
    machine.server.trick = lambda _: (200, packed)
    with devices.loop(tmp_path, 32 * MIB) as block, pytest.raises(errors.TooLarge):
        cdi_worker.run(machine.request(block, *GZIP))


def test_archive_is_unpacked(machine: kubevirt_stages.Setup, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("files of a volume")
    with tarfile.open(tmp_path / "files.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "notes", "./notes")
    machine.server.volumes["files"] = tmp_path / "files.tar.gz"
    (tmp_path / "unpacked").mkdir()
    wanted = machine.request(tmp_path / "unpacked", "volumes", "files", "disk.tar.gz")
    cdi_worker.run(dataclasses.replace(wanted, content_type="archive"))
    assert (tmp_path / "unpacked/notes").read_text() == "files of a volume"


# -- tokens, certificates, URLs ---------------------------------------------------------------


def test_header_of_cdi_is_the_token(machine: kubevirt_stages.Setup) -> None:
    """KubeVirt's own manifests have the header in a Secret (``secretExtraHeaders``)."""
    where = machine.location(*RAW, token="")
    access = dataclasses.replace(where.access, headers=((kubevirt.HEADER, kubevirt.TOKEN),))
    wanted = dataclasses.replace(
        machine.request(machine.disk), location=dataclasses.replace(where, access=access)
    )
    cdi_worker.run(wanted)
    oracle.same(machine.disk, machine.directory / "first.raw")


def test_refusal_says_what_to_check(machine: kubevirt_stages.Setup) -> None:
    for path, fields, message in (
        (RAW, {"token": "wrong-token"}, "the export refuses the token"),
        (("volumes", "none", "disk.img"), {}, "no such export or volume"),
        (("exports", "none", "map"), {}, "no such export or volume"),
    ):
        with pytest.raises(errors.Unreachable, match=message) as caught:
            cdi_worker.run(machine.request(machine.disk, *path, **fields))
        assert "wrong-token" not in str(caught.value)


def test_certificate_of_another_authority_is_refused(machine: kubevirt_stages.Setup, tmp_path: Path) -> None:
    where = machine.location(*RAW)
    other = tls.Authority(tmp_path / "other")
    access = dataclasses.replace(where.access, ca_files=(str(other.certificate),))
    wanted = dataclasses.replace(
        machine.request(machine.disk), location=dataclasses.replace(where, access=access)
    )
    with pytest.raises(errors.SourceError, match="certificate"):
        cdi_worker.run(wanted)
    assert not machine.server.seen


def test_token_is_not_sent_to_another_host(machine: kubevirt_stages.Setup) -> None:
    with kubevirt.Server(machine.authority.issue()) as other:
        other.volumes["root"] = machine.directory / "first.raw"

        machine.server.redirect = other.url(*RAW)
        with pytest.raises(errors.SourceError):
            cdi_worker.run(machine.request(machine.disk, *RAW))
        assert [seen.headers.get(kubevirt.HEADER) for seen in other.seen] == [None]


@pytest.mark.parametrize(
    ("url", "fields", "faults"),
    [
        ("", {}, ["no endpoint (IMPORTER_ENDPOINT) given"]),
        ("http://host/volumes/a/disk.img", {}, ["the URL of a KubeVirt export begins with kubevirt://"]),
        ("https://host/volumes/a/dir", {}, ["the path of a KubeVirt export ends in one of /disk.img, "]),
        ("https://[::1/disk.img", {}, ["the path of a KubeVirt export ends in"]),
        ("kubevirt://host/exports/a/map", {"token": ""}, ["the token of the export is missing"]),
        (
            "kubevirt://host/volumes/a/disk.img",
            {"previous": "one", "current": "two"},
            ["a previous checkpoint needs the URL of a backup"],
        ),
        ("kubevirt://host/exports/a/map", {"previous": "one"}, ["a previous checkpoint without a current"]),
    ],
)
def test_faults_are_found_before_the_server_is_asked(
    url: str, fields: dict[str, str], faults: list[str]
) -> None:
    found = list(locations.KubeVirt(url, **{"token": "secret", **fields}).faults())
    assert [text[: len(fault)] for text, fault in zip(found, faults, strict=True)] == faults


# -- the command line and pods ----------------------------------------------------------------


def arguments(machine: kubevirt_stages.Setup, *path: str) -> list[str]:
    url = machine.server.url(*path, scheme="kubevirt")
    return ["--ca-file", str(machine.authority.certificate), url]


def test_command_line_imports_and_inspects(machine: kubevirt_stages.Setup, tmp_path: Path) -> None:
    given, env = arguments(machine, *RAW), {"IMPORTER_EXPORT_TOKEN": kubevirt.TOKEN}
    done = worker.call("inspect", "--json", *given, env=env)
    assert (done.status, json.loads(done.output)["format"]) == (0, "raw"), done.errors
    done = worker.call("import", "--dry-run", *given, machine.disk, env=env)
    assert (done.status, machine.disk.exists()) == (0, False), done.errors
    (tmp_path / "token").write_text(kubevirt.TOKEN)
    done = worker.call("import", f"--export-token-file={tmp_path / 'token'}", *given, machine.disk)
    assert done.status == 0, done.errors
    assert kubevirt.TOKEN not in done.errors + done.output
    oracle.same(machine.disk, machine.directory / "first.raw")


def test_exit_status_says_what_failed(machine: kubevirt_stages.Setup) -> None:
    for token, status in (("", 2), ("wrong-token", 3)):
        env = {"IMPORTER_EXPORT_TOKEN": token}
        done = worker.call("import", *arguments(machine, *RAW), machine.disk, env=env)
        assert done.status == status
        assert "wrong-token" not in done.errors


def test_pod_imports_a_stage(machine: kubevirt_stages.Setup, pod: worker.Pod) -> None:
    first = machine.checkpoint()
    certificates = machine.directory / "certs"
    certificates.mkdir()
    (certificates / "ca.crt").write_text(machine.authority.certificate.read_text())
    pod.env |= {
        "IMPORTER_SOURCE": "kubevirt",
        "IMPORTER_ENDPOINT": machine.server.url("exports", "root", "map"),
        "IMPORTER_EXPORT_TOKEN": kubevirt.TOKEN,
        "IMPORTER_CERT_DIR": str(certificates),
    }
    with machine.backup():
        done = pod.call(IMPORTER_CURRENT_CHECKPOINT=first)
    assert done.status == 0, done.errors
    oracle.same(pod.disk, machine.content(first))
    second = machine.checkpoint(*kubevirt_stages.FIRST)
    with machine.backup(since=first):
        done = pod.call(IMPORTER_PREVIOUS_CHECKPOINT=first, IMPORTER_CURRENT_CHECKPOINT=second)
    assert done.status == 0, done.errors
    oracle.same(pod.disk, machine.content(second))


@pytest.mark.parametrize(
    ("path", "current"), [(RAW, "snapshot-1"), (RAW, ""), (("exports", "root", "map"), "snapshot-1")]
)
def test_killed_import_resumes_if_the_state_has_a_name(
    machine: kubevirt_stages.Setup, path: tuple[str, ...], current: str
) -> None:
    """KubeVirt sends no ETag and no date: only the name of a checkpoint tells that the disk is the same."""
    raw = machine.directory / "noise.raw"
    with Path("/dev/urandom").open("rb") as noise:
        raw.write_bytes(noise.read(64 * MIB))
    data = raw.read_bytes()
    machine.server.volumes["root"] = raw
    machine.server.backups["root"] = kubevirt.Plain(data, [(0, len(data), 0)])
    machine.server.slow = 16 * MIB
    given = [*arguments(machine, *path), str(machine.disk), "--progress=none", "--force"]
    given += [f"--current-checkpoint={current}"] if current else []
    env = {"IMPORTER_EXPORT_TOKEN": kubevirt.TOKEN}
    end = "/disk.img" if path == RAW else "/data"
    with worker.started("import", *given, env=env) as process:
        processes.wait_for(lambda: machine.server.sent(end) > 48 * MIB, "most of the disk")
        process.send_signal(signal.SIGTERM)
        process.wait(processes.PATIENCE)
    machine.server.slow = 0
    machine.server.seen.clear()
    done = worker.call("import", *given, env=env)
    assert done.status == 0, done.errors
    oracle.same(machine.disk, raw)
    # Of a weak identity, a sample of 6 MiB is fetched again, with some of what lies between its places.
    assert (machine.server.sent(end) < 40 * MIB) == bool(current)
