"""The node pull server, statically linked in an empty root directory, as the importer uses it."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
from pathlib import Path

import pytest

from tests.support import disks as disks_module
from tests.support import node_servers, oracle, processes, worker


def test_server_writes_ready_file_and_stops_on_done_file(node: node_servers.Container) -> None:
    assert node.process is not None
    assert node.ready.read_text() == "disk.img"
    assert [path.name for path in node.ready.parent.iterdir()] == ["ready"]
    assert node_servers.request(node.port, "/disk.img").body == node_servers.DATA
    node.done.touch()
    assert node.process.wait(processes.PATIENCE) == 0


def test_program_is_static_and_small(node_program: Path) -> None:
    assert b"/ld-linux" not in node_program.read_bytes()
    assert node_program.stat().st_size < 2 << 20


@pytest.mark.parametrize("flags", ["-p={}", "--p={}"])
def test_flags_have_one_or_two_dashes(empty_node: node_servers.Container, flags: str) -> None:
    empty_node.put("disk.img")
    empty_node.start(
        flags.format(empty_node.port),
        "--image-dir=/disk",
        "-ready-file=/shared/ready",
        "-done-file",
        "/shared/done",
    )
    processes.wait_for(empty_node.ready.exists, "the ready file")
    assert node_servers.request(empty_node.port, "/disk.img").status == 200


def test_wrong_arguments_print_usage(empty_node: node_servers.Container) -> None:
    empty_node.put("disk.img")
    for arguments in (["-x", "1"], ["-p"], ["p", "1"], ["-p", "no"], ["-p", "0"], ["---p=1"]):
        process = empty_node.start(*arguments)
        assert "usage:" in process.communicate(timeout=processes.PATIENCE)[1]
        assert process.returncode == 2, arguments


def test_range_is_served(node: node_servers.Container) -> None:
    for value, start, end in (
        ("bytes=0-0", 0, 1),
        ("bytes=100-199", 100, 200),
        ("bytes=300000-", 300_000, 300_001),
        ("bytes=-1", 300_000, 300_001),
        ("bytes=-999999999999999999999999", 0, 300_001),
        ("bytes=5-99999999999999999999999", 5, 300_001),
        ("Bytes=1-1", 1, 2),
        ("bytes=1-2 ", 1, 3),
    ):
        answer = node_servers.request(node.port, "/disk.img", Range=value)
        assert (answer.status, answer.body) == (206, node_servers.DATA[start:end]), value
        assert answer.headers["content-range"] == f"bytes {start}-{end - 1}/300001"


def test_range_beyond_end_is_416(node: node_servers.Container) -> None:
    for value in ("bytes=300001-", "bytes=99999999999999999999-", "bytes=-0"):
        answer = node_servers.request(node.port, "/disk.img", Range=value)
        assert (answer.status, answer.headers["content-range"]) == (416, "bytes */300001"), value


def test_malformed_range_is_ignored(node: node_servers.Container) -> None:
    for value in ("1-0", "0-0,2-3", "-", "", "a-b", "0x1-2"):
        answer = node_servers.request(node.port, "/disk.img", Range=f"bytes={value}")
        assert (answer.status, answer.body) == (200, node_servers.DATA), value
    assert node_servers.request(node.port, "/disk.img", Range="lines=0-1").status == 200


def test_last_of_two_range_headers_applies(node: node_servers.Container) -> None:
    """A partly parsed second Range must not be mixed with the first: the length became negative."""
    for second in ("bytes=7-x", "bytes=9-2", "lines=1-2"):
        value = f"GET /disk.img HTTP/1.0\r\nRange: bytes=0-5\r\nRange: {second}\r\n\r\n"
        answer = node_servers.send_raw(node.port, value.encode())
        assert node_servers.status_of(answer) == 200
        assert b"Content-Length: 300001\r\n" in answer
        assert answer.endswith(node_servers.DATA)


def test_head_has_length_and_no_body(node: node_servers.Container) -> None:
    whole = node_servers.request(node.port, "/disk.img", "HEAD")
    assert (whole.status, whole.body, whole.headers["content-length"]) == (200, b"", "300001")
    assert whole.headers["accept-ranges"] == "bytes"
    part = node_servers.request(node.port, "/disk.img", "HEAD", Range="bytes=0-9")
    assert (part.status, part.body, part.headers["content-length"]) == (206, b"", "10")
    assert (
        node_servers.request(node.port, "/x", "HEAD").status,
        node_servers.request(node.port, "/x", "HEAD").body,
    ) == (404, b"")


def test_if_range_and_if_match_are_honoured(node: node_servers.Container) -> None:
    tag = node_servers.request(node.port, "/disk.img").headers["etag"]
    assert tag.startswith('"')
    assert node_servers.request(node.port, "/disk.img", Range="bytes=0-1", If_Range=tag).status == 206
    assert node_servers.request(node.port, "/disk.img", Range="bytes=0-1", If_Range='"other"').status == 200
    assert node_servers.request(node.port, "/disk.img", If_Match=tag).status == 200
    assert node_servers.request(node.port, "/disk.img", If_Match='"other"').status == 412


def test_connection_is_kept_alive(node: node_servers.Container) -> None:
    with contextlib.closing(
        http.client.HTTPConnection("127.0.0.1", node.port, timeout=processes.PATIENCE)
    ) as connection:
        for first in range(5):
            connection.request("GET", "/disk.img", headers={"Range": f"bytes={first}-{first}"})
            assert connection.getresponse().read() == node_servers.DATA[first : first + 1]
            connections = connection.sock
        assert connections is connection.sock


def test_pipelined_requests_are_answered_in_order(node: node_servers.Container) -> None:
    one = b"GET /disk.img HTTP/1.1\r\nHost: x\r\nRange: bytes=%d-%d\r\n\r\n"
    answer = node_servers.send_raw(node.port, one % (0, 9) + one % (10, 19))
    assert answer.count(b"HTTP/1.1 206 ") == 2
    assert node_servers.DATA[:10] in answer
    assert answer.endswith(node_servers.DATA[10:20])


def test_info_returns_environment_as_json(empty_node: node_servers.Container) -> None:
    empty_node.put("disk.img")
    odd = 'a"b\\c\td\x01é€😀'
    empty_node.serve(KUBEVIRT_IO_FOO_BAR="1", ODD=odd, BAD="x\udcff\udcc3y")
    answer = node_servers.request(empty_node.port, "/info")
    assert answer.headers["content-type"] == "application/json"
    assert sorted(json.loads(answer.body)["env"]) == [
        "BAD=x\ufffd\ufffdy",
        "KUBEVIRT_IO_FOO_BAR=1",
        f"ODD={odd}",
    ]


def test_file_name_with_special_characters_is_served(empty_node: node_servers.Container) -> None:
    empty_node.put("sub dir/ä%#?.qcow2")
    empty_node.serve()
    assert empty_node.ready.read_text() == "sub dir/ä%#?.qcow2"
    assert node_servers.request(empty_node.port, "/sub%20dir/%c3%A4%25%23%3F.qcow2").body == node_servers.DATA
    assert node_servers.request(empty_node.port, "/disk.img").status == 404


def test_importer_pulls_disk_and_labels(
    empty_node: node_servers.Container, disks: disks_module.Disks, tmp_path: Path
) -> None:
    empty_node.put("fedora 1.qcow2", disks.image("qcow2").read_bytes())
    server = empty_node.serve(KUBEVIRT_IO_FOO_BAR="1", INSTANCETYPE_KUBEVIRT_IO_DEFAULT_PREFERENCE="fedora")
    pod = worker.Pod(tmp_path / "pod")
    done = pod.run(
        IMPORTER_SOURCE="http",
        IMPORTER_PULL_METHOD="node",
        IMPORTER_ENDPOINT=f"http://localhost:{empty_node.port}/disk.img",
        IMPORTER_READY_FILE=str(empty_node.ready),
        IMPORTER_DONE_FILE=str(empty_node.done),
        FILESYSTEM_OVERHEAD="0",
    )
    assert done.status == 0, done.errors
    assert server.wait(processes.PATIENCE) == 0
    assert pod.outcome["labels"] == {
        "kubevirt.io/foo-bar": "1", "instancetype.kubevirt.io/default-preference": "fedora"
    }  # fmt: skip
    oracle.same(pod.disk, disks.expected("qcow2"))


def test_too_many_connections_get_503(node: node_servers.Container) -> None:
    with contextlib.ExitStack() as stack:
        connections = [socket.create_connection(("127.0.0.1", node.port)) for _ in range(64)]
        for one in connections:
            stack.enter_context(one)
        processes.wait_for(lambda: ask_status(node.port) == 503, "the 65th to be turned away")
    processes.wait_for(lambda: ask_status(node.port) == 200, "room again")


def ask_status(port: int) -> int:
    with contextlib.suppress(ConnectionError, http.client.HTTPException):
        return node_servers.request(port, "/disk.img", Range="x").status
    return 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_server(node: node_servers.Container, number: signal.Signals) -> None:
    assert node.process is not None
    with socket.create_connection(("127.0.0.1", node.port)) as client:
        client.sendall(b"GET ")
        node.process.send_signal(number)
        assert node.process.wait(processes.PATIENCE) == 128 + number


def test_server_restarts_after_kill(node: node_servers.Container) -> None:
    node.close()
    assert node.ready.exists()
    server = node.start()
    processes.wait_for(lambda: processes.is_listening(node.port), "the port")
    assert node_servers.request(node.port, "/disk.img").body == node_servers.DATA
    node.done.touch()
    assert server.wait(processes.PATIENCE) == 0
    assert node.start().wait(processes.PATIENCE) == 0


def test_stale_ready_file_is_removed(node: node_servers.Container) -> None:
    node.close()
    node.put("other.img")
    assert "more than one file" in node.refusal()
