"""The report of an import: an in-toto statement with SLSA provenance, and no secrets."""

from __future__ import annotations

import hashlib
import json
import random
import re
import threading
from pathlib import Path
from typing import Any

import pytest

import cdi_worker
from cdi_worker import errors, version
from cdi_worker.importer.report import provenance
from tests.support import (
    containers,
    manifests,
    misbehave,
    oracle,
    ovas,
    processes,
    registries,
    signing,
    worker,
)
from tests.support import disks as disks_module

MIB = 1 << 20
DATA = random.Random(3).randbytes(3 * MIB)
SHA256 = hashlib.sha256(DATA).hexdigest()
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


def read(path: Path) -> dict[str, Any]:
    return checked(json.loads(path.read_text()))


def checked(statement: dict[str, Any]) -> dict[str, Any]:
    """Check a statement against the specifications of in-toto and SLSA, and return it."""
    assert set(statement) == {"_type", "subject", "predicateType", "predicate"}
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    for each in statement["subject"]:
        assert re.fullmatch("[0-9a-f]{64}", each["digest"]["sha256"])
    definition, details = (statement["predicate"][name] for name in ("buildDefinition", "runDetails"))
    assert set(statement["predicate"]) == {"buildDefinition", "runDetails"}
    assert definition["buildType"].startswith("urn:")
    assert definition["externalParameters"]
    for each in definition["resolvedDependencies"]:
        assert set(each) <= {"name", "uri", "digest"}
        assert "uri" in each
        assert all(re.fullmatch("[0-9a-f]+", value) for value in each.get("digest", {}).values())
    assert details["builder"] == {"id": "urn:cdi-worker", "version": {"cdi-worker": version.VERSION}}
    assert set(details) == {"builder", "metadata", "cdiWorker_disks"}
    assert TIME.fullmatch(details["metadata"]["startedOn"])
    assert details["metadata"]["startedOn"] <= details["metadata"]["finishedOn"]
    return statement


def only_disk(statement: dict[str, Any]) -> dict[str, Any]:
    (disk,) = statement["predicate"]["runDetails"]["cdiWorker_disks"]
    return dict(disk)


def test_disk_in_a_qcow2_file(server: misbehave.Server, tmp_path: Path) -> None:
    url = server.serve("/disk.raw", misbehave.Page(DATA))
    target, base, report = (tmp_path / name for name in ("vm.qcow2", "base", "report.json"))
    base.write_bytes(bytes(MIB))
    form = ("--format=qcow2,compression_type=zstd", "--compress", "--backing", base)
    done = worker.run("import", url, target, *form, "--verify", "--report", report)
    assert done.status == 0, done.errors
    found = read(report)
    # Of the disk that a guest sees, not of the file.
    assert found["subject"] == [{"name": str(target), "digest": {"sha256": SHA256}}]
    asked = found["predicate"]["buildDefinition"]["externalParameters"]
    assert (asked["format"], asked["compress"], asked["backing"]) == (form[0][9:], True, str(base))


def test_http_with_a_checksum(server: misbehave.Server, tmp_path: Path) -> None:
    url = server.serve("/disk.raw", misbehave.Page(DATA))
    target, report = tmp_path / "disk.img", tmp_path / "report.json"
    done = worker.run("import", url, target, f"--checksum=SHA256:{SHA256}", "--report", report)
    assert done.status == 0, done.errors
    found = read(report)
    # All bytes that were hashed are those of the disk: nothing was read again.
    assert found["subject"] == [{"name": str(target), "digest": {"sha256": SHA256}}]
    definition = found["predicate"]["buildDefinition"]
    asked = definition["externalParameters"]
    assert (asked["source"], asked["address"], asked["target"]) == ("http", url, str(target))
    assert definition["resolvedDependencies"] == [{"name": "file", "uri": url, "digest": {"sha256": SHA256}}]
    disk = only_disk(found)
    assert (disk["size"], disk["route"], disk["format"], disk["resumed"]) == (3 * MIB, "stream", "raw", 0)
    assert disk["read"] >= 3 * MIB
    assert disk["served"]["size"] == 3 * MIB
    assert disk["served"]["verified"] == {"file": f"sha256:{SHA256}"}
    assert [each.name for each in tmp_path.iterdir() if each.suffix == ".part"] == []


def test_digest_of_the_source_is_not_that_of_the_disk(
    server: misbehave.Server, disks: disks_module.Disks, tmp_path: Path
) -> None:
    image = disks.image("qcow2").read_bytes()
    digest = hashlib.sha256(image).hexdigest()
    url = server.serve("/disk.qcow2", misbehave.Page(image))
    target, report = tmp_path / "disk.img", tmp_path / "report.json"
    options = (f"--checksum=sha256:{digest}", "--report", report)
    assert worker.run("import", url, target, *options).status == 0
    found = read(report)
    assert found["subject"] == []
    assert found["predicate"]["buildDefinition"]["resolvedDependencies"][0]["digest"] == {"sha256": digest}
    assert only_disk(found)["sha256"] is None
    # The user asks to read the disk back.
    assert worker.run("import", url, target, "--force", "--verify", *options).status == 0
    expected = hashlib.sha256(target.read_bytes()).hexdigest()
    assert read(report)["subject"] == [{"name": str(target), "digest": {"sha256": expected}}]


def test_grown_disk_has_another_digest(server: misbehave.Server, tmp_path: Path) -> None:
    url = server.serve("/disk.raw", misbehave.Page(DATA))
    target, report = tmp_path / "disk.img", tmp_path / "report.json"
    options = (f"--checksum=sha256:{SHA256}", "--size=4Mi", "--report", report)
    assert worker.run("import", url, target, *options).status == 0
    assert read(report)["subject"] == []


def test_no_secrets(server: misbehave.Server, tmp_path: Path) -> None:
    url = server.serve("/disk.raw", misbehave.Page(DATA))
    password = tmp_path / "password"
    password.write_text("hidden-password")
    address = url.replace("://", "://me:hidden-in-url@") + "?X-Amz-Signature=hidden-signature"
    server.serve("/disk.raw?X-Amz-Signature=hidden-signature", misbehave.Page(DATA))
    report = tmp_path / "report.json"
    done = worker.run(
        "import", address, tmp_path / "disk.img", "--report", report, "--user=me",
        "--header=X-Token: hidden-x", "--password-file", password,
    )  # fmt: skip
    assert done.status == 0, done.errors
    assert "hidden" not in report.read_text()
    assert read(report)["predicate"]["buildDefinition"]["externalParameters"]["address"] == f"{url}?…"


def test_registry_with_a_signature(
    guarded: registries.Registry, pod: worker.Pod, disks: disks_module.Disks, tmp_path: Path
) -> None:
    signer = signing.Signer()
    digest = guarded.push("audited", containers.image_of(disks.raw()))
    signing.attach(guarded, "audited", digest, signer.simple(digest, f"{guarded.host}/audited"))
    assert guarded.authority
    (tmp_path / "certs").mkdir()
    (tmp_path / "certs/ca.crt").write_bytes(guarded.authority.certificate.read_bytes())
    report, key = tmp_path / "report.json", signer.write(tmp_path / "key.pem")
    done = pod.run(
        IMPORTER_SOURCE="registry",
        IMPORTER_ENDPOINT=guarded.reference("audited"),
        IMPORTER_CERT_DIR=str(tmp_path / "certs"),
        IMPORTER_ACCESS_KEY_ID=registries.USER,
        IMPORTER_SECRET_KEY=registries.PASSWORD,
        CDI_WORKER_SIGNED_BY=key,
        CDI_WORKER_REPORT=str(report),
        CDI_WORKER_READ_BACK="true",
    )
    assert done.status == 0, done.errors
    oracle.same(pod.disk, disks.raw())
    found = read(report)
    assert registries.PASSWORD not in report.read_text()
    assert found["subject"][0]["digest"]["sha256"] == hashlib.sha256(pod.disk.read_bytes()).hexdigest()
    manifest, layer = found["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert (manifest["name"], manifest["digest"]) == ("manifest", {"sha256": digest.removeprefix("sha256:")})
    assert layer["name"] == "layer"
    assert found["predicate"]["buildDefinition"]["externalParameters"]["demand"]["signed_by"] == key
    (claims,) = only_disk(found)["signatures"]
    assert claims["signer"].startswith("key SHA256:")
    assert claims["digest"] == digest


class Midway(cdi_worker.NullProgress):
    """Cancels an import when half of the disk has arrived."""

    def __init__(self) -> None:
        self.cancel = threading.Event()
        self.count = 0

    def read(self, count: int) -> None:
        self.count += count
        if self.count > len(DATA) // 2:
            self.cancel.set()


@pytest.mark.parametrize("checksum", [None, f"sha256:{SHA256}"])
def test_resumed_import(server: misbehave.Server, tmp_path: Path, checksum: str | None) -> None:
    url = server.serve("/disk.raw", misbehave.Page(DATA, drip=(64 << 10, 0.05)))
    wanted = cdi_worker.Request(
        source="http",
        location=cdi_worker.Location(url),
        target=str(tmp_path / "disk.img"),
        checksum=checksum,
        journal_interval=0.05,
        fetch=cdi_worker.FetchOptions(connections=2, chunk=MIB),
    )
    half = Midway()
    with pytest.raises(errors.Cancelled):
        cdi_worker.run(wanted, half, half.cancel)
    server.serve("/disk.raw", misbehave.Page(DATA))
    result = cdi_worker.run(wanted)
    assert (tmp_path / "disk.img").read_bytes() == DATA
    assert (result.origin, result.served) == (url, 3 * MIB)
    assert result.identity
    # What an earlier attempt wrote was hashed by nobody in this one.
    assert bool(result.sha256) == bool(checksum and not result.resumed)
    assert checksum or result.resumed
    disk = only_disk(checked(provenance.statement(wanted, [result], "2026-01-01T00:00:00Z")))
    assert (disk["resumed"], disk["read"]) == (result.resumed, result.read)
    assert disk["served"]["identity"] == result.identity


@pytest.mark.parametrize("ranges", [True, False])
def test_all_disks_of_an_ova(server: misbehave.Server, tmp_path: Path, *, ranges: bool) -> None:
    packed = ovas.ova(ovas.Disk(DATA, "a.bin"), ovas.Disk(DATA[::-1], "b.bin"))
    url = server.serve("/vm.ova", misbehave.Page(packed, ranges=ranges))
    digest = hashlib.sha256(packed).hexdigest()
    folder, report = tmp_path / "disks", tmp_path / "report.json"
    folder.mkdir()
    options = (f"--checksum=sha256:{digest}", "--verify", "--report", report)
    done = worker.run("import", "--all", url, folder, *options)
    assert done.status == 0, done.errors
    found = read(report)
    expected = [hashlib.sha256(data).hexdigest() for data in (DATA, DATA[::-1])]
    assert [each["digest"]["sha256"] for each in found["subject"]] == expected
    package = {"name": "file", "uri": url, "digest": {"sha256": digest}}
    assert found["predicate"]["buildDefinition"]["resolvedDependencies"] == [package]


def test_one_disk_of_an_ova_does_not_have_its_digest(server: misbehave.Server, tmp_path: Path) -> None:
    packed = ovas.ova(ovas.Disk(DATA, "a.bin"))
    url = server.serve("/vm.ova", misbehave.Page(packed))
    digest, report = hashlib.sha256(packed).hexdigest(), tmp_path / "report.json"
    options = (f"--checksum=sha256:{digest}", "--report", report)
    assert worker.run("import", url, tmp_path / "disk.img", *options).status == 0
    found = read(report)
    assert found["subject"] == []
    (package,) = found["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert (package["uri"], package["digest"]) == (url, {"sha256": digest})


def test_update_and_manifest(server: misbehave.Server, tmp_path: Path) -> None:
    workspace = manifests.Workspace(tmp_path)
    url = server.serve("/disk.raw", misbehave.Page(DATA))
    workspace.volume({"http": {"url": url, "checksum": f"sha256:{SHA256}"}}, size="3Mi")
    report = tmp_path / "report.json"
    done = workspace.run("--report", report)
    assert done.status == 0, done.errors
    assert read(report)["subject"][0]["digest"] == {"sha256": SHA256}
    done = workspace.run("--report", report, "--update")
    assert done.status == 0, done.errors
    assert only_disk(read(report))["update"]["differed"] == 0
    assert workspace.run("--report=-").status == 2


def test_chain(tmp_path: Path) -> None:
    base, top = tmp_path / "base.qcow2", tmp_path / "top.qcow2"
    processes.run("qemu-img", "create", "-q", "-f", "qcow2", base, "3M")
    processes.run("qemu-img", "create", "-q", "-f", "qcow2", "-b", base, "-F", "qcow2", top)
    report = tmp_path / "report.json"
    done = worker.run("import", base, tmp_path / "disk.img", "--layer", top, "--report", report)
    assert done.status == 0, done.errors
    found = read(report)
    assert found["predicate"]["buildDefinition"]["externalParameters"]["layers"] == [str(top)]
    assert len(only_disk(found)["chain"]) == 2


@pytest.mark.parametrize("is_there", [True, False])
def test_report_is_not_written_through_a_link(
    server: misbehave.Server, tmp_path: Path, *, is_there: bool
) -> None:
    url = server.serve("/disk.raw", misbehave.Page(DATA))
    victim, link, target = (tmp_path / name for name in ("victim", "report.json", "disk.img"))
    if is_there:
        victim.write_text("precious")
    link.symlink_to(victim)
    done = worker.run("import", url, target, "--report", link)
    assert (done.status, done.error_message) == (
        2, f"--report {link}: is a symbolic link; name the file itself",
    )  # fmt: skip
    assert link.is_symlink()
    assert not target.exists()
    assert victim.exists() == is_there
    assert not is_there or victim.read_text() == "precious"


def test_link_made_during_the_import_is_replaced_not_followed(tmp_path: Path) -> None:
    wanted = cdi_worker.Request(
        source="none", location=cdi_worker.Location(""), target=str(tmp_path / "d"), image_size=MIB
    )
    path, victim = tmp_path / "report.json", tmp_path / "victim"
    report = provenance.Report(str(path), wanted)
    victim.write_text("precious")
    path.symlink_to(victim)
    report.write([cdi_worker.run(wanted)])
    assert (victim.read_text(), path.is_symlink()) == ("precious", False)
    read(path)


@pytest.mark.parametrize("kind", ["no folder", "a folder", "a device", "the target"])
def test_report_that_cannot_be_written(server: misbehave.Server, tmp_path: Path, kind: str) -> None:
    url = server.serve("/disk.raw", misbehave.Page(DATA))
    target = tmp_path / "disk.img"
    path = {
        "no folder": tmp_path / "none/report.json", "a folder": tmp_path, "a device": Path("/dev/null"),
        "the target": target,
    }[kind]  # fmt: skip
    done = worker.run("import", url, target, "--report", path)
    assert done.status == 2, done.errors
    assert f"--report {path}: " in done.error_message
    assert not target.exists()
    assert not server.requests


def test_report_on_standard_output(server: misbehave.Server, tmp_path: Path) -> None:
    url = server.serve("/disk.raw", misbehave.Page(DATA))
    done = worker.run("import", url, tmp_path / "disk.img", "--report=-")
    assert done.status == 0, done.errors
    checked(json.loads(done.output))
    assert "imported" in done.errors
    refused = worker.run("import", url, "-", "--report=-")
    assert (refused.status, refused.output) == (2, "")
    assert "standard output gets the disk" in refused.error_message


def test_failed_import_leaves_the_report(server: misbehave.Server, tmp_path: Path) -> None:
    url = server.serve("/disk.raw", misbehave.Page(DATA))
    report = tmp_path / "report.json"
    report.write_text("of an earlier import")
    done = worker.run("import", url, tmp_path / "disk.img", f"--checksum=md5:{'0' * 32}", "--report", report)
    assert done.status != 0
    assert report.read_text() == "of an earlier import"
    assert sorted(each.name for each in tmp_path.iterdir() if "report" in each.name) == ["report.json"]


def test_write_failure_after_the_import(tmp_path: Path) -> None:
    folder = tmp_path / "reports"
    folder.mkdir()
    wanted = cdi_worker.Request(
        source="none", location=cdi_worker.Location(""), target=str(tmp_path / "d"), image_size=MIB
    )
    report = provenance.Report(str(folder / "report.json"), wanted)
    folder.rmdir()
    with pytest.raises(errors.TargetError, match="the disk is complete, its report is not"):
        report.write([cdi_worker.run(wanted)])
    assert (tmp_path / "d").stat().st_size == MIB


def test_library_reads_back_and_reports(server: misbehave.Server, tmp_path: Path) -> None:
    url = server.serve("/disk.raw", misbehave.Page(DATA))
    target, report = tmp_path / "disk.img", tmp_path / "report.json"
    done = cdi_worker.run(
        cdi_worker.Request(
            source="http",
            location=cdi_worker.Location(url),
            target=str(target),
            report=str(report),
            read_back=True,
        )
    )
    assert done.sha256 == SHA256
    assert read(report)["subject"] == [{"name": str(target), "digest": {"sha256": SHA256}}]


def test_digest_of_an_archive_is_refused_at_once(server: misbehave.Server, tmp_path: Path) -> None:
    url = server.serve("/files.tar", misbehave.Page(DATA))
    done = worker.run("import", url, tmp_path, "--content-type=archive", "--verify")
    assert (done.status, server.requests) == (2, [])
    assert "an archive is not a disk" in done.error_message
