"""The report in every role and command: uploads, clones, blank disks, populators, stages, dry runs."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.importer import contract
from cdi_worker.importer.send import volume
from cdi_worker.importer.upload import settings
from tests.importer.report.test_provenance import DATA, SHA256, only_disk, read
from tests.support import clones, manifests, misbehave, processes, uploads, worker

MIB = 1 << 20


def reporting(paths: contract.Paths, report: Path, *, read_back: bool = False) -> contract.Paths:
    settings = paths.settings._replace(report=str(report), read_back=read_back)
    return paths._replace(settings=settings)


@pytest.mark.parametrize("way", ["checksum", "read back", "neither"])
def test_upload(
    certificates: uploads.Certificates, paths: contract.Paths, disk: Path, tmp_path: Path, way: str
) -> None:
    report = tmp_path / "report.json"
    headers = {"x-cdi-checksum": f"sha256:{SHA256}"} if way == "checksum" else {}
    where = reporting(paths, report, read_back=way == "read back")
    with uploads.Server(certificates, {}, where) as server:
        # Nothing but a check so far.
        assert not report.exists()
        assert server.ask("POST", uploads.SYNC, DATA, headers).status == 200
        assert server.result().status == 0
    found = read(report)
    known = [{"name": str(disk), "digest": {"sha256": SHA256}}]
    assert found["subject"] == ([] if way == "neither" else known)
    (source,) = found["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert (source["name"], source["uri"]) == ("file", "urn:cdi-worker:upload")
    assert source.get("digest") == ({"sha256": SHA256} if way == "checksum" else None)
    asked = found["predicate"]["buildDefinition"]["externalParameters"]
    assert (asked["source"], asked["target"], "address" in asked) == ("upload", str(disk), False)
    assert (only_disk(found)["size"], only_disk(found)["read"]) == (3 * MIB, 3 * MIB)


def test_upload_without_its_report_fails(
    certificates: uploads.Certificates, paths: contract.Paths, tmp_path: Path
) -> None:
    reports = tmp_path / "reports"
    reports.mkdir()
    with uploads.Server(certificates, {}, reporting(paths, reports / "report.json")) as server:
        reports.rmdir()
        answer = server.ask("POST", uploads.SYNC, DATA)
        assert (answer.status, "cannot be written" in answer.text) == (400, True)
        assert server.running


def test_upload_server_refuses_a_report_that_cannot_be_written(
    certificates: uploads.Certificates, paths: contract.Paths, tmp_path: Path
) -> None:
    env = uploads.Server(certificates, {}, paths).env
    with pytest.raises(errors.RequestError, match=r"none/report\.json: cannot be written"):
        settings.read(env, reporting(paths, tmp_path / "none/report.json"))


@pytest.mark.parametrize("mode", ["block", "filesystem"])
def test_clone(
    certificates: uploads.Certificates, paths: contract.Paths, original: Path, tmp_path: Path, mode: str
) -> None:
    """The target's upload server writes the report."""
    report = tmp_path / "report.json"
    source = original if mode == "block" else clones.fill_volume(tmp_path / "volume")
    with uploads.Server(certificates, {}, reporting(paths, report, read_back=True)) as server:
        assert clones.run(clones.environment(server, mode, source)) == "Clone Complete"
        assert server.result().status == 0
    found = read(report)
    if mode == "block":
        assert found["subject"][0]["digest"] == {"sha256": hashlib.sha256(original.read_bytes()).hexdigest()}
    assert found["predicate"]["buildDefinition"]["externalParameters"]["source"] == "upload"


def test_clone_source_refuses_it(
    certificates: uploads.Certificates, paths: contract.Paths, original: Path, tmp_path: Path
) -> None:
    env = clones.environment(uploads.Server(certificates, {}, paths), "block", original)
    where = reporting(contract.Paths(metrics_port=0), tmp_path / "report.json")
    with pytest.raises(errors.RequestError, match="a clone source writes no disk; set it for the upload"):
        volume.run(env, where, cancelling.Cancel())


def test_blank_disk(tmp_path: Path) -> None:
    target, report = tmp_path / "disk.img", tmp_path / "report.json"
    done = worker.run("blank", target, "1Mi", "--report", report)
    assert done.status == 0, done.errors
    found = read(report)
    assert found["subject"] == found["predicate"]["buildDefinition"]["resolvedDependencies"] == []
    assert found["predicate"]["buildDefinition"]["externalParameters"]["size"] == MIB
    assert (only_disk(found)["route"], only_disk(found)["size"]) == ("blank", MIB)


def test_blank_disk_of_a_pod(pod: worker.Pod, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = pod.run(IMPORTER_SOURCE="none", IMPORTER_IMAGE_SIZE="1Mi", CDI_WORKER_REPORT=str(report))
    assert done.status == 0, done.errors
    assert only_disk(read(report))["route"] == "blank"


def test_each_stage_of_a_migration(server: misbehave.Server, tmp_path: Path) -> None:
    workspace = manifests.Workspace(tmp_path)
    base, top = tmp_path / "base.qcow2", tmp_path / "top.qcow2"
    processes.run("qemu-img", "create", "-q", "-f", "qcow2", base, "3M")
    processes.run("qemu-img", "create", "-q", "-f", "qcow2", "-b", base.name, "-F", "qcow2", top)
    urls = [server.serve(f"/{each.name}", misbehave.Page(each.read_bytes())) for each in (base, top)]
    stages = [{"previous": "", "current": base.name}, {"previous": base.name, "current": top.name}]
    report = tmp_path / "report.json"
    source = {"http": {"url": urls[0]}}
    workspace.volume(source, checkpoints=stages[:1], finalCheckpoint=False, size="3Mi")
    assert workspace.run("--report", report).status == 0
    first = read(report)["predicate"]["buildDefinition"]
    assert first["externalParameters"]["stage"] == {"previous": "", "current": "base.qcow2", "final": False}
    assert first["resolvedDependencies"] == [{"name": "file", "uri": urls[0]}]
    workspace.documents.clear()
    workspace.volume(source, checkpoints=stages, finalCheckpoint=True, size="3Mi")
    done = workspace.run("--report", report, "--after", base.name)
    assert done.status == 0, done.errors
    last = read(report)
    asked = last["predicate"]["buildDefinition"]["externalParameters"]
    assert asked["stage"] == {"previous": "base.qcow2", "current": "top.qcow2", "final": True}
    assert urls[1] in str(last["predicate"]["buildDefinition"]["resolvedDependencies"])
    assert last["subject"] == []


def test_dry_run_says_that_there_is_no_report(tmp_path: Path) -> None:
    (tmp_path / "disk.raw").write_bytes(DATA)
    report = tmp_path / "report.json"
    done = worker.run("import", "--dry-run", tmp_path / "disk.raw", tmp_path / "disk.img", "--report", report)
    assert (done.status, "no report is written" in done.errors) == (0, True), done.errors
    assert not report.exists()


#: Counts the directories that are synced, in a file.
LIBRARY = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
int fsync(int fd) {
    struct stat found;
    if (!fstat(fd, &found) && S_ISDIR(found.st_mode)) {
        FILE *log = fopen(getenv("SYNCED"), "a");
        fprintf(log, "%lu\\n", (unsigned long)found.st_ino);
        fclose(log);
    }
    return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(fd);
}
"""


def test_report_survives_a_crash_of_the_machine(tmp_path: Path) -> None:
    """Its folder is synced after the rename."""
    (tmp_path / "synced.c").write_text(LIBRARY)
    library, log = tmp_path / "synced.so", tmp_path / "synced"
    processes.run("gcc", "-shared", "-fPIC", "-o", library, tmp_path / "synced.c", "-ldl")
    folder, disks = tmp_path / "reports", tmp_path / "disks"
    folder.mkdir()
    disks.mkdir()
    env = {"LD_PRELOAD": str(library), "SYNCED": str(log)}
    done = worker.run("blank", disks / "disk.img", "1Mi", "--report", folder / "report.json", env=env)
    assert done.status == 0, done.errors
    assert str(folder.stat().st_ino) in log.read_text().split()
