"""Each fault of the misbehaving server, seen by curl or by a plain socket."""

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
    argv = ["curl", "--silent", "--show-error", "--max-time", "10", *arguments]
    return subprocess.run(argv, capture_output=True, check=False, env={"PATH": "/usr/bin:/bin"})


def headers(*arguments: str) -> dict[str, str]:
    """Return what a GET is answered with; ``status`` among it."""
    lines = curl("--dump-header", "-", "--output", "/dev/null", *arguments).stdout.decode().splitlines()
    return {"status": lines[0].split()[1]} | {
        name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:]) if name
    }


def changed(**faults: Any) -> misbehave.Page:
    return dataclasses.replace(GOOD, **faults)


def test_good_page_is_whole_and_in_ranges(server: misbehave.Server) -> None:
    url = server.serve("/disk", GOOD)
    assert curl(url).stdout == DATA
    assert curl("--range", "100-199", url).stdout == DATA[100:200]
    assert curl("--range", "-5", url).stdout == DATA[-5:]
    assert headers("--range", "10-19", url)["content-range"] == f"bytes 10-19/{len(DATA)}"
    assert headers("--range", "99999-", url)["status"] == "416"
    assert headers("--header", 'If-Match: "two"', url)["status"] == "412"
    assert curl("--head", url).stdout.startswith(b"HTTP/1.1 200")
    assert [seen.method for seen in server.requests].count("HEAD") == 1


def test_bytes_and_requests_are_counted(server: misbehave.Server) -> None:
    url = server.serve("/disk", GOOD)
    curl("--range", "0-99", url)
    processes.wait_for(server.is_quiet, "the end of the first")
    curl(url)
    assert server.sent("/disk") == 100 + len(DATA)
    assert server.gets("/disk")[0].headers["range"] == "bytes=0-99"
    assert server.busiest == 1


def test_connection_is_used_again(server: misbehave.Server) -> None:
    url = server.serve("/disk", GOOD)
    assert curl("--write-out", "%{num_connects}", url, url).stdout == (DATA + b"1") + (DATA + b"0")


@pytest.mark.parametrize(
    ("page", "header", "value"),
    [
        (changed(ranges=False), "accept-ranges", None),
        (changed(ranges=False, claims_ranges=True), "accept-ranges", "bytes"),
        (changed(ranges=False), "status", "200"),
        (changed(framing="chunked", ranges=False), "content-length", None),
        (changed(framing="close", ranges=False), "content-length", None),
        (changed(content_range="bytes 0-{last}/{total}"), "content-range", "bytes 0-9/10240"),
        (changed(content_range="bytes {first}-{last}/7"), "content-range", "bytes 5-9/7"),
        (changed(etag=None), "etag", None),
        (changed(modified=None), "last-modified", None),
        (changed(status=429, headers={"Retry-After": "7"}), "retry-after", "7"),
        (changed(status=503), "status", "503"),
        (changed(password="me:secret"), "status", "401"),
    ],
)
def test_answer_to_a_range(
    server: misbehave.Server, page: misbehave.Page, header: str, value: str | None
) -> None:
    assert headers("--range", "5-9", server.serve("/disk", page)).get(header) == value


@pytest.mark.parametrize("framing", ["chunked", "close"])
def test_body_without_length_is_whole(server: misbehave.Server, framing: str) -> None:
    assert curl(server.serve("/disk", changed(framing=framing))).stdout == DATA


@pytest.mark.parametrize("status", [403, 405])
def test_head_may_be_refused(server: misbehave.Server, status: int) -> None:
    url = server.serve("/disk", changed(head=status))
    assert curl("--head", url).stdout.startswith(b"HTTP/1.1 %d" % status)
    assert curl(url).stdout == DATA


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
def test_broken_body(
    server: misbehave.Server, faults: dict[str, object], exit_status: str, length: int
) -> None:
    done = curl(server.serve("/disk", changed(**faults)))
    assert (done.returncode, done.stdout) == (FAULTS[exit_status], DATA[:length])


def test_cut_at_spares_ranges_beyond(server: misbehave.Server) -> None:
    url = server.serve("/disk", changed(cut_at=4321))
    assert curl("--range", "4000-", url).stdout == DATA[4000:4321]
    assert curl("--range", "4322-", url).stdout == DATA[4322:]


def test_shift_sends_other_bytes(server: misbehave.Server) -> None:
    assert curl("--range", "10-19", server.serve("/disk", changed(shift=3))).stdout == DATA[13:23]


def test_extra_bytes_follow(server: misbehave.Server) -> None:
    url = server.serve("/disk", changed(extra=4))
    assert curl("--ignore-content-length", url).stdout == DATA + b"++++"


def test_stall_keeps_the_client_waiting(server: misbehave.Server) -> None:
    done = curl("--max-time", "0.5", server.serve("/disk", changed(stall=777)))
    assert (done.returncode, done.stdout) == (FAULTS["timeout"], DATA[:777])


def test_drip_is_slow(server: misbehave.Server) -> None:
    began = time.monotonic()
    assert curl(server.serve("/disk", changed(drip=(4096, 0.1)))).stdout == DATA
    assert time.monotonic() - began > 0.2


def test_turns_follow_each_other(server: misbehave.Server) -> None:
    url = server.serve("/disk", (changed(status=500), 2), (GOOD, 1), changed(etag='"two"'))
    answers = [headers(url) for _ in range(5)]
    assert [answer["status"] for answer in answers] == ["500", "500", "200", "200", "200"]
    assert [answer["etag"] for answer in answers[2:]] == ['"one"', '"two"', '"two"']


def test_redirects_rotate_and_show_what_arrived(server: misbehave.Server) -> None:
    with misbehave.Server() as other:
        first, second = server.serve("/a", GOOD), other.serve("/b", GOOD)
        url = server.serve("/disk", misbehave.Page(to=(first, second)))
        for _ in range(2):
            assert curl("--location", "--user", "me:secret", url).stdout == DATA
        assert [len(server.gets("/a")), len(other.gets("/b"))] == [1, 1]
        assert "authorization" in server.gets("/a")[0].headers
        assert "authorization" not in other.gets("/b")[0].headers


def test_redirect_loop(server: misbehave.Server) -> None:
    url = server.serve("/loop", misbehave.Page(to=("/loop",), status=307))
    assert curl("--location", "--max-redirs", "5", url).returncode == FAULTS["redirects"]
    assert len(server.requests) == 6


def test_unknown_path_is_not_found(server: misbehave.Server) -> None:
    assert headers(server.url("/nothing", host="localhost"))["status"] == "404"


def test_password_lets_in(server: misbehave.Server) -> None:
    url = server.serve("/disk", changed(password="me:secret"))
    assert curl("--user", "me:secret", url).stdout == DATA


def test_tls(tmp_path: Path) -> None:
    authority = tls.Authority(tmp_path)
    with misbehave.Server(authority.issue()) as server:
        url = server.serve("/disk", (changed(cut=5000), 1), GOOD)
        assert curl("--cacert", authority.certificate, url).returncode != 0
        assert curl("--cacert", authority.certificate, url).stdout == DATA
