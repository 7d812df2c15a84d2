"""Tests of the servers, with curl as the client."""

from __future__ import annotations

import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.support import misbehave, processes, proxy, servers, tls


def curl(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run curl without proxies or settings from this machine's environment."""
    argv = ["curl", "--silent", "--show-error", "--max-time", "20", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin"})


def status(*arguments: str | Path) -> str:
    return curl("--output", "/dev/null", "--write-out", "%{http_code}", *arguments).stdout


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a folder with one file to serve."""
    folder = tmp_path / "root"
    folder.mkdir()
    (folder / "file").write_bytes(b"0123456789" * 1000)
    return folder


def test_nginx_serves_ranges_and_logs_requests(tmp_path: Path, root: Path) -> None:
    with servers.nginx(tmp_path, root) as web:
        assert curl(web.url("file")).stdout == "0123456789" * 1000
        assert curl("--range", "3-5", web.url(root / "file")).stdout == "345"
        processes.wait_for(lambda: len(web.requests()) == 2, "log")
        assert [(r["status"], r["range"]) for r in web.requests()] == [("200", ""), ("206", "bytes=3-5")]
    assert not processes.is_listening(web.port)


def test_certificate_is_valid_only_with_its_authority(tmp_path: Path, root: Path) -> None:
    authority = tls.Authority(tmp_path / "ca")
    with servers.nginx(tmp_path, root, servers.Settings(pair=authority.issue())) as web:
        assert status("--cacert", authority.certificate, web.url("file")) == "200"
        assert curl(web.url("file")).returncode == 60
        assert status("--insecure", web.url("file", host="localhost")) == "200"


@pytest.mark.parametrize("wrong", ["expired", "name"])
def test_curl_rejects_bad_certificates(tmp_path: Path, root: Path, wrong: str) -> None:
    authority = tls.Authority(tmp_path / "ca")
    pair = authority.issue(days=-1) if wrong == "expired" else authority.issue("elsewhere.example")
    with servers.nginx(tmp_path, root, servers.Settings(pair=pair)) as web:
        assert curl("--cacert", authority.certificate, web.url("file")).returncode == 60


def test_nginx_limits_rate(tmp_path: Path, root: Path) -> None:
    (root / "large").write_bytes(bytes(200_000))
    with servers.nginx(tmp_path, root, servers.Settings(limit_rate=150_000)) as web:
        began = time.monotonic()
        assert status(web.url("large")) == "200"
        assert time.monotonic() - began > 0.5


def test_proxy_forwards_and_tunnels(tmp_path: Path, root: Path) -> None:
    authority = tls.Authority(tmp_path / "ca")
    trust = ("--cacert", authority.certificate)
    with (
        servers.nginx(tmp_path, root) as plain,
        misbehave.Server(authority.issue()) as secure,
        proxy.Proxy(password="me:secret") as between,
    ):
        page = secure.serve("/disk", misbehave.Page(b"behind"))
        through = ("--proxy", between.url)
        assert curl(*through, plain.url("file")).stdout == "0123456789" * 1000
        assert curl(*through, *trust, page).stdout == "behind"
        assert [request.method for request in between.requests] == ["GET", "CONNECT"]
        assert between.requests[1].target == f"127.0.0.1:{secure.port}"
        assert status("--proxy", f"http://127.0.0.1:{between.port}", plain.url("file")) == "407"


def test_proxy_decrypts_tunnels(tmp_path: Path) -> None:
    authority = tls.Authority(tmp_path / "ca")
    middle = tls.Authority(tmp_path / "middle", "Proxy CA")
    with misbehave.Server(authority.issue()) as secure, proxy.Proxy(authority=middle) as between:
        page = secure.serve("/disk", misbehave.Page(b"behind"))
        through = ("--proxy", between.url)
        assert curl(*through, "--cacert", authority.certificate, page).returncode == 60
        assert curl(*through, "--cacert", middle.certificate, page).stdout == "behind"
        assert between.requests[-1].target == page


def test_port_is_reserved_before_its_server_listens(tmp_path: Path) -> None:
    """Two runs of the tests on one machine must not be given the same port."""
    port = processes.free_port()
    code = f"from tests.support import processes; print(processes.reserve({port}))"
    assert processes.script(code).stdout == "False\n"


def test_unix_socket_that_is_only_bound_is_not_listening(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        assert not processes.is_listening(path)
        server.listen()
        assert processes.is_listening(path)
