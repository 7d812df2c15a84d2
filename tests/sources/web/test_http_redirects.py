"""Redirects of an HTTP source: where it goes, and what it sends there."""

from __future__ import annotations

import concurrent.futures
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.sources import base
from cdi_worker.sources.web import http
from tests.support import http_disk, misbehave, reading, tls

SECRET = base.Access(user="me", password="s3cret", headers=(("X-Token", "hush"),))


def test_secrets_go_to_the_origin_only(server: misbehave.Server) -> None:
    with misbehave.Server() as other:
        target = other.serve("/disk", http_disk.GOOD)
        start = server.serve("/start", misbehave.Page(to=("/moved",)))
        server.serve("/moved", misbehave.Page(to=(target,)))
        with http_disk.opened(start, SECRET) as image:
            assert http_disk.whole(image) == http_disk.DATA
        for request in server.requests:
            assert (request.headers["authorization"][:6], request.headers["x-token"]) == ("Basic ", "hush")
        assert other.requests
        for request in other.requests:
            assert not {"authorization", "x-token", "cookie"} & {*request.headers}


def test_another_name_of_the_same_host_gets_no_secrets(server: misbehave.Server) -> None:
    server.serve("/disk", http_disk.GOOD)
    start = server.serve("/start", misbehave.Page(to=(server.url("/disk", host="localhost"),)))
    with http_disk.opened(start, SECRET) as image:
        assert http_disk.whole(image) == http_disk.DATA
    assert server.gets("/disk")
    assert all("authorization" not in request.headers for request in server.gets("/disk"))


@pytest.mark.parametrize("to", ["/ü b.img", "/%C3%BC%20b.img"])
def test_redirect_may_be_encoded_in_utf_8(server: misbehave.Server, to: str) -> None:
    server.serve("/%C3%BC%20b.img", http_disk.GOOD)
    start = server.serve("/start", misbehave.Page(to=(to.encode().decode("latin-1"),)))
    with http_disk.opened(start) as image:
        assert http_disk.whole(image) == http_disk.DATA


def test_redirect_is_followed_once_for_all_ranges(server: misbehave.Server) -> None:
    with misbehave.Server() as mirror:
        start = server.serve(
            "/start",
            misbehave.Page(to=(mirror.serve("/a", http_disk.GOOD), mirror.serve("/b", http_disk.GOOD))),
        )
        with http_disk.opened(start) as image:
            for offset in range(0, 100_000, 10_000):
                reading.read_range(image.source.ranges, offset, 10_000)
        assert len(server.requests) == 1
        assert len(mirror.gets("/a")) == 11
        assert not mirror.gets("/b")


def test_lost_mirror_is_replaced(server: misbehave.Server) -> None:
    with misbehave.Server() as mirror:
        first = mirror.serve("/a", (http_disk.GOOD, 1), misbehave.Page(status=404))
        start = server.serve("/start", misbehave.Page(to=(first, mirror.serve("/b", http_disk.GOOD))))
        with http_disk.opened(start) as image:
            with pytest.raises(errors.Transient, match="404"):
                reading.read_range(image.source.ranges, 0, 10)
            assert reading.read_range(image.source.ranges, 0, 10) == http_disk.DATA[:10]
        assert len(mirror.gets("/b")) == 1


def test_lost_mirror_is_replaced_once_for_all_threads(server: misbehave.Server) -> None:
    """The second thread must not discard the redirect that replaced the lost mirror."""
    with misbehave.Server() as mirror:
        gone = misbehave.Page(status=404, body=b"x" * 10, drip=(1, 0.01))
        first = mirror.serve("/a", (http_disk.GOOD, 1), gone)
        second = mirror.serve("/b", http_disk.GOOD)
        start = server.serve("/start", misbehave.Page(to=(first, *[second] * 9)))
        with http_disk.opened(start) as image, concurrent.futures.ThreadPoolExecutor(4) as pool:
            reads = [pool.submit(reading.read_range, image.source.ranges, number, 10) for number in range(4)]
            kinds = {type(read.exception()) for read in reads}
            assert kinds <= {errors.Transient, type(None)}
            assert reading.read_range(image.source.ranges, 0, 10) == http_disk.DATA[:10]


def test_endless_redirects_are_refused(server: misbehave.Server) -> None:
    with pytest.raises(errors.Unreachable, match="more than 10 redirects"):
        http_disk.refused(server.serve("/loop", misbehave.Page(to=("/loop",))))
    with pytest.raises(errors.Unreachable, match="not http"):
        http_disk.refused(server.serve("/file", misbehave.Page(to=("file:///etc/passwd",))))


def test_redirect_from_https_to_http_is_logged(
    tmp_path: Path, server: misbehave.Server, caplog: pytest.LogCaptureFixture
) -> None:
    """An attacker on the way could choose the content of the disk; the address stays secret."""
    authority = tls.Authority(tmp_path)
    access = base.Access("user", "password", ca_files=(str(authority.certificate),))
    to = misbehave.Page(to=(f"{server.serve('/disk', http_disk.GOOD)}?secret=1",))
    server.serve("/disk?secret=1", http_disk.GOOD)
    with (
        misbehave.Server(authority.issue()) as secure,
        http_disk.opened(secure.serve("/start", to), access) as image,
    ):
        assert http_disk.whole(image) == http_disk.DATA
    assert f"redirected from https to {server.url('/disk')}?…:" in caplog.text
    assert all("authorization" not in request.headers for request in server.requests)


def test_body_of_a_redirect_is_not_read(server: misbehave.Server) -> None:
    """It may be endless, or grow without limit when decoded."""
    there = server.serve("/there", http_disk.GOOD)
    start = server.serve("/start", misbehave.Page(bytes(64 << 20), to=(there,), ranges=False))
    with http_disk.opened(start) as image:
        assert image.facts.head == http_disk.DATA[: http.HEAD_SIZE]
    assert server.sent("/start") < 16 << 20


@pytest.mark.parametrize("to", ["http://[::1", "http://host:99999/", "http://@/", "//[x]/"])
def test_malformed_redirect_is_refused(server: misbehave.Server, to: str) -> None:
    with pytest.raises(errors.Unreachable, match="redirects to"):
        http_disk.refused(server.serve("/odd", misbehave.Page(to=(to,))))
