"""``import cdi_worker``: the public API for other programs."""

from __future__ import annotations

import base64
import concurrent.futures
import dataclasses
import logging
import os
import random
import re
import signal
import subprocess
import sys
import threading
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker import errors
from cdi_worker.importer import together
from tests.support import disks as disks_module
from tests.support import http_disk, misbehave, processes, repository, servers, tls


class Recorder(cdi_worker.NullProgress):
    """A progress that records its calls."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, int | None]] = []
        self.moved = self.skipped = 0
        self.finished = False
        self._lock = threading.Lock()

    def phase(self, name: str, total: int | None) -> None:
        self.phases.append((name, total))

    def advance(self, count: int) -> None:
        with self._lock:
            self.moved += count

    def skip(self, count: int) -> None:
        with self._lock:
            self.skipped += count

    def done(self) -> None:
        self.finished = True


def request(url: str, target: Path, **changes: object) -> cdi_worker.Request:
    changes = {"existing": "replace", "location": cdi_worker.Location(url), **changes}
    return cdi_worker.Request(target=str(target), **changes)


def test_public_names_exist_and_are_documented() -> None:
    for name in cdi_worker.__all__:
        assert getattr(cdi_worker, name).__doc__, name
    assert dir(cdi_worker) == sorted(cdi_worker.__all__)
    with pytest.raises(AttributeError):
        _ = cdi_worker.nothing


def test_version_is_that_of_the_distribution() -> None:
    assert cdi_worker.__version__ == metadata.version("cdi-worker")


def test_user_packages_do_not_shadow_ours(tmp_path: Path) -> None:
    """Only ``cdi_worker`` is installed, so a user's folder may have the name of one of its parts."""
    for name in ("importer", "sources", "images", "formats", "scratch"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise AssertionError(__name__)")
    script = tmp_path / "script.py"
    script.write_text("import cdi_worker, cdi_worker.images.volume\nprint(cdi_worker.run.__name__)")
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "run\n"


OVERVIEW, METER, INSPECT, ASYNCIO, OWN_SOURCE = repository.programs()


def script(code: str, folder: Path, url: str = "") -> list[str | Path]:
    """Return the command that runs a program of the page, with addresses of this machine."""
    code = code.replace("https://example.org/disk.qcow2", url)
    code = code.replace("/var/lib/images/disk.img", str(folder / "disk.img"))
    code = code.replace(', cdi_worker.Access(ca_files=("ca.pem",))', "")
    path = folder / "program.py"
    path.write_text(code)
    return [sys.executable, path]


def run_program(code: str, folder: Path, url: str = "") -> subprocess.CompletedProcess[str]:
    """Run a program of the page in ``folder``."""
    return subprocess.run(
        script(code, folder, url),
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(repository.ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_documented_example_works(disks: disks_module.Disks, web: servers.Web, tmp_path: Path) -> None:
    done = run_program(OVERVIEW, tmp_path, web.url(disks.image("qcow2")))
    assert done.returncode == 0, done.stderr
    assert "qcow2" in done.stdout
    assert "place" in done.stdout
    processes.run("cmp", tmp_path / "disk.img", disks.image("raw"))


def test_documented_meter_shows_progress_to_the_end(
    disks: disks_module.Disks, web: servers.Web, tmp_path: Path
) -> None:
    done = run_program(METER, tmp_path, web.url(disks.image("qcow2")))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path}/disk.img: {disks.image('raw').stat().st_size} bytes\n"
    # A short import has one line.
    assert done.stderr.splitlines()[-1] == "100.0% done"
    processes.run("cmp", tmp_path / "disk.img", disks.image("raw"))


def test_documented_program_is_cancelled_with_ctrl_c(tmp_path: Path) -> None:
    root, folder = tmp_path / "root", tmp_path / "nginx"
    root.mkdir()
    folder.mkdir()
    (root / "disk.qcow2").write_bytes(random.Random(1).randbytes(32 << 20))
    with (
        servers.nginx(folder, root, servers.Settings(limit_rate=512 << 10)) as slow,
        subprocess.Popen(
            script(METER, tmp_path, slow.url("disk.qcow2")),
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(repository.ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        ) as running,
    ):
        part = tmp_path / "disk.img.part"
        processes.wait_for(lambda: part.exists() and part.stat().st_blocks, "data")
        running.send_signal(signal.SIGINT)
        _, text = running.communicate(timeout=30)
    assert (running.returncode, text) == (errors.Cancelled.status, "cancelled\n")
    assert not (tmp_path / "disk.img").exists()


def test_documented_inspection_needs_no_target(
    disks: disks_module.Disks, web: servers.Web, tmp_path: Path
) -> None:
    url, size = web.url(disks.image("qcow2")), disks.image("raw").stat().st_size
    done = run_program(INSPECT, tmp_path, url)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == f"{url}: qcow2, a disk of {size} bytes"
    assert second.startswith("place: ")
    assert [each.name for each in tmp_path.iterdir()] == ["program.py"]


def test_documented_task_imports_and_is_cancelled(
    disks: disks_module.Disks, web: servers.Web, server: misbehave.Server, tmp_path: Path
) -> None:
    done = run_program(ASYNCIO, tmp_path, web.url(disks.image("qcow2")))
    assert done.stdout == f"{disks.image('raw').stat().st_size}\n", done.stderr
    (tmp_path / "disk.img").unlink()
    slow = misbehave.Page(random.Random(1).randbytes(32 << 20), drip=(64 << 10, 0.2))
    code = ASYNCIO.replace("timeout=3600", "timeout=1")
    done = run_program(code, tmp_path, server.serve("/disk", slow))
    assert done.stderr.splitlines()[-1].startswith("TimeoutError")
    assert not (tmp_path / "disk.img").exists()


def test_library_prints_nothing_by_itself(tmp_path: Path) -> None:
    code = "import logging, cdi_worker; logging.getLogger('cdi_worker.importer').error('not for you')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_import_is_fast() -> None:
    """CPU time, at best of five: other work on the machine does not count."""
    code = (
        "import time, cdi_worker\n"
        "[getattr(cdi_worker, name) for name in cdi_worker.__all__ if name != '__version__']\n"
        "print(time.process_time())"
    )
    empty = "import time; print(time.process_time())"
    times = {
        each: min(
            float(subprocess.run([sys.executable, "-c", each], capture_output=True, check=True).stdout)
            for _ in range(5)
        )
        for each in (code, empty)
    }
    assert times[code] - times[empty] < 0.15


def test_inspection_of_an_address(disks: disks_module.Disks, web: servers.Web) -> None:
    found = cdi_worker.inspect(web.url(disks.image("qcow2")))
    assert (found.survey.format, found.obstacle) == ("qcow2", None)
    assert cdi_worker.inspect(str(disks.image("vhdx-log"))).plan is not None
    with pytest.raises(errors.RequestError, match="unsupported URL scheme"):
        cdi_worker.inspect("gopher://host/disk")
    with pytest.raises(errors.SourceError, match="404"):
        cdi_worker.inspect(web.url("absent"))


def test_obstacle_is_a_target_that_exists(
    disks: disks_module.Disks, web: servers.Web, tmp_path: Path
) -> None:
    (tmp_path / "disk.img").write_bytes(b"something")
    wanted = request(web.url(disks.image("qcow2")), tmp_path / "disk.img")
    assert cdi_worker.inspect(wanted).obstacle is None
    found = cdi_worker.inspect(dataclasses.replace(wanted, existing="refuse"))
    assert isinstance(found.obstacle, errors.TargetExists)
    assert found.plan is None


def test_documented_source_of_ones_own_is_imported(disks: disks_module.Disks, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "disk.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(disks.image("qcow2"), "disk.qcow2")
    done = run_program(OWN_SOURCE, tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{disks.image('raw').stat().st_size}\n"), done.stderr
    processes.run("cmp", tmp_path / "disk.img", disks.image("raw"))


def test_missing_target_is_reported_with_all_other_faults() -> None:
    wanted = cdi_worker.Request(source="http", location=cdi_worker.Location(""), content_type="disc")
    for run in (cdi_worker.run, together.run_all):
        with pytest.raises(errors.RequestError) as caught:
            run(wanted)
        assert caught.value.faults == (
            "no target given: name a file, a directory or a device",
            "unknown content type 'disc'; supported: kubevirt, archive",
            "no endpoint (IMPORTER_ENDPOINT) given",
        )


def test_values_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    location = cdi_worker.Location(str(tmp_path / "image"))
    wanted = cdi_worker.Request(source="local", location=location, target=str(tmp_path / "disk.img"))
    for changes, fault in (
        ({"existing": "replaced"}, "unknown value of existing 'replaced'; did you mean 'replace'?"),
        ({"existing": "compare"}, "unknown value of existing 'compare'; supported: refuse"),
        ({"image_size": -1}, "a disk of -1 bytes; give its size, or leave it out"),
    ):
        with pytest.raises(errors.RequestError, match=re.escape(fault)) as caught:
            cdi_worker.run(dataclasses.replace(wanted, **changes))
        assert len(caught.value.faults) == 1


def test_address_in_place_of_a_request_or_a_location_is_refused() -> None:
    for call in (cdi_worker.run, cdi_worker.verify, together.run_all):
        with pytest.raises(errors.RequestError, match=r"expected cdi_worker\.Request\(.*, not str"):
            call("http://localhost/disk.img")  # type: ignore[operator]
    with pytest.raises(errors.RequestError, match=r"expected cdi_worker\.Location\(URL\), not str"):
        cdi_worker.Request(location="http://localhost/disk.img")  # type: ignore[arg-type]


def test_kind_of_source_is_that_of_the_address() -> None:
    for address, kind in (("https://localhost/x", "http"), ("s3://bucket/x", "s3"), ("disk.img", "local")):
        made = cdi_worker.Request(location=cdi_worker.Location(address))
        assert made.source == kind
        assert dataclasses.replace(made, source="imageio").source == "imageio"
    with pytest.raises(errors.RequestError, match="unsupported URL scheme 'gopher'"):
        cdi_worker.Request(location=cdi_worker.Location("gopher://localhost/x"))


def test_inspect_without_target_looks_at_no_file_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even at one with the name that a run would make from an empty target."""
    monkeypatch.chdir(tmp_path)
    Path(".part").write_bytes(bytes(1 << 20))
    wanted = cdi_worker.Request(source="local", location=cdi_worker.Location(".part"))
    assert cdi_worker.inspect(wanted).plan is not None


def test_concurrent_imports_in_one_process(
    disks: disks_module.Disks, web: servers.Web, tmp_path: Path
) -> None:
    forms = ["raw", "qcow2", "vmdk", "vhdx"]
    import_requests = [request(web.url(disks.image(form)), tmp_path / f"{form}.img") for form in forms]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        results = list(pool.map(cdi_worker.run, import_requests))
    assert [result.format for result in results] == forms
    for form in forms:
        processes.run("cmp", tmp_path / f"{form}.img", disks.image("raw"))


def test_progress_counts_every_byte_and_ends_once(
    disks: disks_module.Disks, web: servers.Web, tmp_path: Path
) -> None:
    for form in ("raw", "qcow2", "vmdk", "vdi", "vhdx", "vhdx-log"):
        recorder = Recorder()
        cdi_worker.run(request(web.url(disks.image(form)), tmp_path / form), recorder)
        names = [name for name, _ in recorder.phases]
        assert names == ["connect", "transfer", "sync"]
        total = dict(recorder.phases)["transfer"]
        # Parts of tables are read twice. qemu-img does not read what a VHDX does not use.
        assert total is not None
        counted = recorder.moved + recorder.skipped
        assert (total / 2 if form == "vhdx-log" else total) <= counted < total * 1.02
        assert recorder.moved > 0
        assert recorder.finished


def test_failed_import_is_not_done(tmp_path: Path, web: servers.Web) -> None:
    recorder = Recorder()
    with pytest.raises(cdi_worker.Error) as caught:
        cdi_worker.run(request(web.url("missing"), tmp_path / "disk.img"), recorder)
    assert not recorder.finished
    assert (caught.value.status, caught.value.retryable) == (3, False)


@pytest.mark.parametrize("fault", [{"status": 503}, {"cut": 0}])
def test_source_that_only_fails_is_unreachable(
    server: misbehave.Server, tmp_path: Path, fault: dict[str, int]
) -> None:
    """Connecting was tried for a while; controllers distinguish this from a broken transfer."""
    url = server.serve("/disk", misbehave.Page(bytes(4096), **fault))
    with pytest.raises(errors.Unreachable):
        cdi_worker.run(request(url, tmp_path / "disk.img", connect_patience=0.5))
    assert len(server.requests) > 1


def test_inspect_reads_little_and_writes_nothing(
    disks: disks_module.Disks, web: servers.Web, tmp_path: Path
) -> None:
    # The server has clients of other tests, too.
    own = "Basic " + base64.b64encode(b"inspection:only").decode()
    access = cdi_worker.Access(user="inspection", password="only")

    def served() -> list[int]:
        return [int(each["bytes"]) for each in web.requests() if each["authorization"] == own]

    for form in ("raw", "qcow2", "vmdk", "vdi", "vhd", "vhdx"):
        before = len(served())
        url = web.url(disks.image(form))
        wanted = request(url, tmp_path / "disk.img", location=cdi_worker.Location(url, access))
        inspection = cdi_worker.inspect(wanted)
        assert inspection.plan is not None
        processes.wait_for(lambda before=before: len(served()) > before, "the log")
        assert sum(served()[before:]) < 1 << 20
    assert not list(tmp_path.iterdir())


def test_import_can_be_cancelled_before_it_starts(
    disks: disks_module.Disks, web: servers.Web, tmp_path: Path
) -> None:
    cancel = threading.Event()
    cancel.set()
    for form in ("raw", "qcow2", "vmdk", "vhdx"):
        with pytest.raises(cdi_worker.Error, match="cancelled"):
            cdi_worker.run(request(web.url(disks.image(form)), tmp_path / "disk.img"), cancel=cancel)
    assert not (tmp_path / "disk.img").exists()


def test_log_has_no_secrets(
    disks: disks_module.Disks, web: servers.Web, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    url = web.url(disks.image("raw")).replace("://", "://me:hush@") + "?token=hush"
    cdi_worker.run(request(url, tmp_path / "disk.img"))
    assert caplog.records
    ours = [record for record in caplog.records if not record.name.startswith("urllib3")]
    assert not [record for record in ours if "hush" in record.getMessage()]


HOST = """
import logging, sys, warnings
import boto3, google.auth, keystoneauth1.session, requests, urllib3

def state():
    return {name: log.level for name, log in logging.root.manager.loggerDict.items() if hasattr(log, "level")}

before, filters, handlers = state(), list(warnings.filters), list(logging.root.handlers)
import cdi_worker
from cdi_worker.images.engine import cancelling
from cdi_worker.sources import base
from cdi_worker.sources.objects import aws, gcp, locations

access = base.Access(user="x", password="y", insecure=True)
aws.Keys(access, cancelling.NEVER)
gcp.Keys(locations.Gcs("gs://b/o", access), cancelling.NEVER)
target = sys.argv[2]
location = cdi_worker.Location(sys.argv[1], base.Access(insecure=True))
cdi_worker.run(cdi_worker.Request(source="http", location=location, target=target))
after = state()
print({name: level for name, level in after.items() if level != before.get(name, 0)})
print(warnings.filters == filters, logging.root.handlers == handlers, logging.root.level == logging.WARNING)
"""


def test_host_keeps_its_loggers_and_warning_filters(tmp_path: Path) -> None:
    """Also with an unverified connection, of which nothing warns: the program has asked for it."""
    pair = tls.Authority(tmp_path).issue()
    with misbehave.Server(pair) as secure:
        url = secure.serve("/disk", http_disk.GOOD)
        command = [sys.executable, "-c", HOST, url, tmp_path / "disk.img"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "{}\nTrue True True\n", done.stderr
    assert "InsecureRequestWarning" not in done.stderr
    assert (tmp_path / "disk.img").read_bytes() == http_disk.DATA
