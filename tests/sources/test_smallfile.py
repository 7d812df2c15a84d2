"""Small files that a user names, which may be pipes."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.sources import smallfile
from tests.support import processes, servers, worker


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


@contextlib.contextmanager
def flooded(pipe: Path) -> Iterator[Path]:
    """Write to a pipe without end, for one reader."""
    with subprocess.Popen(["sh", "-c", 'exec yes >"$1"', "sh", pipe]) as writer:
        yield pipe
        writer.kill()


@pytest.fixture
def endless(pipe: Path) -> Iterator[Path]:
    """Yield a pipe whose writer does not end."""
    with flooded(pipe):
        yield pipe


def writing(pipe: Path, text: str) -> subprocess.Popen[bytes]:
    """Start a writer that comes late and writes in two parts."""
    program = 'sleep 0.2; { printf %s "$2" | head -c 3; sleep 0.2; printf %s "$2" | tail -c +4; } >"$1"'
    return subprocess.Popen(["sh", "-c", program, "sh", pipe, text])


def test_pipe_is_read_to_its_end(pipe: Path) -> None:
    with writing(pipe, "a late text"):
        assert smallfile.read(pipe) == b"a late text"


def test_pipe_without_a_writer_is_given_up(pipe: Path) -> None:
    began = time.monotonic()
    with pytest.raises(errors.RequestError, match=r"pipe: is a pipe that has not ended in 0.2 s"):
        smallfile.read(pipe, patience=0.2)
    assert time.monotonic() - began < processes.PATIENCE


def test_pipe_whose_writer_is_silent_is_given_up(pipe: Path) -> None:
    with subprocess.Popen(["sh", "-c", 'exec sleep 60 >"$1"', "sh", pipe]) as writer:
        try:
            with pytest.raises(errors.RequestError, match="is a pipe that has not ended"):
                smallfile.read(pipe, patience=0.3)
        finally:
            writer.kill()


@pytest.mark.parametrize("kind", ["pipe", "device", "file"])
def test_content_without_end_is_refused(endless: Path, tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").write_bytes(bytes((1 << 20) + 1))
    path = {"pipe": endless, "device": Path("/dev/zero"), "file": tmp_path / "file"}[kind]
    with pytest.raises(errors.RequestError, match="is larger than 1 MiB; is this the right file"):
        smallfile.read(path)


def test_file_of_the_largest_size_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * (1 << 20))
    assert smallfile.read(tmp_path / "file") == b"x" * (1 << 20)
    (tmp_path / "file").write_bytes(b"")
    assert smallfile.read(tmp_path / "file") == b""


#: Commands whose file PIPE is read before anything else happens.
NAMED = {
    "keys": ("import", "--signed-by=PIPE", "docker://127.0.0.1:1/r", "TARGET"),
    "password": ("import", "--user=u", "--password-file=PIPE", "http://127.0.0.1:1/d", "TARGET"),
    "authorities": ("import", "--ca-file=PIPE", "https://127.0.0.1:1/d", "TARGET"),
    "client certificate": ("upload", "--cert=PIPE", "/etc/hostname", "https://127.0.0.1:1"),
    "certificate of NBD": ("import", "--cert=PIPE", "nbds://127.0.0.1:1/d", "TARGET"),
    "login": ("import", "--auth-file=PIPE", "docker://127.0.0.1:1/r", "TARGET"),
    "credentials": ("import", "--credentials-file=PIPE", "gs://bucket/disk", "TARGET"),
    "token": (
        "import",
        "--source=kubevirt",
        "--export-token-file=PIPE",
        "https://127.0.0.1:1/volumes/d/disk.img",
        "disk.img",
    ),
}


def test_endless_pipe_is_refused_wherever_a_file_is_named(pipe: Path, tmp_path: Path) -> None:
    names = {"PIPE": str(pipe), "TARGET": str(tmp_path / "disk.img")}
    for arguments in NAMED.values():
        given = [re.sub("PIPE|TARGET", lambda found: names[found[0]], each) for each in arguments]
        with flooded(pipe):
            done = worker.call(*given)
        assert (done.status, "larger than 1 MiB" in done.errors) == (2, True), done.errors


#: Variables that name a file which a library would open, and wait for the writer of a pipe.
VARIABLES = {
    "SSL_CERT_FILE": ("import", "http://127.0.0.1:1/d", "disk.img"),
    "AWS_CONFIG_FILE": ("import", "s3://127.0.0.1:1/bucket/d", "disk.img"),
    "AWS_SHARED_CREDENTIALS_FILE": ("import", "s3://127.0.0.1:1/bucket/d", "disk.img"),
    "AWS_WEB_IDENTITY_TOKEN_FILE": ("import", "s3://127.0.0.1:1/bucket/d", "disk.img"),
}


@pytest.mark.parametrize("variable", VARIABLES)
def test_pipe_that_a_library_would_open_is_refused(pipe: Path, tmp_path: Path, variable: str) -> None:
    *arguments, target = VARIABLES[variable]
    done = worker.run(*arguments, tmp_path / target, env={variable: str(pipe)})
    assert done.status == 2, done.errors
    assert f"{pipe}: is a pipe; name a file" in done.error_message


def test_pipe_that_a_library_would_open_is_refused_in_a_pod(pipe: Path, tmp_path: Path) -> None:
    pod = worker.Pod(tmp_path)
    env = {"IMPORTER_SOURCE": "http", "IMPORTER_ENDPOINT": "http://127.0.0.1:1/d", "PREALLOCATION": "false"}
    done = worker.call(*pod.arguments, env={**env, "SSL_CERT_FILE": str(pipe)})
    assert done.status == 1, done.errors
    assert f"SSL_CERT_FILE: {pipe}: is a pipe; name a file" in pod.message


def test_login_that_a_variable_names_is_read_like_any_other(endless: Path, tmp_path: Path) -> None:
    arguments = ("docker://127.0.0.1:1/r", tmp_path / "disk.img")
    done = worker.call("import", *arguments, env={"REGISTRY_AUTH_FILE": str(endless)})
    assert (done.status, "larger than 1 MiB" in done.errors) == (2, True), done.errors


def test_pipe_is_not_a_qcow2_file(pipe: Path, tmp_path: Path) -> None:
    (tmp_path / "raw").write_bytes(bytes(4096))
    for command in ("verify", "import"):
        done = worker.call(command, "--format=qcow2", tmp_path / "raw", pipe)
        assert done.status == 6, done.errors
        assert done.error_message == f"{pipe}: is not a regular file; name another target"


def test_password_may_come_from_a_pipe(pipe: Path, tmp_path: Path) -> None:
    """As of ``--password-file <(pass show host)``."""
    (tmp_path / "www").mkdir()
    (tmp_path / "www" / "disk").write_bytes(b"disk" * 256)
    settings = servers.Settings(password=("user", "password"))
    with (
        servers.nginx(tmp_path, tmp_path / "www", settings) as web,
        writing(pipe, "password\n"),
    ):
        done = worker.run(
            "import", "--user=user", f"--password-file={pipe}", web.url("disk"), tmp_path / "disk"
        )
    assert done.status == 0, done.errors
    assert (tmp_path / "disk").read_bytes() == b"disk" * 256
