"""Tests of the misbehaving server, with curl as the client."""

from __future__ import annotations

import dataclasses
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import misbehave, processes, tls

DATA = bytes(range(256)) * 40
GOOD = misbehave.Page(DATA)
FAULTS = {  # curl's exit status
    "partial": 18,
    "timeout": 28,
    "redirects": 47,
    "reset": 56,
}


def curl(*arguments: str | Path) -> subprocess.CompletedProcess[bytes]:
    """Run curl without proxies or settings from this machine's environment."""
    argv = ["curl", "--silent", "--show-error", "--max-time", "10", *arguments]
    return subprocess.run(argv, capture_output=True, check=False, env={"PATH": "/usr/bin:/bin"})


def headers(*arguments: str) -> dict[str, str]:
    """Return the headers of the response to a GET, and its ``status``."""
    lines = curl("--dump-header", "-", "--output", "/dev/null", *arguments).stdout.decode().splitlines()
    return {"status": lines[0].split()[1]} | {
        name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:]) if name
    }


def changed(**faults: Any) -> misbehave.Page:
    """Return the good page with some fields replaced."""
    return dataclasses.replace(GOOD, **faults)


def test_good_page_serves_whole_body_and_ranges(server: misbehave.Server) -> None:
    url = server.serve("/disk", GOOD)
    assert curl(url).stdout == DATA
    assert curl("--range", "100-199", url).stdout == DATA[100:200]
    assert curl("--range", "-5", url).stdout == DATA[-5:]
    assert headers("--range", "10-19", url)["content-range"] == f"bytes 10-19/{len(DATA)}"
    assert headers("--range", "99999-", url)["status"] == "416"
    assert headers("--header", 'If-Match: "two"', url)["status"] == "412"
    assert curl("--head", url).stdout.startswith(b"HTTP/1.1 200")
    assert [request.method for request in server.requests].count("HEAD") == 1


def test_server_counts_bytes_and_requests(server: misbehave.Server) -> None:
    url = server.serve("/disk", GOOD)
    curl("--range", "0-99", url)
    processes.wait_for(server.is_quiet, "the end of the first")
    curl(url)
    assert server.sent("/disk") == 100 + len(DATA)
    assert server.gets("/disk")[0].headers["range"] == "bytes=0-99"
    assert server.busiest == 1


def test_server_keeps_connection_alive(server: misbehave.Server) -> None:
    url = server.serve("/disk", GOOD)
    assert curl("--write-out", "%{num_connects}", url, url).stdout == (DATA + b"1") + (DATA + b"0")


def test_range_response_has_the_headers_of_its_faults(server: misbehave.Server) -> None:
    for faults, header, value in (
        ({"ranges": False}, "accept-ranges", None),
        ({"ranges": False, "claims_ranges": True}, "accept-ranges", "bytes"),
        ({"ranges": False}, "status", "200"),
        ({"framing": "chunked", "ranges": False}, "content-length", None),
        ({"framing": "close", "ranges": False}, "content-length", None),
        ({"content_range": "bytes {first}-{last}/7"}, "content-range", "bytes 5-9/7"),
        ({"etag": None}, "etag", None),
        ({"status": 429, "headers": {"Retry-After": "7"}}, "retry-after", "7"),
        ({"password": "me:secret"}, "status", "401"),
    ):
        url = server.serve("/disk", changed(**faults))
        assert headers("--range", "5-9", url).get(header) == value, faults


@pytest.mark.parametrize(
    ("faults", "exit_status", "length"),
    [
        ({"missing": 10}, "partial", len(DATA)),
        ({"cut": 1000}, "reset", 1000),
        ({"cut_at": 0}, "reset", 0),
        ({"cut_at": 4321}, "reset", 4321),
        ({"cut": 100, "framing": "chunked"}, "reset", 100),
    ],
)
def test_body_can_be_cut(
    server: misbehave.Server, faults: dict[str, object], exit_status: str, length: int
) -> None:
    done = curl(server.serve("/disk", changed(**faults)))
    assert (done.returncode, done.stdout) == (FAULTS[exit_status], DATA[:length])


def test_cut_at_does_not_affect_later_ranges(server: misbehave.Server) -> None:
    url = server.serve("/disk", changed(cut_at=4321))
    assert curl("--range", "4000-", url).stdout == DATA[4000:4321]
    assert curl("--range", "4322-", url).stdout == DATA[4322:]


def test_stall_keeps_connection_open(server: misbehave.Server) -> None:
    done = curl("--max-time", "0.5", server.serve("/disk", changed(stall=777)))
    assert (done.returncode, done.stdout) == (FAULTS["timeout"], DATA[:777])


def test_drip_limits_rate(server: misbehave.Server) -> None:
    began = time.monotonic()
    assert curl(server.serve("/disk", changed(drip=(4096, 0.1)))).stdout == DATA
    assert time.monotonic() - began > 0.2


def test_pages_are_served_in_turn(server: misbehave.Server) -> None:
    url = server.serve("/disk", (changed(status=500), 2), (GOOD, 1), changed(etag='"two"'))
    answers = [headers(url) for _ in range(5)]
    assert [answer["status"] for answer in answers] == ["500", "500", "200", "200", "200"]
    assert [answer["etag"] for answer in answers[2:]] == ['"one"', '"two"', '"two"']


def test_redirects_rotate_and_requests_are_recorded(server: misbehave.Server) -> None:
    with misbehave.Server() as other:
        first, second = server.serve("/a", GOOD), other.serve("/b", GOOD)
        url = server.serve("/disk", misbehave.Page(to=(first, second)))
        for _ in range(2):
            assert curl("--location", "--user", "me:secret", url).stdout == DATA
        assert [len(server.gets("/a")), len(other.gets("/b"))] == [1, 1]
        assert "authorization" in server.gets("/a")[0].headers
        assert "authorization" not in other.gets("/b")[0].headers


def test_faults_work_over_tls(tmp_path: Path) -> None:
    authority = tls.Authority(tmp_path)
    with misbehave.Server(authority.issue()) as server:
        url = server.serve("/disk", (changed(cut=5000), 1), GOOD)
        assert curl("--cacert", authority.certificate, url).returncode != 0
        assert curl("--cacert", authority.certificate, url).stdout == DATA
