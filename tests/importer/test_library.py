"""``import cdi_worker``: the public API for other programs."""

from __future__ import annotations

import concurrent.futures
import logging
import re
import subprocess
import sys
import threading
from importlib import metadata
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker import errors
from tests.support import disks as disks_module
from tests.support import misbehave, processes, repository, servers


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
    return cdi_worker.Request(
        existing="replace",
        source="http",
        location=cdi_worker.Location(url),
        target=str(target),
        **changes,
    )


@pytest.mark.parametrize("name", cdi_worker.__all__)
def test_public_name_exists_and_is_documented(name: str) -> None:
    assert getattr(cdi_worker, name).__doc__


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


def test_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError):
        _ = cdi_worker.nothing


def test_documented_example_works(disks: disks_module.Disks, web: servers.Web, tmp_path: Path) -> None:
    """Run the code of docs/reference/library.md with URLs of this machine."""
    page = (repository.ROOT / "docs" / "reference" / "library.md").read_text()
    code, *_ = re.findall(r"^```python\n(.*?)```", page, re.DOTALL | re.MULTILINE)
    code = code.replace("https://example.org/disk.qcow2", web.url(disks.image("qcow2")))
    code = code.replace("/var/lib/images/disk.img", str(tmp_path / "disk.img"))
    code = code.replace(', cdi_worker.Access(ca_files=("ca.pem",))', "")
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        cwd=repository.ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "qcow2" in done.stdout
    assert "place" in done.stdout
    processes.run("cmp", tmp_path / "disk.img", disks.image("raw"))


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
        assert form == "vhdx-log" or 0 <= recorder.moved + recorder.skipped - total < total / 50
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
    for form in ("raw", "qcow2", "vmdk", "vdi", "vhd", "vhdx"):
        before = len(web.requests())
        inspection = cdi_worker.inspect(request(web.url(disks.image(form)), tmp_path / "disk.img"))
        assert inspection.plan is not None
        processes.wait_for(lambda before=before: len(web.requests()) > before, "the log")
        assert sum(int(one["bytes"]) for one in web.requests()[before:]) < 1 << 20
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
