"""The HTTP source against a real server and against one that misbehaves."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest

from importer import errors
from sources import base, http
from tests import misbehave, processes, proxy, reading, servers, tls

DATA = bytes(range(256)) * 4096
GOOD = misbehave.Page(DATA)
SECRET = base.Access(user="me", password="s3cret", headers=(("X-Token", "hush"),))


def changed(**faults: Any) -> misbehave.Page:
    return dataclasses.replace(GOOD, **faults)


def refused(url: str, access: base.Access | None = None) -> None:
    with opened(url, access):
        pass


def opened(url: str, access: base.Access | None = None) -> http.HttpSource:
    return http.HttpSource(url, access or base.Access())


def whole(source: base.Source, offset: int = 0) -> bytes:
    return reading.drained(source.stream(offset))


def test_nginx_is_read_in_order_and_at_random(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "a disk").write_bytes(DATA)
    with servers.nginx(tmp_path, root) as web, opened(web.url("a%20disk")) as source:
        assert (source.size, source.head) == (len(DATA), DATA[: http.HEAD_SIZE])
        assert source.identity is not None
        assert source.ranges() is source
        assert whole(source) == DATA
        assert whole(source, 1000) == DATA[1000:]
        assert reading.part(source, 70_001, 300_000) == DATA[70_001:370_001]


@pytest.mark.parametrize(
    ("page", "size", "ranges"),
    [
        (GOOD, len(DATA), True),
        (changed(head=405), len(DATA), True),
        (changed(head=403), len(DATA), True),
        (changed(ranges=False), len(DATA), False),
        (changed(ranges=False, claims_ranges=True), len(DATA), False),
        (changed(ranges=False, framing="chunked"), None, False),
        (changed(ranges=False, framing="close"), None, False),
        (changed(content_range="bytes {first}-{last}/*"), len(DATA), False),
        (changed(content_range="nonsense"), len(DATA), False),
    ],
)
def test_offer_is_what_the_server_can_do(
    server: misbehave.Server, page: misbehave.Page, size: int | None, ranges: bool
) -> None:
    # A server with senseless ranges shows its size only without them.
    rest = dataclasses.replace(page, ranges=False) if "{total}" not in page.content_range else page
    with opened(server.serve("/disk", (page, 1), rest)) as source:
        assert (source.size, source.ranges() is not None) == (size, ranges)
        assert source.head == DATA[: http.HEAD_SIZE]
        assert whole(source) == DATA
    assert {seen.method for seen in server.requests} == {"GET"}


DATE = "Mon, 02 Nov 2026 10:00:00 GMT"


@pytest.mark.parametrize(
    ("etag", "modified", "identity"),
    [
        ('"one"', DATE, f'etag "one" size {len(DATA)}'),
        ('W/"one"', DATE, f"modified {DATE} size {len(DATA)}"),
        (None, DATE, f"modified {DATE} size {len(DATA)}"),
        ('W/"one"', None, None),
        (None, None, None),
    ],
)
@pytest.mark.parametrize("ranges", [True, False])
def test_what_names_the_bytes(
    server: misbehave.Server, etag: str | None, modified: str | None, identity: str | None, ranges: bool
) -> None:
    page = changed(etag=etag, modified=modified, ranges=ranges)
    with opened(server.serve("/disk", page)) as source:
        assert source.identity == identity


@pytest.mark.parametrize("body", [b"", b"x", DATA[: http.HEAD_SIZE - 1], DATA[: http.HEAD_SIZE]])
def test_small_objects(server: misbehave.Server, body: bytes) -> None:
    with opened(server.serve("/disk", changed(body=body))) as source:
        assert (source.size, source.head) == (len(body), body)
        assert whole(source) == body


def test_stream_without_ranges_costs_one_request(server: misbehave.Server) -> None:
    with opened(server.serve("/disk", changed(ranges=False))) as source:
        assert whole(source) == DATA
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, errors.Unreachable),
        (403, errors.Unreachable),
        (404, errors.Unreachable),
        (410, errors.Unreachable),
        # What curl --retry takes for passing.
        (408, errors.Transient),
        (429, errors.Transient),
        (500, errors.Transient),
        (502, errors.Transient),
        (503, errors.Transient),
        (504, errors.Transient),
    ],
)
def test_refusals(server: misbehave.Server, status: int, kind: type[errors.Error]) -> None:
    url = server.serve("/disk", changed(status=status, headers={"Retry-After": "7"}))
    with pytest.raises(kind, match=str(status)) as caught:
        refused(url)
    if isinstance(caught.value, errors.Transient):
        assert caught.value.retry_after == 7


@pytest.mark.parametrize(
    "url", ["http:///x", "ftp://h/x", "http://h:port/x", "http://[::1/x", "disk", "http://h:99999/"]
)
def test_malformed_urls(url: str) -> None:
    with pytest.raises(errors.RequestError, match="malformed URL"):
        refused(url)


@pytest.mark.parametrize(
    "url", ["http://me:s3/cret@h/x", "http:/me:s3cret@h/x", "https:me:s3cret@h/x", "http://me:s3#cret@h/x"]
)
def test_a_malformed_url_shows_no_password(url: str) -> None:
    with pytest.raises(errors.RequestError, match="malformed URL") as caught:
        refused(url)
    assert "s3" not in str(caught.value)
    assert "cret" not in str(caught.value)


def test_unknown_host_and_refused_connection() -> None:
    with pytest.raises(errors.Unreachable, match="unknown host"):
        refused("http://no-such-host.invalid/disk")
    with pytest.raises(errors.Unreachable, match="connection refused"):
        refused("http://127.0.0.1:1/disk")


@pytest.mark.parametrize("half", [base.Access(user="me"), base.Access(password="s3cret")])
def test_half_of_the_credentials_is_none(server: misbehave.Server, half: base.Access) -> None:
    with opened(server.serve("/disk", GOOD), half) as source:
        assert whole(source) == DATA
    assert all("authorization" not in seen.headers for seen in server.requests)


def test_secrets_go_to_the_origin_only(server: misbehave.Server) -> None:
    with misbehave.Server() as other:
        target = other.serve("/disk", GOOD)
        start = server.serve("/start", misbehave.Page(to=("/moved",)))
        server.serve("/moved", misbehave.Page(to=(target,)))
        with opened(start, SECRET) as source:
            assert whole(source) == DATA
        for seen in server.requests:
            assert (seen.headers["authorization"][:6], seen.headers["x-token"]) == ("Basic ", "hush")
        assert other.requests
        for seen in other.requests:
            assert not {"authorization", "x-token", "cookie"} & {*seen.headers}


def test_another_name_of_the_same_host_gets_no_secrets(server: misbehave.Server) -> None:
    server.serve("/disk", GOOD)
    start = server.serve("/start", misbehave.Page(to=(server.url("/disk", host="localhost"),)))
    with opened(start, SECRET) as source:
        assert whole(source) == DATA
    assert server.gets("/disk")
    assert all("authorization" not in seen.headers for seen in server.gets("/disk"))


def test_credentials_in_the_url_are_used_and_not_shown(server: misbehave.Server) -> None:
    url = server.serve("/disk", changed(password="me:p@ss")).replace("://", "://me:p%40ss@")
    with opened(url) as source:
        assert whole(source) == DATA
        assert "p@ss" not in source.name
        assert "p%40ss" not in source.name


def test_credentials_and_headers_are_sent_as_utf_8(server: misbehave.Server) -> None:
    access = base.Access(user="zoë", password="pä€", headers=(("X-Token", "naïve €"), ("X-Raw", "\udcff")))
    with opened(server.serve("/disk", changed(password="zoë:pä€")), access) as source:
        assert whole(source) == DATA
    sent = server.requests[0].headers
    assert sent["x-token"].encode("latin-1").decode() == "naïve €"
    assert sent["x-raw"] == "\xff"


@pytest.mark.parametrize("to", ["/ü b.img", "/%C3%BC%20b.img"])
def test_a_redirect_may_be_spelt_in_utf_8(server: misbehave.Server, to: str) -> None:
    server.serve("/%C3%BC%20b.img", GOOD)
    start = server.serve("/start", misbehave.Page(to=(to.encode().decode("latin-1"),)))
    with opened(start) as source:
        assert whole(source) == DATA


def test_numbers_of_a_hostile_server_are_no_numbers(server: misbehave.Server) -> None:
    many = "9" * 5000
    page = changed(content_range="bytes {first}-{last}/" + many)
    with opened(server.serve("/disk", (page, 1), changed(ranges=False))) as source:
        assert source.ranges() is None
        assert whole(source) == DATA
    busy = {"Retry-After": "Mon, 1 Jan 99999999999999999999 00:00:00 GMT"}
    with pytest.raises(errors.Transient, match="503"):
        refused(server.serve("/busy", changed(status=503, headers=busy)))


def test_one_redirect_serves_the_whole_run(server: misbehave.Server) -> None:
    with misbehave.Server() as mirror:
        start = server.serve(
            "/start", misbehave.Page(to=(mirror.serve("/a", GOOD), mirror.serve("/b", GOOD)))
        )
        with opened(start) as source:
            for offset in range(0, 100_000, 10_000):
                reading.part(source, offset, 10_000)
        assert len(server.requests) == 1
        assert len(mirror.gets("/a")) == 11
        assert not mirror.gets("/b")


def test_a_mirror_that_is_lost_is_left(server: misbehave.Server) -> None:
    with misbehave.Server() as mirror:
        first = mirror.serve("/a", (GOOD, 1), misbehave.Page(status=404))
        start = server.serve("/start", misbehave.Page(to=(first, mirror.serve("/b", GOOD))))
        with opened(start) as source:
            with pytest.raises(errors.Transient, match="404"):
                reading.part(source, 0, 10)
            assert reading.part(source, 0, 10) == DATA[:10]
        assert len(mirror.gets("/b")) == 1


def test_a_lost_mirror_is_left_by_all_threads(server: misbehave.Server) -> None:
    """The second to hear of it must not take it for the address itself."""
    with misbehave.Server() as mirror:
        gone = misbehave.Page(status=404, body=b"x" * 10, drip=(1, 0.01))
        first = mirror.serve("/a", (GOOD, 1), gone)
        second = mirror.serve("/b", GOOD)
        start = server.serve("/start", misbehave.Page(to=(first, *[second] * 9)))
        with opened(start) as source, concurrent.futures.ThreadPoolExecutor(4) as pool:
            reads = [pool.submit(reading.part, source, number, 10) for number in range(4)]
            kinds = {type(read.exception()) for read in reads}
            assert kinds <= {errors.Transient, type(None)}
            assert reading.part(source, 0, 10) == DATA[:10]


def test_redirects_end(server: misbehave.Server) -> None:
    with pytest.raises(errors.Unreachable, match="more than 10 redirects"):
        refused(server.serve("/loop", misbehave.Page(to=("/loop",))))
    with pytest.raises(errors.Unreachable, match="not http"):
        refused(server.serve("/file", misbehave.Page(to=("file:///etc/passwd",))))


def test_a_redirect_does_not_leave_https(tmp_path: Path, server: misbehave.Server) -> None:
    """Whoever sits on the way would say what is on the disk."""
    authority = tls.Authority(tmp_path)
    trusting = base.Access(ca_files=(str(authority.certificate),))
    to = misbehave.Page(to=(f"{server.serve('/disk', GOOD)}?secret=1",))
    server.serve("/disk?secret=1", GOOD)
    with misbehave.Server(authority.issue()) as secure:
        start = secure.serve("/start", to)
        there = f"redirected from https to {server.url('/disk')}?…, which anyone .* give that URL itself"
        with pytest.raises(errors.Unreachable, match=there.replace("?", "[?]")):
            refused(start, trusting)
        assert not server.requests
        # Where anyone may pretend to be the first server, and where the way began in clear.
        for url, access in (
            (start, base.Access(insecure=True)),
            (server.serve("/clear", misbehave.Page(to=(start,))), trusting),
        ):
            with opened(url, access) as source:
                assert whole(source) == DATA


def test_the_page_of_a_redirect_is_not_read(server: misbehave.Server) -> None:
    """It may be endless, or grow without end when it is decoded."""
    there = server.serve("/there", GOOD)
    start = server.serve("/start", misbehave.Page(bytes(64 << 20), to=(there,), ranges=False))
    with opened(start) as source:
        assert source.head == DATA[: http.HEAD_SIZE]
    assert server.sent("/start") < 16 << 20


@pytest.mark.parametrize("to", ["http://[::1", "http://host:99999/", "http://@/", "//[x]/"])
def test_redirects_to_no_address(server: misbehave.Server, to: str) -> None:
    with pytest.raises(errors.Unreachable, match="redirected to"):
        refused(server.serve("/odd", misbehave.Page(to=(to,))))


@pytest.mark.parametrize(
    ("later", "kind"),
    [
        ({"etag": '"two"'}, errors.SourceChanged),
        ({"modified": "Tue, 03 Nov 2026 10:00:00 GMT"}, errors.SourceChanged),
        ({"body": DATA + b"more"}, errors.SourceChanged),
        ({"content_range": "bytes {first}-{last}/7"}, errors.SourceChanged),
        ({"content_range": "bytes 0-{last}/{total}"}, errors.NoRanges),
        ({"content_range": "nonsense"}, errors.NoRanges),
        ({"ranges": False}, errors.NoRanges),
        ({"status": 416}, errors.NoRanges),
        ({"status": 503}, errors.Transient),
        ({"status": 404}, errors.Unreachable),
        ({"cut": 0}, errors.Transient),
    ],
)
def test_range_that_is_not_what_was_asked_for(
    server: misbehave.Server, later: dict[str, Any], kind: type[errors.Error]
) -> None:
    with opened(server.serve("/disk", (GOOD, 1), changed(**later))) as source, pytest.raises(kind):
        reading.part(source, 1000, 5000)


@pytest.mark.parametrize("fault", [{"cut": 777}, {"missing": 0, "cut_at": 1777}])
def test_what_came_before_a_break_counts(server: misbehave.Server, fault: dict[str, Any]) -> None:
    with opened(server.serve("/disk", (GOOD, 1), changed(**fault))) as source:
        assert reading.part(source, 1000, 5000) == DATA[1000:1777]


def test_reads_that_follow_each_other_are_one_request(server: misbehave.Server) -> None:
    with opened(server.serve("/disk", GOOD)) as source:
        source.expect(1000, 400_000)
        assert reading.part(source, 1000, 100_000) == DATA[1000:101_000]
        assert reading.part(source, 101_000, 100_000) == DATA[101_000:201_000]
        # A gap is read over; the last one ends the answer.
        assert reading.part(source, 250_000, 151_000) == DATA[250_000:401_000]
        assert [seen.headers["range"] for seen in server.gets("/disk")[1:]] == ["bytes=1000-400999"]
        # What comes back, or lies behind, is asked for anew.
        assert reading.part(source, 1000, 10) == DATA[1000:1010]
        assert reading.part(source, 500_000, 10) == DATA[500_000:500_010]
        assert len(server.gets("/disk")) == 4


def test_a_request_for_several_reads_goes_on_after_a_break(server: misbehave.Server) -> None:
    with opened(server.serve("/disk", (GOOD, 1), (changed(cut=150_000), 1), GOOD)) as source:
        source.expect(0, 400_000)
        assert reading.part(source, 0, 100_000) == DATA[:100_000]
        assert reading.part(source, 100_000, 100_000) == DATA[100_000:150_000]
        assert reading.part(source, 150_000, 50_000) == DATA[150_000:200_000]
        assert reading.part(source, 200_000, 200_000) == DATA[200_000:400_000]
        ranges = [seen.headers["range"] for seen in server.gets("/disk")[1:]]
        assert ranges == ["bytes=0-399999", "bytes=150000-399999"]


@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_a_stream_that_breaks_says_so(server: misbehave.Server, framing: str) -> None:
    page = changed(ranges=False, framing=framing, cut=500_000)
    with opened(server.serve("/disk", page)) as source, pytest.raises(errors.Transient):
        whole(source)


def test_a_short_body_is_no_end(server: misbehave.Server) -> None:
    with (
        opened(server.serve("/disk", changed(ranges=False, missing=10))) as source,
        pytest.raises(errors.Transient, match="ended before"),
    ):
        whole(source)


def test_content_encoding_is_left_alone(server: misbehave.Server) -> None:
    page = changed(headers={"Content-Encoding": "gzip"})
    with opened(server.serve("/disk.gz", page)) as source:
        assert source.head == DATA[: http.HEAD_SIZE]
        assert whole(source) == DATA
    assert server.requests[0].headers["accept-encoding"] == "identity"


def test_certificates(tmp_path: Path) -> None:
    authority = tls.Authority(tmp_path)
    trusting = base.Access(ca_files=(str(authority.certificate),))
    with misbehave.Server(authority.issue()) as server:
        url = server.serve("/disk", GOOD)
        with opened(url, trusting) as source:
            assert whole(source) == DATA
        with opened(url, base.Access(insecure=True)) as source:
            assert whole(source) == DATA
        with pytest.raises(errors.Unreachable, match="certificate verify failed"):
            refused(url)
    for wrong in (authority.issue("elsewhere.example"), authority.issue(days=-1)):
        with misbehave.Server(wrong) as server, pytest.raises(errors.Unreachable, match="certificate"):
            refused(server.serve("/disk", GOOD), trusting)


def test_not_an_https_server(server: misbehave.Server) -> None:
    with pytest.raises(errors.Unreachable, match="TLS"):
        refused(server.serve("/disk", GOOD).replace("http:", "https:"))


def test_proxies(tmp_path: Path, server: misbehave.Server) -> None:
    authority = tls.Authority(tmp_path)
    trust = (str(authority.certificate),)
    plain = server.serve("/disk", GOOD)
    with misbehave.Server(authority.issue()) as secure, proxy.Proxy(password="me:secret") as between:
        access = base.Access(http_proxy=between.url, https_proxy=between.url, ca_files=trust)
        for url in (plain, secure.serve("/disk", GOOD)):
            with opened(url, access) as source:
                assert whole(source) == DATA
        methods = {seen.method for seen in between.requests}
        assert methods == {"GET", "CONNECT"}
        count = len(between.requests)
        with opened(plain, dataclasses.replace(access, no_proxy="127.0.0.0/8")) as source:
            assert whole(source) == DATA
        assert len(between.requests) == count
        wrong = dataclasses.replace(access, http_proxy=f"http://127.0.0.1:{between.port}")
        with pytest.raises(errors.Unreachable, match="407"):
            refused(plain, wrong)


def test_proxy_that_opens_tunnels(tmp_path: Path) -> None:
    authority, middle = tls.Authority(tmp_path / "a"), tls.Authority(tmp_path / "b", "Proxy CA")
    with misbehave.Server(authority.issue()) as secure, proxy.Proxy(authority=middle) as between:
        trust = (str(middle.certificate),)
        access = base.Access(https_proxy=between.url, ca_files=trust)
        with opened(secure.serve("/disk", GOOD), access) as source:
            assert whole(source) == DATA


def test_closing_ends_a_read_that_waits(server: misbehave.Server) -> None:
    source = opened(server.serve("/disk", (GOOD, 1), changed(stall=100))).__enter__()
    ended: list[BaseException] = []

    def read() -> None:
        try:
            whole(source)
        except errors.Error as err:
            ended.append(err)

    thread = threading.Thread(target=read)
    thread.start()
    processes.wait_for(lambda: server.sent("/disk") == http.HEAD_SIZE + 100, "the stall")
    source.close()
    thread.join(5)
    assert not thread.is_alive()
    assert ended
