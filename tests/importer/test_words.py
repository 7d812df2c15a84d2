"""The same failure has CDI's phrase in a pod and a remedy at a terminal."""

from __future__ import annotations

import http.client
import http.server
import json
import pickle
import subprocess
import threading
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.sources.glance import locations as glance
from cdi_worker.sources.local import locations as local
from tests.support import disks as disks_module
from tests.support import limits, misbehave, servers, terminals, worker

MIB = 1 << 20
REQUEST, TARGET, SCRATCH, TOO_LARGE = 2, 6, 7, 8
HINT = "did you mean '{}'?"


def test_disk_that_is_too_large(
    web: servers.Web, disks: disks_module.Disks, tmp_path: Path, device: Path
) -> None:
    (tmp_path / "image").write_bytes(b"x" * (17 * MIB))
    done = worker.call("import", tmp_path / "image", device)
    needs = f"the disk needs {17 * MIB} bytes (17.0 MiB)"
    room = f"the target has room for {16 * MIB} bytes (16.0 MiB)"
    assert done.status == TOO_LARGE
    assert done.error_message == f"{needs}, {room}; free space or name a larger target"
    done = worker.call("import", tmp_path / "image", tmp_path / "disk.img", "--size", "4Mi")
    allowed = f"--size allows {4 * MIB} bytes (4.0 MiB); give a larger --size, or leave it out"
    assert (done.status, done.error_message) == (TOO_LARGE, f"{needs}, {allowed}")
    pod = worker.Pod(tmp_path)
    pod.call(IMPORTER_SOURCE="http", IMPORTER_ENDPOINT=web.url(disks.raw()), IMPORTER_IMAGE_SIZE="4Mi")
    assert f"virtual image size {8 * MIB} is larger than the reported available storage" in pod.message
    assert pod.message.endswith("A larger PVC is required")


def test_scratch(server: misbehave.Server, disks: disks_module.Disks, tmp_path: Path) -> None:
    url = server.serve("/disk", misbehave.Page(disks.image("vhdx-log").read_bytes(), ranges=False))
    done = worker.call("import", url, tmp_path)
    assert done.status == SCRATCH
    assert done.error_message.startswith("scratch space required: ")
    assert done.error_message.endswith("; name a folder with --scratch DIRECTORY")
    pod = worker.Pod(tmp_path)
    pod.call(IMPORTER_SOURCE="http", IMPORTER_ENDPOINT=url)
    assert pod.outcome["scratchSpaceRequired"] is True


def test_overlay(tmp_path: Path, server: misbehave.Server) -> None:
    base, overlay = tmp_path / "base.img", tmp_path / "overlay.qcow2"
    base.write_bytes(bytes(1 << 20))
    subprocess.run(("qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", base, overlay), check=True)
    url = server.serve("/overlay", misbehave.Page(overlay.read_bytes()))
    pod = worker.Pod(tmp_path)
    pod.call(IMPORTER_SOURCE="http", IMPORTER_ENDPOINT=url)
    assert pod.message.endswith("(backing_file): the image has a backing file; flatten it")
    done = worker.call("import", url, tmp_path / "disk.img")
    assert done.error_message.endswith(
        "; name that one as SOURCE and this one with --layer, "
        "or flatten it (qemu-img convert -O qcow2 FILE flat.qcow2)"
    )


@pytest.mark.parametrize(
    ("kind", "options", "variable"),
    [
        ("imageio", ("--disk-id",), "IMPORTER_DISK_ID"),
        ("glance", ("--image-id",), "IMPORTER_IMAGE_ID"),
        ("vddk", ("--uuid", "--backing-file"), "IMPORTER_UUID"),
    ],
)
def test_missing_setting(tmp_path: Path, kind: str, options: tuple[str, ...], variable: str) -> None:
    done = worker.call("import", "--source", kind, "https://127.0.0.1:1/", tmp_path)
    assert (done.status, "IMPORTER_" in done.errors) == (REQUEST, False)
    assert all(f"({option})" in done.error_message for option in options)
    answer = worker.call("import", "--source", kind, "https://127.0.0.1:1/", tmp_path, "--json").output
    assert json.loads(answer)["error"]["message"] == done.error_message
    pod = worker.Pod(tmp_path)
    pod.call(IMPORTER_SOURCE=kind, IMPORTER_ENDPOINT="https://127.0.0.1:1/")
    assert f"({variable})" in pod.message


@pytest.mark.parametrize(
    ("env", "near"),
    [
        ({"IMPORTER_SOURCE": "htttp"}, "http"),
        ({"IMPORTER_SOURCE": "http", "IMPORTER_CONTENTTYPE": "archiv"}, "archive"),
        ({"IMPORTER_SOURCE": "http", "IMPORTER_PULL_METHOD": "nod"}, "node"),
    ],
)
def test_pod_suggests_the_nearest_value(tmp_path: Path, env: dict[str, str], near: str) -> None:
    """As the command line does (``test_cli``)."""
    pod = worker.Pod(tmp_path)
    assert pod.call(IMPORTER_ENDPOINT="http://127.0.0.1:1/x", **env).status == 1
    assert HINT.format(near) in pod.message


def test_location_suggests_the_nearest_value() -> None:
    found = glance.Glance("http://h", image_id="7", interface="publc", auth_type="passwrd")
    assert {HINT.format("public"), HINT.format("password")} <= {
        fault.rpartition("; ")[2] for fault in found.faults()
    }


def test_values_of_any_length_and_kind_are_compared() -> None:
    assert errors.did_you_mean("", ["http"]) == ""
    assert errors.did_you_mean("http", []) == ""
    assert errors.did_you_mean("gopher", ["http", "https"]) == ""
    assert errors.did_you_mean("x" * 1_000_000, ["http"]) == ""
    assert errors.did_you_mean("VERSIONTLS1.3", ["VersionTLS12", "VersionTLS13"]) == HINT.format(
        "VersionTLS13"
    )


def test_fault_survives_a_pickle() -> None:
    fault = next(iter(local.Local("").faults()))
    copy = pickle.loads(pickle.dumps(errors.RequestError(fault)))
    assert (str(copy), copy.at_terminal()) == (fault, "no endpoint (SOURCE) given")


def test_pickle_keeps_what_a_retry_and_a_terminal_need() -> None:
    failure = errors.Transient(url="u", reason="r", retry_after=3.0)
    assert pickle.loads(pickle.dumps(failure)).retry_after == failure.retry_after
    limited = errors.TooLarge(virtual_size=2048, available=1024, is_limit=True)
    assert pickle.loads(pickle.dumps(limited)).at_terminal() == limited.at_terminal()


def test_device_of_another_user_is_a_matter_of_rights(device: Path) -> None:
    device.chmod(0o600)
    done = worker.run("import", __file__, device, prefix=limits.unprivileged())
    who = f"user 107 of group 107 must not write to {device} (owner 0:{device.stat().st_gid}, mode 0600)"
    advice = "run as root, or as a member of its group (sudo)"
    message = f"{device}: open: permission denied: {who}; {advice}"
    assert (done.status, done.error_message) == (TARGET, message)


def test_refused_upload_says_what_it_needs(tmp_path: Path) -> None:
    (tmp_path / "image").write_bytes(b"x" * MIB)
    page = b"<!DOCTYPE html><title>Error response</title>"
    login = "; give the client's certificate (--cert and --key), or a token (--token-file)"
    for status, end in ((401, login), (501, "")):

        class Handler(http.server.BaseHTTPRequestHandler):
            code = status

            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.send_response(self.code)
                self.send_header("Content-Type", "text/html")
                self.send_header("Content-Length", str(len(page)))
                self.end_headers()
                self.wfile.write(page)

            do_POST = do_PATCH = answer  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            done = worker.call("upload", tmp_path / "image", f"http://127.0.0.1:{server.server_port}")
            server.shutdown()
        assert done.error_message.endswith(f"{status} {http.client.responses[status]}{end}"), done.errors


def test_terminal_is_no_disk(tmp_path: Path) -> None:
    with terminals.Terminal(tmp_path, 80) as terminal:
        screen = terminal.run("cdi-worker import - x.img")
    assert screen[1:] == ["cdi-worker: standard input is a terminal; redirect a file or a pipe to it"]
