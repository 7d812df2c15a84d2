"""The metrics page, scraped over HTTPS during an import as by a controller."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from cdi_worker import errors
from cdi_worker.importer import metrics, progress
from cdi_worker.importer.metrics import server as metrics_server
from tests.support import meters, misbehave, processes, repository, worker

MiB = 1 << 20
UID = "6a1f8a3e-77d7-4f0c-9a2b-0f7c1d1f4a11"
LABELS = {"ownerUID": UID}
#: The pattern by which CDI's controllers find the value (pkg/util/prometheus).
CONTROLLER = re.compile(r'kubevirt_cdi_import_progress_total\{ownerUID="' + UID + r'"\} (\d{1,3}\.?\d*)')


@pytest.fixture
def pod(tmp_path: Path) -> worker.Pod:
    env = {"IMPORTER_SOURCE": "http", "FILESYSTEM_OVERHEAD": "0", "OWNER_UID": UID}
    return worker.Pod(tmp_path / "pod", env=env, metrics_port=processes.free_port())


@contextlib.contextmanager
def importing(pod: worker.Pod, url: str) -> Iterator[subprocess.Popen[str]]:
    """Run the pod and wait for its page."""
    with worker.started(*pod.arguments, env={**pod.env, "IMPORTER_ENDPOINT": url}) as process:
        processes.wait_for(lambda: processes.is_listening(pod.metrics_port), "the metrics port")
        yield process


def test_page_shows_progress_of_a_running_import(pod: worker.Pod, server: misbehave.Server) -> None:
    data = os.urandom(4 * MiB)
    page = misbehave.Page(data, ranges=False, drip=(64 << 10, 0.03))
    values, text = [], ""
    with importing(pod, server.serve("/disk.img", page)) as process:
        while process.poll() is None:
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                text = meters.scrape(pod.metrics_port)
                if 'phase="connect"' not in text:
                    found = CONTROLLER.search(text)
                    assert found, text
                    values.append(float(found[1]))
            time.sleep(0.1)
        assert process.returncode == 0
    assert len(values) > 5
    assert values == sorted(values)
    assert 0 < values[-1] <= 100
    assert len(set(values)) > 3
    numbers = meters.samples(text)
    assert 0 < numbers["cdi_worker_read_bytes_total", ""] <= 4 * MiB
    assert numbers["cdi_worker_retries_total", ""] == 0
    assert next(key for key in numbers if key[0] == "cdi_worker_phase")[1] in {"transfer", "sync", "done"}


def test_no_percentage_is_shown_while_the_source_does_not_answer(
    pod: worker.Pod, server: misbehave.Server
) -> None:
    """A killed import may have moved half of the disk: 0 % would be wrong."""
    url = server.serve("/disk.img", misbehave.Page(b"later", status=503))
    with importing(pod, url):
        for _ in range(5):
            text = meters.scrape(pod.metrics_port)
            assert "cdi_worker_phase{" in text
            assert not CONTROLLER.search(text)


def test_failures_are_counted_by_kind(pod: worker.Pod, server: misbehave.Server) -> None:
    page = misbehave.Page(os.urandom(2 * MiB), status=503)
    seen: list[dict[tuple[str, str], float]] = []

    def is_counted() -> bool:
        """A page may be made after a failure and before its retry is counted."""
        seen.append(meters.samples(meters.scrape(pod.metrics_port)))
        kinds = [value for (name, _), value in seen[-1].items() if name == "cdi_worker_errors_total"]
        return 2 <= sum(kinds) == seen[-1]["cdi_worker_retries_total", ""]

    with importing(pod, server.serve("/disk.img", page)):
        processes.wait_for(is_counted, "two retries, each of a failure with a kind")
    assert [label for name, label in seen[-1] if name == "cdi_worker_phase"] == ["connect"]


def test_busy_port_is_a_warning(pod: worker.Pod, server: misbehave.Server) -> None:
    with socket.create_server(("127.0.0.1", pod.metrics_port)):
        page = misbehave.Page(os.urandom(MiB // 2), ranges=False, drip=(64 << 10, 0.1))
        done = pod.run(IMPORTER_ENDPOINT=server.serve("/disk.img", page))
    assert done.status == 0
    assert f"metrics not served port={pod.metrics_port} error=Address already in use" in done.errors
    assert "Traceback" not in done.errors


def test_missing_library_is_a_warning(pod: worker.Pod, server: misbehave.Server, tmp_path: Path) -> None:
    (tmp_path / "prometheus_client.py").write_text("raise ImportError")
    page = misbehave.Page(os.urandom(MiB // 2), ranges=False, drip=(64 << 10, 0.1))
    url = server.serve("/disk.img", page)
    env = {**pod.env, "IMPORTER_ENDPOINT": url, "PYTHONPATH": f"{tmp_path}:{repository.ROOT}"}
    with worker.started(*pod.arguments, env=env) as process:
        # The port is open before the library is needed.
        processes.wait_for(lambda: processes.is_listening(pod.metrics_port), "the metrics port")
        messages = "".join(filter(None, process.communicate(timeout=60)))
    assert process.returncode == 0
    assert "[metrics]'" in messages


def test_import_that_is_not_scraped_does_not_wait_for_its_page(tmp_path: Path) -> None:
    """It is woken at its end, and has loaded no library."""
    script = (
        "import sys, time; from cdi_worker.importer import metrics\n"
        f"with metrics.expose('importer', 'x', {processes.free_port()}):\n"
        "    time.sleep(0.3); began = time.monotonic()\n"
        "assert time.monotonic() - began < 0.1; assert 'prometheus_client' not in sys.modules"
    )
    done = processes.script(script)
    assert (done.returncode, done.stderr) == (0, "")


def test_page_that_was_scraped_ends_at_once() -> None:
    port = processes.free_port()
    ends = []
    for _ in range(3):
        with metrics.expose("cloner", UID, port):
            processes.wait_for(lambda: processes.is_listening(port), "the metrics port")
            assert UID in meters.scrape(port)
            began = time.monotonic()
        ends.append(time.monotonic() - began)
    assert min(ends) < 0.1


def test_port_0_disables_the_page() -> None:
    with metrics.expose("importer", UID, 0) as reporter:
        assert isinstance(reporter, progress.Lines)


# -- the page alone --------------------------------------------------------------------------


@pytest.fixture
def exposed_page() -> Iterator[tuple[progress.Progress, int]]:
    port = processes.free_port()
    with metrics.expose("cloner", UID, port) as running:
        processes.wait_for(lambda: processes.is_listening(port), "the metrics port")
        yield running, port


@contextlib.contextmanager
def ending() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Yield a process that serves the page, and leaves as the worker does when its input ends."""
    port = processes.free_port()
    script = (
        "import os, sys; from cdi_worker.importer import metrics\n"
        f"with metrics.expose('cloner', {UID!r}, {port}) as meter:\n"
        "    sys.stdin.read(); meter.done()\n"
        "os._exit(0)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], env=worker.ENVIRONMENT, stdin=subprocess.PIPE, text=True
    ) as process:
        try:
            processes.wait_for(lambda: processes.is_listening(port), "the metrics port")
            yield process, port
        finally:
            process.kill()


def secured(port: int) -> ssl.SSLSocket:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    plain = socket.create_connection(("127.0.0.1", port), timeout=processes.PATIENCE)
    return context.wrap_socket(plain)


def test_scrape_is_answered_while_the_process_ends() -> None:
    """A controller that has connected gets the whole page, with 100 %, instead of an early end."""
    with ending() as (process, port), secured(port) as scraper:
        assert process.stdin
        process.stdin.close()
        processes.wait_for(lambda: not processes.is_listening(port), "the end of the page")
        scraper.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        with scraper.makefile("rb") as stream:
            page = stream.read().decode()
        assert f'kubevirt_cdi_clone_progress_total{{ownerUID="{UID}"}} 100.0' in page
        assert process.wait(processes.PATIENCE) == 0


def test_silent_client_does_not_delay_the_end() -> None:
    with ending() as (process, port), socket.create_connection(("127.0.0.1", port)):
        # Nothing shows when the connection is accepted.
        time.sleep(0.5)
        begin = time.monotonic()
        assert process.stdin
        process.stdin.close()
        assert process.wait(processes.PATIENCE) == 0
        assert time.monotonic() - begin < metrics_server.PATIENCE / 2


@pytest.mark.parametrize(
    ("role", "names"),
    [
        (
            "openstack-populator",
            ("kubevirt_cdi_openstack_populator_progress_total", "openstack_populator_progress"),
        ),
        ("ovirt-populator", ("kubevirt_cdi_ovirt_progress_total", "ovirt_progress")),
    ],
)
def test_progress_has_the_name_of_each_controller(role: str, names: tuple[str, str]) -> None:
    port = processes.free_port()
    with metrics.expose(role, UID, port) as running:
        running.phase("transfer", 1000)
        processes.wait_for(lambda: processes.is_listening(port), "the metrics port")
        page = meters.scrape(port)
    for name in names:
        assert f'\n{name}{{ownerUID="{UID}"}} 0.0' in page
    # Forklift's controller takes the first match.
    assert re.findall(r'progress\{ownerUID="' + UID + r'"\} (\d{1,3}.*)', page) == ["0.0"]


def test_100_percent_is_shown_only_when_done(exposed_page: tuple[progress.Progress, int]) -> None:
    running, port = exposed_page
    name = "kubevirt_cdi_clone_progress_total"
    running.phase("transfer", 1000)
    running.advance(500)
    assert 49 < meters.samples(meters.scrape(port))[name, ""] < 51
    running.advance(500)
    running.phase("sync", None)
    assert 99 < meters.samples(meters.scrape(port))[name, ""] < 100
    running.phase("transfer", 1000)  # another route after all
    running.advance(100)
    assert 99 < meters.samples(meters.scrape(port))[name, ""] < 100
    running.done()
    assert meters.samples(meters.scrape(port))[name, ""] == 100


def test_percentage_is_written_without_exponent(exposed_page: tuple[progress.Progress, int]) -> None:
    running, port = exposed_page
    running.phase("transfer", 10**15)
    running.advance(1)
    assert f'kubevirt_cdi_clone_progress_total{{ownerUID="{UID}"}} 0.0\n' in meters.scrape(port)


def test_failures_of_libraries_are_distinguished(exposed_page: tuple[progress.Progress, int]) -> None:
    running, port = exposed_page
    reset = errors.Transient(url="x", reason="reset")
    reset.__cause__ = ConnectionResetError()
    for failure in (reset, reset, errors.Transient(url="x", reason="503")):
        running.retry(failure)
    numbers = meters.samples(meters.scrape(port))
    assert numbers["cdi_worker_errors_total", "ConnectionResetError"] == 2
    assert numbers["cdi_worker_errors_total", "Transient"] == 1
    assert numbers["cdi_worker_retries_total", ""] == 3


def test_key_is_generated_quickly(exposed_page: tuple[progress.Progress, int]) -> None:
    """Generating an RSA key takes a large part of the time of a small import."""
    text = ssl.get_server_certificate(("127.0.0.1", exposed_page[1]))
    certificate = x509.load_pem_x509_certificate(text.encode())
    assert isinstance(certificate.public_key(), ec.EllipticCurvePublicKey)
    assert certificate.issuer == certificate.subject


def test_health_is_answered_beside_the_metrics(exposed_page: tuple[progress.Progress, int]) -> None:
    assert meters.scrape(exposed_page[1], "/healthz") == "OK"


def test_other_paths_are_not_found_and_formats_are_two(
    exposed_page: tuple[progress.Progress, int],
) -> None:
    port = exposed_page[1]
    with pytest.raises(urllib.error.HTTPError, match="404") as caught:
        meters.scrape(port, "/")
    caught.value.close()
    assert meters.scrape(port, accept="application/openmetrics-text;version=1.0.0").endswith("# EOF\n")


def test_silent_clients_do_not_block_others(exposed_page: tuple[progress.Progress, int]) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(contextlib.closing(socket.create_connection(("127.0.0.1", exposed_page[1]))))
        assert UID in meters.scrape(exposed_page[1])


def test_start_can_be_interrupted_at_any_moment() -> None:
    """Threads that Python must stop at exit can crash it."""
    script = (
        "import sys, time; from cdi_worker.importer import metrics\n"
        "with metrics.expose('importer', 'x', int(sys.argv[1])): time.sleep(float(sys.argv[2]))"
    )
    argv = (sys.executable, "-c", script)
    with contextlib.ExitStack() as stack:
        for moment in (0.25, 0.35, 0.45, 0.55):
            command = [*argv, str(processes.free_port()), str(moment)]
            process = subprocess.Popen(command, env=worker.ENVIRONMENT, stderr=subprocess.PIPE, text=True)
            stack.callback(_check_end, stack.enter_context(process))


def _check_end(process: subprocess.Popen[str]) -> None:
    _, messages = process.communicate(timeout=processes.PATIENCE)
    assert (process.returncode, messages) == (0, "")
