"""The same failure has CDI's phrase in a pod and a remedy at a terminal."""

from __future__ import annotations

import http.client
import http.server
import json
import pickle
import threading
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.sources.local import locations as local
from tests.support import disks as disks_module
from tests.support import limits, misbehave, servers, terminals, worker

MIB = 1 << 20
REQUEST, SCRATCH, TOO_LARGE = 2, 7, 8


def test_disk_that_is_too_large(
    web: servers.Web, disks: disks_module.Disks, tmp_path: Path, device: Path
) -> None:
    (tmp_path / "image").write_bytes(b"x" * (17 * MIB))
    done = worker.run("import", tmp_path / "image", device)
    needs = f"the disk needs {17 * MIB} bytes (17.0 MiB)"
    room = f"the target has room for {16 * MIB} bytes (16.0 MiB)"
    assert done.status == TOO_LARGE
    assert done.error_message == f"{needs}, {room}; free space or name a larger target"
    pod = worker.Pod(tmp_path)
    pod.run(IMPORTER_SOURCE="http", IMPORTER_ENDPOINT=web.url(disks.raw()), IMPORTER_IMAGE_SIZE="4Mi")
    assert f"virtual image size {8 * MIB} is larger than the reported available storage" in pod.message
    assert pod.message.endswith("A larger PVC is required")


def test_scratch(server: misbehave.Server, disks: disks_module.Disks, tmp_path: Path) -> None:
    url = server.serve("/disk", misbehave.Page(disks.image("vhdx-log").read_bytes(), ranges=False))
    done = worker.run("import", url, tmp_path)
    assert done.status == SCRATCH
    assert done.error_message.startswith("scratch space required: ")
    assert done.error_message.endswith("; name a folder with --scratch DIRECTORY")
    pod = worker.Pod(tmp_path)
    pod.run(IMPORTER_SOURCE="http", IMPORTER_ENDPOINT=url)
    assert pod.outcome["scratchSpaceRequired"] is True


@pytest.mark.parametrize(
    ("kind", "options", "variable"),
    [
        ("imageio", ("--disk-id",), "IMPORTER_DISK_ID"),
        ("glance", ("--image-id",), "IMPORTER_IMAGE_ID"),
        ("vddk", ("--uuid", "--backing-file"), "IMPORTER_UUID"),
    ],
)
def test_missing_setting(tmp_path: Path, kind: str, options: tuple[str, ...], variable: str) -> None:
    done = worker.run("import", "--source", kind, "https://127.0.0.1:1/", tmp_path)
    assert (done.status, "IMPORTER_" in done.errors) == (REQUEST, False)
    assert all(f"({option})" in done.error_message for option in options)
    answer = worker.run("import", "--source", kind, "https://127.0.0.1:1/", tmp_path, "--json").output
    assert json.loads(answer)["error"]["message"] == done.error_message
    pod = worker.Pod(tmp_path)
    pod.run(IMPORTER_SOURCE=kind, IMPORTER_ENDPOINT="https://127.0.0.1:1/")
    assert f"({variable})" in pod.message


def test_options_are_named_instead_of_variables(tmp_path: Path) -> None:
    stage = ("--source=imageio", "--disk-id=1", "--previous-checkpoint=1")
    done = worker.run("import", *stage, "https://127.0.0.1:1/", tmp_path)
    assert "a previous checkpoint without a current one; use --current-checkpoint" in done.error_message


def test_address_with_the_name_of_a_variable_is_kept(tmp_path: Path) -> None:
    url = "http://127.0.0.1:1/IMPORTER_DISK_ID"
    assert url in worker.run("import", url, tmp_path / "disk.img").error_message


def test_fault_survives_a_pickle() -> None:
    fault = next(iter(local.Local("").faults()))
    copy = pickle.loads(pickle.dumps(errors.RequestError(fault)))
    assert (str(copy), copy.at_terminal()) == (fault, "no endpoint (SOURCE) given")


def test_pickle_keeps_what_a_retry_and_a_terminal_need() -> None:
    failure = errors.Transient(url="u", reason="r", retry_after=3.0)
    assert pickle.loads(pickle.dumps(failure)).retry_after == failure.retry_after
    limited = errors.TooLarge(virtual_size=2048, available=1024, is_limit=True)
    assert pickle.loads(pickle.dumps(limited)).at_terminal() == limited.at_terminal()


def test_size_that_is_too_small_is_named(tmp_path: Path) -> None:
    (tmp_path / "image").write_bytes(b"x" * (17 * MIB))
    done = worker.run("import", tmp_path / "image", tmp_path / "disk.img", "--size", "4Mi")
    room = f"{4 * MIB} bytes (4.0 MiB)"
    assert done.status == TOO_LARGE
    assert done.error_message.endswith(f", --size allows {room}; give a larger --size, or leave it out")


def test_blank_disk_is_created_and_has_a_size(tmp_path: Path) -> None:
    done = worker.run("blank", tmp_path / "disk.img", "1Mi")
    assert done.output.split()[:2] == ["created", str(tmp_path / "disk.img")]
    assert "read" not in done.output
    done = worker.run("blank", tmp_path / "none.img", "0")
    assert (done.status, done.error_message) == (REQUEST, "a disk of 0 bytes; give a size such as 10Gi")
    assert not (tmp_path / "none.img").exists()


def test_device_of_another_user_is_a_matter_of_rights(device: Path) -> None:
    device.chmod(0o600)
    done = worker.run("import", __file__, device, prefix=limits.unprivileged())
    who = f"user 107 of group 107 must not write to {device} (owner 0:{device.stat().st_gid}, mode 0600)"
    advice = "run as root, or as a member of its group (sudo)"
    assert done.error_message == f"{device}: open: permission denied: {who}; {advice}"


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
            done = worker.run("upload", tmp_path / "image", f"http://127.0.0.1:{server.server_port}")
            server.shutdown()
        assert done.error_message.endswith(f"{status} {http.client.responses[status]}{end}"), done.errors


def test_terminal_is_no_disk(tmp_path: Path) -> None:
    with terminals.Terminal(tmp_path, 80) as terminal:
        screen = terminal.run("cdi-worker import - x.img")
    assert screen[1:] == ["cdi-worker: standard input is a terminal; redirect a file or a pipe to it"]
