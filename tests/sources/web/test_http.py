"""The HTTP source with nginx and with a misbehaving server."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.sources import base
from cdi_worker.sources.web import http
from tests.support import http_disk, misbehave, processes, proxy, reading, servers, tls


def test_nginx_is_read_in_order_and_by_ranges(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "a disk").write_bytes(http_disk.DATA)
    with servers.nginx(tmp_path, root) as web, http_disk.opened(web.url("a%20disk")) as image:
        assert (image.facts.size, image.facts.head) == (len(http_disk.DATA), http_disk.DATA[: http.HEAD_SIZE])
        assert image.facts.identity is not None
        assert image.source.ranges is not None
        assert http_disk.whole(image) == http_disk.DATA
        assert http_disk.whole(image, 1000) == http_disk.DATA[1000:]
        assert reading.read_range(image.source.ranges, 70_001, 300_000) == http_disk.DATA[70_001:370_001]


@pytest.mark.parametrize(
    ("page", "size", "ranges"),
    [
        (http_disk.GOOD, len(http_disk.DATA), True),
        (http_disk.changed(head=405), len(http_disk.DATA), True),
        (http_disk.changed(head=403), len(http_disk.DATA), True),
        (http_disk.changed(ranges=False), len(http_disk.DATA), False),
        (http_disk.changed(ranges=False, claims_ranges=True), len(http_disk.DATA), False),
        (http_disk.changed(ranges=False, framing="chunked"), None, False),
        (http_disk.changed(ranges=False, framing="close"), None, False),
        (http_disk.changed(content_range="bytes {first}-{last}/*"), len(http_disk.DATA), False),
        (http_disk.changed(content_range="nonsense"), len(http_disk.DATA), False),
    ],
)
def test_offer_matches_the_server(
    server: misbehave.Server, page: misbehave.Page, size: int | None, ranges: bool
) -> None:
    # Without ranges a server with malformed ones still shows the size.
    rest = dataclasses.replace(page, ranges=False) if "{total}" not in page.content_range else page
    with http_disk.opened(server.serve("/disk", (page, 1), rest)) as image:
        assert (image.facts.size, image.source.ranges is not None) == (size, ranges)
        assert image.facts.head == http_disk.DATA[: http.HEAD_SIZE]
        assert http_disk.whole(image) == http_disk.DATA
    sent = {(request.method, request.headers["accept-encoding"]) for request in server.requests}
    assert sent == {("GET", "identity")}
    # The request that showed that there are no ranges is the stream.
    assert ranges or page.ranges or len(server.requests) == 1


@pytest.mark.parametrize("framing", ["length", "chunked", "close"])
def test_body_whose_end_is_not_marked_is_logged(
    server: misbehave.Server, caplog: pytest.LogCaptureFixture, framing: str
) -> None:
    page = http_disk.changed(ranges=False, framing=framing)
    with http_disk.opened(server.serve("/disk", page)):
        assert ("give a checksum" in caplog.text) == (framing == "close")


DATE = "Mon, 02 Nov 2026 10:00:00 GMT"
SIZE = len(http_disk.DATA)


@pytest.mark.parametrize(
    ("etag", "modified", "version", "identity", "weak"),
    [
        ('"one"', DATE, "7", f'etag "one" size {SIZE}', False),
        ('W/"one"', DATE, None, f'etag W/"one" modified {DATE} size {SIZE}', True),
        ('W/"one"', DATE, "null", f'etag W/"one" modified {DATE} size {SIZE}', True),
        ('W/"one"', DATE, "7", f"version 7 size {SIZE}", False),
        (None, DATE, None, f"modified {DATE} size {SIZE}", True),
        ('W/"one"', None, None, f'etag W/"one" size {SIZE}', True),
        (None, None, None, None, True),
    ],
)
def test_identity_of_the_content_is_derived(
    server: misbehave.Server,
    etag: str | None,
    modified: str | None,
    version: str | None,
    identity: str | None,
    weak: bool,
) -> None:
    for ranges in (True, False):
        page = http_disk.changed(
            etag=etag, modified=modified, ranges=ranges, headers={"x-amz-version-id": version}
        )
        with http_disk.opened(server.serve("/disk", page)) as image:
            assert (image.facts.identity, image.facts.weak) == (identity, weak)


@pytest.mark.parametrize(
    "body", [b"", b"x", http_disk.DATA[: http.HEAD_SIZE - 1], http_disk.DATA[: http.HEAD_SIZE]]
)
def test_small_object_is_read(server: misbehave.Server, body: bytes) -> None:
    with http_disk.opened(server.serve("/disk", http_disk.changed(body=body))) as image:
        assert (image.facts.size, image.facts.head) == (len(body), body)
        assert http_disk.whole(image) == body


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, errors.Unreachable),
        (403, errors.Unreachable),
        (404, errors.Unreachable),
        (410, errors.Unreachable),
        # The errors that curl --retry considers temporary.
        (408, errors.Transient),
        (429, errors.Transient),
        (500, errors.Transient),
        (502, errors.Transient),
        (503, errors.Transient),
        (504, errors.Transient),
    ],
)
def test_refusal_is_reported_by_status(
    server: misbehave.Server, status: int, kind: type[errors.Error]
) -> None:
    url = server.serve("/disk", http_disk.changed(status=status, headers={"Retry-After": "7"}))
    with pytest.raises(kind, match=str(status)) as caught:
        http_disk.refused(url)
    if isinstance(caught.value, errors.Transient):
        assert caught.value.retry_after == 7


@pytest.mark.parametrize(
    "url",
    [
        "http:///x",
        "ftp://h/x",
        "http://h:port/x",
        "http://[::1/x",
        "disk",
        "http://h:99999/",
        "http://me:s3/cret@h/x",
        "http:/me:s3cret@h/x",
        "https:me:s3cret@h/x",
        "http://me:s3#cret@h/x",
    ],
)
def test_malformed_url_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(errors.RequestError, match="malformed URL") as caught:
        http_disk.refused(url)
    assert "s3" not in str(caught.value)
    assert "cret" not in str(caught.value)


def test_unknown_host_and_refused_connection_are_reported() -> None:
    with pytest.raises(errors.Unreachable, match="unknown host"):
        http_disk.refused("http://no-such-host.invalid/disk")
    with pytest.raises(errors.Unreachable, match="connection refused"):
        http_disk.refused("http://127.0.0.1:1/disk")


@pytest.mark.parametrize("half", [base.Access(user="me"), base.Access(password="s3cret")])
def test_incomplete_credentials_are_not_sent(server: misbehave.Server, half: base.Access) -> None:
    with http_disk.opened(server.serve("/disk", http_disk.GOOD), half) as image:
        assert http_disk.whole(image) == http_disk.DATA
    assert all("authorization" not in request.headers for request in server.requests)


def test_credentials_in_the_url_are_sent_and_not_shown(server: misbehave.Server) -> None:
    url = server.serve("/disk", http_disk.changed(password="me:p@ss")).replace("://", "://me:p%40ss@")
    with http_disk.opened(url) as image:
        assert http_disk.whole(image) == http_disk.DATA
        assert "p@ss" not in image.facts.name
        assert "p%40ss" not in image.facts.name


def test_credentials_and_headers_are_sent_as_utf_8(server: misbehave.Server) -> None:
    access = base.Access(user="zoë", password="pä€", headers=(("X-Token", "naïve €"), ("X-Raw", "\udcff")))
    with http_disk.opened(server.serve("/disk", http_disk.changed(password="zoë:pä€")), access) as image:
        assert http_disk.whole(image) == http_disk.DATA
    sent = server.requests[0].headers
    assert sent["x-token"].encode("latin-1").decode() == "naïve €"
    assert sent["x-raw"] == "\xff"


def test_malformed_numbers_of_a_server_are_ignored(server: misbehave.Server) -> None:
    many = "9" * 5000
    page = http_disk.changed(content_range="bytes {first}-{last}/" + many)
    with http_disk.opened(server.serve("/disk", (page, 1), http_disk.changed(ranges=False))) as image:
        assert image.source.ranges is None
        assert http_disk.whole(image) == http_disk.DATA
    busy = {"Retry-After": "Mon, 1 Jan 99999999999999999999 00:00:00 GMT"}
    with pytest.raises(errors.Transient, match="503"):
        http_disk.refused(server.serve("/busy", http_disk.changed(status=503, headers=busy)))


@pytest.mark.parametrize("password", ["me:secret", "me:", "me:gr\u00fc\u00dfe"])
def test_proxies_are_used(tmp_path: Path, server: misbehave.Server, password: str) -> None:
    authority = tls.Authority(tmp_path)
    trust = (str(authority.certificate),)
    server.serve("/disk", http_disk.GOOD)
    with misbehave.Server(authority.issue()) as secure, proxy.Proxy(password=password) as between:
        secure.serve("/disk", http_disk.GOOD)
        access = base.Access(http_proxy=between.url, https_proxy=between.url, ca_files=trust)
        for url in (server.url("/disk", host=tls.FAR), secure.url("/disk", host=tls.FAR)):
            with http_disk.opened(url, access) as image:
                assert http_disk.whole(image) == http_disk.DATA
        methods = {request.method for request in between.requests}
        assert methods == {"GET", "CONNECT"}
        wrong = dataclasses.replace(access, http_proxy=f"http://127.0.0.1:{between.port}")
        with pytest.raises(errors.Unreachable, match="407"):
            http_disk.refused(server.url("/disk", host=tls.FAR), wrong)


@pytest.mark.parametrize("path", ["//disk", "///a:b@c/disk", "//disk?to=//x"])
def test_path_may_begin_with_two_slashes(server: misbehave.Server, path: str) -> None:
    """Of an object whose key begins with one, for example. requests < 2.34 asked for /disk."""
    url = server.serve(path, http_disk.GOOD)
    moved = server.serve("/moved", misbehave.Page(to=(url,)))
    with proxy.Proxy() as between:
        access = base.Access(http_proxy=between.url)
        for start in (url, moved, server.url(path, host=tls.FAR)):
            with http_disk.opened(start, access) as image:
                assert http_disk.whole(image) == http_disk.DATA
        assert {request.target for request in between.requests} == {server.url(path, host=tls.FAR)}
    assert {request.path for request in server.requests} == {path, "/moved"}


def test_range_that_begins_elsewhere_is_no_answer(server: misbehave.Server) -> None:
    """Also if its bytes are those that it says it has."""
    page = http_disk.changed(content_range="bytes 0-{last}/{total}")
    with http_disk.opened(server.serve("/disk", page)) as image:
        ranges = image.source.ranges
        assert ranges is not None
        with pytest.raises(errors.NoRanges, match="received bytes 0-"):
            ranges.read_range(400_000, memoryview(bytearray(1000)))


def test_proxy_that_decrypts_tunnels_is_trusted_by_its_ca(tmp_path: Path) -> None:
    authority, middle = tls.Authority(tmp_path / "a"), tls.Authority(tmp_path / "b", "Proxy CA")
    with misbehave.Server(authority.issue()) as secure, proxy.Proxy(authority=middle) as between:
        trust = (str(middle.certificate),)
        access = base.Access(https_proxy=between.url, ca_files=trust)
        secure.serve("/disk", http_disk.GOOD)
        with http_disk.opened(secure.url("/disk", host=tls.FAR), access) as image:
            assert http_disk.whole(image) == http_disk.DATA
        assert between.requests


def test_closing_ends_a_blocked_read(server: misbehave.Server) -> None:
    url = server.serve("/disk", (http_disk.GOOD, 1), http_disk.changed(stall=100))
    source = http_disk.source(url)
    source.open(base.Opening())
    ended: list[BaseException] = []

    def read() -> None:
        try:
            reading.read_all(source.stream())
        except errors.Error as err:
            ended.append(err)

    thread = threading.Thread(target=read)
    thread.start()
    processes.wait_for(lambda: server.sent("/disk") == http.HEAD_SIZE + 100, "the stall")
    source.close()
    thread.join(processes.PATIENCE)
    assert not thread.is_alive()
    assert ended
