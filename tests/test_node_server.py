"""The server of node pull: in an empty container without a library, against hostile and slow clients."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import disks as disks_module
from tests import oracle, processes, worker

SOURCE = worker.ROOT / "node-server"
DATA = os.urandom(300_001)


def compiled(directory: Path, **variables: str) -> Path:
    """Compile the server as its Makefile says."""
    processes.need("make", "gcc")
    program = directory / "cdi-containerimage-server"
    words = [f"{name}={value}" for name, value in {"OUT": str(program), **variables}.items()]
    processes.run("make", "-C", SOURCE, *words)
    return program


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the program as the image has it."""
    return compiled(tmp_path_factory.mktemp("static"))


@pytest.fixture(scope="session")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the program with checks of every access to memory."""
    flags = "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all"
    return compiled(tmp_path_factory.mktemp("checked"), CFLAGS=flags, LDFLAGS="")


@dataclasses.dataclass
class Container:
    """A root with nothing but a disk, a folder to share, and the server; all as user 107."""

    root: Path
    port: int
    process: subprocess.Popen[str] | None = None

    @property
    def ready(self) -> Path:
        return self.root / "shared/ready"

    @property
    def done(self) -> Path:
        return self.root / "shared/done"

    def put(self, name: str, data: bytes = DATA) -> Path:
        path = self.root / "disk" / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(data)
        path.chmod(0o440)
        os.chown(path, 107, 107)
        return path

    def start(self, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        self.close()
        enter = [str(shutil.which("chroot")), "--userspec=107:107", str(self.root), "/server"]
        files = ("-ready-file", "/shared/ready", "-done-file", "/shared/done")
        given = arguments or ("-p", str(self.port), "-image-dir", "/disk", *files)
        self.process = subprocess.Popen(
            [*enter, *given], stderr=subprocess.PIPE, text=True, env=dict(env or {}), stdin=subprocess.DEVNULL
        )
        return self.process

    def serve(self, **env: str) -> subprocess.Popen[str]:
        process = self.start(env=env)
        processes.wait_for(lambda: self.ready.exists() or process.poll() is not None, "the ready file")
        assert process.poll() is None, process.communicate()
        return process

    def refusal(self, *arguments: str) -> str:
        """Start it in vain and return its last words."""
        process = self.start(*arguments)
        _, said = process.communicate(timeout=10)
        assert process.returncode == 1
        assert not self.ready.exists()
        return said

    def close(self) -> None:
        """Kill it, as when memory runs out."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


def container(root: Path, program: Path) -> Container:
    processes.need_root()
    processes.need("chroot")
    for name in ("disk", "shared"):
        (root / name).mkdir(parents=True)
    os.chown(root / "shared", 107, 107)
    shutil.copy(program, root / "server")
    return Container(root, processes.free_port())


@pytest.fixture
def empty(tmp_path: Path, program: Path) -> Iterator[Container]:
    """Make a container that holds no disk yet."""
    with contextlib.closing(container(tmp_path / "root", program)) as made:
        yield made


@pytest.fixture
def served(empty: Container) -> Container:
    """Serve a disk."""
    empty.put("disk.img")
    empty.serve()
    return empty


@dataclasses.dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


def ask(port: int, path: str, method: str = "GET", **headers: str) -> Answer:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        connection.request(
            method, path, headers={key.replace("_", "-"): value for key, value in headers.items()}
        )
        answer = connection.getresponse()
        return Answer(
            answer.status, {key.lower(): value for key, value in answer.getheaders()}, answer.read()
        )


def say(port: int, text: bytes) -> bytes:
    """Send bytes as they are, and return all that comes back."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(text)
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while piece := connection.recv(1 << 16):
                answer += piece
    return answer


def status_of(answer: bytes) -> int:
    found = re.match(rb"HTTP/1\.1 (\d{3}) ", answer)
    assert found, answer[:100]
    return int(found[1])


# -- what the importer wants -----------------------------------------------------------------


def test_hand_shake(served: Container) -> None:
    assert served.process is not None
    assert served.ready.read_text() == "disk.img"
    assert [path.name for path in served.ready.parent.iterdir()] == ["ready"]
    assert ask(served.port, "/disk.img").body == DATA
    served.done.touch()
    assert served.process.wait(5) == 0


def test_the_program_is_static(program: Path) -> None:
    assert b"/ld-linux" not in program.read_bytes()
    assert program.stat().st_size < 2 << 20


@pytest.mark.parametrize("flags", ["-p={}", "--p={}"])
def test_flags_as_go_reads_them(empty: Container, flags: str) -> None:
    empty.put("disk.img")
    empty.start(
        flags.format(empty.port),
        "--image-dir=/disk",
        "-ready-file=/shared/ready",
        "-done-file",
        "/shared/done",
    )
    processes.wait_for(empty.ready.exists, "the ready file")
    assert ask(empty.port, "/disk.img").status == 200


@pytest.mark.parametrize(
    "arguments", [["-x", "1"], ["-p"], ["p", "1"], ["-p", "no"], ["-p", "0"], ["---p=1"]]
)
def test_usage(empty: Container, arguments: list[str]) -> None:
    empty.put("disk.img")
    process = empty.start(*arguments)
    assert "usage:" in process.communicate(timeout=10)[1]
    assert process.returncode == 2


@pytest.mark.parametrize(
    ("asked", "start", "end"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=100-199", 100, 200),
        ("bytes=300000-", 300_000, 300_001),
        ("bytes=-1", 300_000, 300_001),
        ("bytes=-999999999999999999999999", 0, 300_001),
        ("bytes=5-99999999999999999999999", 5, 300_001),
        ("Bytes=1-1", 1, 2),
    ],
)
def test_ranges(served: Container, asked: str, start: int, end: int) -> None:
    answer = ask(served.port, "/disk.img", Range=asked)
    assert (answer.status, answer.body) == (206, DATA[start:end])
    assert answer.headers["content-range"] == f"bytes {start}-{end - 1}/300001"


@pytest.mark.parametrize("asked", ["bytes=300001-", "bytes=99999999999999999999-", "bytes=-0"])
def test_ranges_behind_the_end(served: Container, asked: str) -> None:
    answer = ask(served.port, "/disk.img", Range=asked)
    assert answer.status == 416
    assert answer.headers["content-range"] == "bytes */300001"


@pytest.mark.parametrize(
    "asked",
    [
        "bytes=1-0",
        "bytes=0-0,2-3",
        "bytes=-",
        "bytes=",
        "bytes=a-b",
        "lines=0-1",
        "bytes=1-2 ",
        "bytes=0x1-2",
    ],
)
def test_ranges_that_make_no_sense_are_ignored(served: Container, asked: str) -> None:
    answer = ask(served.port, "/disk.img", Range=asked)
    if asked.strip() == asked:
        assert (answer.status, answer.body) == (200, DATA)
    else:
        assert answer.body == DATA[1:3]


@pytest.mark.parametrize("second", ["bytes=7-x", "bytes=9-2", "lines=1-2"])
def test_of_two_ranges_the_last_counts(served: Container, second: str) -> None:
    """Half of a second one must not be mixed with the first: a length below zero came of it."""
    asked = f"GET /disk.img HTTP/1.0\r\nRange: bytes=0-5\r\nRange: {second}\r\n\r\n"
    answer = say(served.port, asked.encode())
    assert status_of(answer) == 200
    assert b"Content-Length: 300001\r\n" in answer
    assert answer.endswith(DATA)


def test_head(served: Container) -> None:
    whole = ask(served.port, "/disk.img", "HEAD")
    assert (whole.status, whole.body, whole.headers["content-length"]) == (200, b"", "300001")
    assert whole.headers["accept-ranges"] == "bytes"
    part = ask(served.port, "/disk.img", "HEAD", Range="bytes=0-9")
    assert (part.status, part.body, part.headers["content-length"]) == (206, b"", "10")
    assert (ask(served.port, "/x", "HEAD").status, ask(served.port, "/x", "HEAD").body) == (404, b"")


def test_conditions(served: Container) -> None:
    tag = ask(served.port, "/disk.img").headers["etag"]
    assert tag.startswith('"')
    assert ask(served.port, "/disk.img", Range="bytes=0-1", If_Range=tag).status == 206
    assert ask(served.port, "/disk.img", Range="bytes=0-1", If_Range='"other"').status == 200
    assert ask(served.port, "/disk.img", If_Match=tag).status == 200
    assert ask(served.port, "/disk.img", If_Match='"other"').status == 412


def test_connections_are_kept(served: Container) -> None:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", served.port, timeout=10)) as connection:
        for first in range(5):
            connection.request("GET", "/disk.img", headers={"Range": f"bytes={first}-{first}"})
            assert connection.getresponse().read() == DATA[first : first + 1]
            held = connection.sock
        assert held is connection.sock


def test_requests_in_one_piece_are_answered_in_turn(served: Container) -> None:
    one = b"GET /disk.img HTTP/1.1\r\nHost: x\r\nRange: bytes=%d-%d\r\n\r\n"
    answer = say(served.port, one % (0, 9) + one % (10, 19))
    assert answer.count(b"HTTP/1.1 206 ") == 2
    assert DATA[:10] in answer
    assert answer.endswith(DATA[10:20])


def test_info(empty: Container) -> None:
    empty.put("disk.img")
    odd = 'a"b\\c\td\x01é€😀'
    empty.serve(KUBEVIRT_IO_FOO_BAR="1", ODD=odd, BAD="x\udcff\udcc3y")
    answer = ask(empty.port, "/info")
    assert answer.headers["content-type"] == "application/json"
    assert sorted(json.loads(answer.body)["env"]) == [
        "BAD=x\ufffd\ufffdy",
        "KUBEVIRT_IO_FOO_BAR=1",
        f"ODD={odd}",
    ]


def test_names_that_need_escapes(empty: Container) -> None:
    empty.put("sub dir/ä%#?.qcow2")
    empty.serve()
    assert empty.ready.read_text() == "sub dir/ä%#?.qcow2"
    assert ask(empty.port, "/sub%20dir/%c3%A4%25%23%3F.qcow2").body == DATA
    assert ask(empty.port, "/disk.img").status == 404


def test_import_end_to_end(empty: Container, disks: disks_module.Disks, tmp_path: Path) -> None:
    empty.put("fedora 1.qcow2", disks.image("qcow2").read_bytes())
    server = empty.serve(KUBEVIRT_IO_FOO_BAR="1", INSTANCETYPE_KUBEVIRT_IO_DEFAULT_PREFERENCE="fedora")
    pod = worker.Pod(tmp_path / "pod")
    done = pod.run(
        IMPORTER_SOURCE="http",
        IMPORTER_PULL_METHOD="node",
        IMPORTER_ENDPOINT=f"http://localhost:{empty.port}/disk.img",
        IMPORTER_READY_FILE=str(empty.ready),
        IMPORTER_DONE_FILE=str(empty.done),
        FILESYSTEM_OVERHEAD="0",
    )
    assert done.status == 0, done.errors
    assert server.wait(5) == 0
    assert pod.told["labels"] == {
        "kubevirt.io/foo-bar": "1", "instancetype.kubevirt.io/default-preference": "fedora"
    }  # fmt: skip
    oracle.same(pod.disk, disks.expected("qcow2"))


def test_many_at_once(served: Container) -> None:
    with contextlib.ExitStack() as stack:
        held = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(64)]
        for one in held:
            stack.enter_context(one)
        processes.wait_for(lambda: ask_status(served.port) == 503, "the 65th to be turned away")
    processes.wait_for(lambda: ask_status(served.port) == 200, "room again")


def ask_status(port: int) -> int:
    with contextlib.suppress(ConnectionError, http.client.HTTPException):
        return ask(port, "/disk.img", Range="x").status
    return 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped(served: Container, number: signal.Signals) -> None:
    assert served.process is not None
    with socket.create_connection(("127.0.0.1", served.port)) as client:
        client.sendall(b"GET ")
        served.process.send_signal(number)
        assert served.process.wait(5) == 128 + number


def test_a_server_that_is_started_again(served: Container) -> None:
    served.close()
    assert served.ready.exists()
    server = served.start()
    processes.wait_for(lambda: processes.answers(served.port), "the port")
    assert ask(served.port, "/disk.img").body == DATA
    served.done.touch()
    assert server.wait(5) == 0
    assert served.start().wait(5) == 0


def test_a_ready_file_of_an_earlier_start_goes(served: Container) -> None:
    served.close()
    served.put("other.img")
    assert "more than one file" in served.refusal()


# -- what is no disk -------------------------------------------------------------------------


def test_no_directory(empty: Container) -> None:
    (empty.root / "disk").rmdir()
    assert "/disk is not a directory of this image" in empty.refusal()


def test_no_file(empty: Container) -> None:
    (empty.root / "disk/sub").mkdir()
    assert "no file below /disk" in empty.refusal()


def test_several_files(empty: Container) -> None:
    empty.put("a.img")
    empty.put("sub/b.img")
    said = empty.refusal()
    assert "more than one file" in said
    assert "/disk/a.img" in said
    assert "/disk/sub/b.img" in said


@pytest.mark.parametrize("where", ["disk/disk.img", "disk"])
def test_links(empty: Container, where: str) -> None:
    secret = empty.root / "secret"
    secret.mkdir()
    (secret / "token").write_text("secret")
    (empty.root / "disk").rmdir()
    if where != "disk":
        (empty.root / "disk").mkdir()
    (empty.root / where).symlink_to("/secret/token" if where != "disk" else "/secret")
    assert "is not a " in empty.refusal()


def test_pipes(empty: Container) -> None:
    os.mkfifo(empty.root / "disk/disk.img")
    assert "/disk/disk.img is not a regular file" in empty.refusal()


@pytest.mark.parametrize("name", ["disk\n.img", " disk.img", "disk.img ", "disk\x7f"])
def test_names_that_a_ready_file_cannot_tell(empty: Container, name: str) -> None:
    empty.put(name)
    assert "the name of the file" in empty.refusal()


def test_unreadable(empty: Container) -> None:
    empty.put("disk.img").chmod(0)
    assert "/disk/disk.img: Permission denied (user 107)" in empty.refusal()


@pytest.mark.parametrize("sign", ["usr/lib/bootc", "ostree", "sysroot/ostree"])
def test_bootable_images(empty: Container, sign: str) -> None:
    empty.put("disk.img")
    (empty.root / sign).mkdir(parents=True)
    (empty.root / "dev").mkdir()
    log = empty.root / "dev/termination-log"
    log.touch()
    log.chmod(0o666)
    said = empty.refusal()
    assert "this image boots by itself" in said
    assert log.read_text() in said


def test_busy_port(empty: Container) -> None:
    empty.put("disk.img")
    with socket.create_server(("127.0.0.1", empty.port)):
        assert f"cannot listen on 127.0.0.1:{empty.port}: Address already in use" in empty.refusal()


def test_ready_file_that_cannot_be_written(empty: Container) -> None:
    empty.put("disk.img")
    shutil.rmtree(empty.root / "shared")
    assert "cannot write the ready file /shared/ready: No such file or directory" in empty.refusal()


# -- requests that make no sense, under checks of memory --------------------------------------


@pytest.fixture(scope="module")
def sturdy(tmp_path_factory: pytest.TempPathFactory, checked: Path) -> Iterator[int]:
    """Serve with checks of memory; the port. A fault would be said on standard error."""
    directory = tmp_path_factory.mktemp("sturdy")
    (directory / "disk").mkdir()
    (directory / "disk/disk.img").write_bytes(DATA)
    port = processes.free_port()
    arguments = ["-p", str(port), "-image-dir", str(directory / "disk")]
    arguments += ["-ready-file", str(directory / "ready"), "-done-file", str(directory / "done")]
    log = directory / "log"
    with processes.running(
        [checked, *arguments],
        log=log,
        ready=(directory / "ready").exists,
        env={"ASAN_OPTIONS": "detect_leaks=0"},
    ):
        yield port
    assert "ERROR" not in log.read_text()
    assert "runtime error" not in log.read_text()


HOST = b"Host: x\r\n"


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (b"GET /../disk.img HTTP/1.1\r\n" + HOST, 404),
        (b"GET /../../etc/passwd HTTP/1.1\r\n" + HOST, 404),
        (b"GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\n" + HOST, 404),
        (b"GET //etc/passwd HTTP/1.1\r\n" + HOST, 404),
        (b"GET //disk.img HTTP/1.1\r\n" + HOST, 404),
        (b"GET /./disk.img HTTP/1.1\r\n" + HOST, 404),
        (b"GET /disk.img/ HTTP/1.1\r\n" + HOST, 404),
        (b"GET /disk.img?x HTTP/1.1\r\n" + HOST, 404),
        (b"GET / HTTP/1.1\r\n" + HOST, 404),
        (b"GET /info/ HTTP/1.1\r\n" + HOST, 404),
        (b"GET http://any.where/disk.img HTTP/1.1\r\n" + HOST, 200),
        (b"GET http://any.where HTTP/1.1\r\n" + HOST, 404),
        (b"GET /disk.img HTTP/1.0\r\n", 200),
        (b"GET /disk%2eimg HTTP/1.1\r\n" + HOST, 200),
        (b"GET /disk.img HTTP/1.1\r\n" + HOST + b"Content-Length: 0\r\n", 200),
        (b"GET /disk.img%00 HTTP/1.1\r\n" + HOST, 400),
        (b"GET /disk%2 HTTP/1.1\r\n" + HOST, 400),
        (b"GET /disk%zz HTTP/1.1\r\n" + HOST, 400),
        (b"GET disk.img HTTP/1.1\r\n" + HOST, 400),
        (b"GET  /disk.img HTTP/1.1\r\n" + HOST, 400),
        (b"GET /disk.img  HTTP/1.1\r\n" + HOST, 400),
        (b"GET /disk.img\r\n" + HOST, 400),
        (b"GET\r\n", 400),
        (b"\r\n", 400),
        (b"GET /disk.img HTTP/1.1\r\n", 400),
        (b"GET /disk.img HTTP/1.1\r\n" + HOST + HOST, 400),
        (b"GET /disk.img HTTP/1.1\r\nHost : x\r\n", 400),
        (b"GET /disk.img HTTP/1.1\r\n" + HOST + b" folded\r\n", 400),
        (b"GET /disk.img HTTP/1.1\r\n" + HOST + b"nothing\r\n", 400),
        (b"GET /disk.img HTTP/1.1\r\n" + HOST + b"X: a\nY: b\r\n", 400),
        (b"GET /disk.img HTTP/1.1\r\n" + HOST + b"X: a\rb\r\n", 400),
        (b"GET /disk.img HTTP/1.1\r\n" + HOST + b"X: a\0b\r\n", 400),
        (b"GET /disk.img HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n", 400),
        (b"GET /disk.img HTTP/1.1\r\n" + HOST + b"Content-Length: 5\r\n", 413),
        (b"GET /disk.img HTTP/2.0\r\n" + HOST, 505),
        (b"POST /disk.img HTTP/1.1\r\n" + HOST, 405),
        (b"get /disk.img HTTP/1.1\r\n" + HOST, 405),
        (b"GET /" + b"a" * 17_000 + b" HTTP/1.1\r\n" + HOST, 431),
        (b"GET /disk.img HTTP/1.1\r\n" + HOST + b"X: " + b"a" * 17_000 + b"\r\n", 431),
        (b"GET /" + b"%41" * 5_000 + b" HTTP/1.1\r\n" + HOST, 404),
    ],
)
def test_odd_requests(sturdy: int, text: bytes, status: int) -> None:
    answer = say(sturdy, text + b"\r\n")
    assert status_of(answer) == status
    assert b"root:" not in answer
    if 400 <= status != 404:
        assert b"Connection: close\r\n" in answer
        assert answer.count(b"HTTP/1.1") == 1


HEADERS = st.one_of(
    st.binary(max_size=60),
    st.builds(lambda value: b"Range: bytes=" + value, st.text("0123456789-,", max_size=30).map(str.encode)),
    st.sampled_from([b"Connection: close", b"If-Range: x", b"Content-Length: 0", b"Host: y"]),
)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=40), st.lists(HEADERS, max_size=5), st.booleans())
def test_any_request_is_answered_or_dropped(
    sturdy: int, line: bytes, headers: list[bytes], sane: bool
) -> None:
    first = b"GET /disk.img HTTP/1.1" if sane else line
    answer = say(sturdy, b"\r\n".join([first, b"Host: x", *headers]) + b"\r\n\r\n")
    assert not answer or status_of(answer) in {200, 206, 400, 404, 405, 413, 416, 505}
    assert status_of(say(sturdy, b"GET /info HTTP/1.1\r\nHost: x\r\n\r\n")) == 200


def test_half_a_request(sturdy: int) -> None:
    assert say(sturdy, b"GET /disk.img HT") == b""


def test_slow_clients_keep_nobody_waiting(sturdy: int) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", sturdy)))
            client.sendall(b"GET /disk.img HTTP/1.1\r\n")
        started = time.monotonic()
        assert ask(sturdy, "/disk.img").body == DATA
        assert time.monotonic() - started < 12  # their time-out is 20 s


def test_a_client_that_drips_is_cut_off(sturdy: int) -> None:
    with socket.create_connection(("127.0.0.1", sturdy), timeout=1) as client:
        client.sendall(b"GET /disk.img HTTP/1.1\r\n")
        answer, started = b"", time.monotonic()
        while not answer and time.monotonic() - started < 40:
            with contextlib.suppress(TimeoutError):
                client.sendall(b"X")
                answer = client.recv(1000)
        assert status_of(answer) == 408
        assert 15 < time.monotonic() - started < 40
