"""The node pull server in an otherwise empty root directory, and simple clients for it."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.support import processes, repository

SOURCE = repository.ROOT / "node-server"
DATA = os.urandom(300_001)


def compiled(directory: Path, source: Path = SOURCE, **variables: str) -> Path:
    """Build the server with its Makefile; ``source``: a copy of it, ``variables`` of make."""
    processes.need("make", "gcc")
    program = directory / "cdi-containerimage-server"
    words = [f"{name}={value}" for name, value in {"OUT": str(program), **variables}.items()]
    processes.run("make", "-C", source, *words)
    return program


@dataclasses.dataclass
class Container:
    """A root directory with only a disk, a shared folder and the server; everything runs as user 107."""

    root: Path
    port: int
    process: subprocess.Popen[str] | None = None

    @property
    def ready(self) -> Path:
        """Return the file by which the server reports that it serves."""
        return self.root / "shared/ready"

    @property
    def done(self) -> Path:
        """Return the file by which the server is asked to stop."""
        return self.root / "shared/done"

    def put(self, name: str, data: bytes = DATA) -> Path:
        """Write a disk into the image directory."""
        path = self.root / "disk" / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(data)
        path.chmod(0o440)
        os.chown(path, 107, 107)
        return path

    def start(self, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start the server, by default with the usual arguments, without waiting for it."""
        self.close()
        enter = [str(shutil.which("chroot")), "--userspec=107:107", str(self.root), "/server"]
        files = ("-ready-file", "/shared/ready", "-done-file", "/shared/done")
        command = arguments or ("-p", str(self.port), "-image-dir", "/disk", *files)
        self.process = subprocess.Popen(
            [*enter, *command],
            stderr=subprocess.PIPE,
            text=True,
            env=dict(env or {}),
            stdin=subprocess.DEVNULL,
        )
        return self.process

    def serve(self, **env: str) -> subprocess.Popen[str]:
        """Start the server and wait until it is ready."""
        process = self.start(env=env)
        processes.wait_for(lambda: self.ready.exists() or process.poll() is not None, "the ready file")
        assert process.poll() is None, process.communicate()
        return process

    def refusal(self, *arguments: str) -> str:
        """Start the server, check that it refuses to run, and return its error message."""
        process = self.start(*arguments)
        _, errors = process.communicate(timeout=processes.PATIENCE)
        assert process.returncode == 1
        assert not self.ready.exists()
        return errors

    def close(self) -> None:
        """Kill the server with SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


def container(root: Path, program: Path) -> Container:
    """Create the root directory with the server in it."""
    processes.need_root()
    processes.need("chroot")
    for name in ("disk", "shared"):
        (root / name).mkdir(parents=True)
    os.chown(root / "shared", 107, 107)
    shutil.copy(program, root / "server")
    return Container(root, processes.free_port())


@dataclasses.dataclass
class Response:
    """A response, with header names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


def request(port: int, path: str, method: str = "GET", **headers: str) -> Response:
    """Send one request; an underscore in a header's name stands for a dash."""
    with contextlib.closing(
        http.client.HTTPConnection("127.0.0.1", port, timeout=processes.PATIENCE)
    ) as connection:
        connection.request(
            method, path, headers={key.replace("_", "-"): value for key, value in headers.items()}
        )
        answer = connection.getresponse()
        return Response(
            answer.status, {key.lower(): value for key, value in answer.getheaders()}, answer.read()
        )


def send_raw(port: int, text: bytes) -> bytes:
    """Send raw bytes and return everything the server sends back."""
    with socket.create_connection(("127.0.0.1", port), timeout=processes.PATIENCE) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(text)
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while piece := connection.recv(1 << 16):
                answer += piece
    return answer


def status_of(answer: bytes) -> int:
    """Return the status code of a raw response."""
    found = re.match(rb"HTTP/1\.1 (\d{3}) ", answer)
    assert found, answer[:100]
    return int(found[1])
