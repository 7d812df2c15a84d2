"""The HTTP client: what a request sends, and what it refuses to send."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import urllib3.exceptions

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.sources import base
from cdi_worker.sources.web import client
from tests.support import http_disk, misbehave


@pytest.fixture
def session() -> Iterator[client.Session]:
    with client.Session(base.Access(), cancelling.Cancel()) as made:
        yield made


@pytest.fixture
def server() -> Iterator[misbehave.Server]:
    with misbehave.Server() as running:
        yield running


def test_own_header_replaces_the_common_one(session: client.Session, server: misbehave.Server) -> None:
    url = server.serve("/disk", misbehave.Page(b"data"))
    with session.request("GET", url, headers={"accept": "a/b", "X-Own": "c"}) as answer:
        assert answer.raw.read() == b"data"
    sent = {name.lower(): value for name, value in server.requests[-1].headers.items()}
    assert sent["accept"] == "a/b"
    assert sent["x-own"] == "c"
    assert sent["user-agent"] == client.USER_AGENT
    assert sent["accept-encoding"] == "identity"


@pytest.mark.parametrize("value", ["a\r\nX-Injected: b", "a\n b", "a\r"])
def test_header_of_several_lines_is_refused(
    session: client.Session, server: misbehave.Server, value: str
) -> None:
    url = server.serve("/disk", misbehave.Page(b"data"))
    with pytest.raises(errors.RequestError, match="malformed header") as caught:
        session.request("GET", url, headers={"X-Token": value})
    assert "a" not in str(caught.value).replace("malformed header", "")
    assert not server.requests


@pytest.mark.parametrize("url", ["http://[::1/disk", "http://exa mple.org/", "http://host:port/"])
def test_malformed_url_is_refused(session: client.Session, url: str) -> None:
    with pytest.raises((urllib3.exceptions.LocationParseError, ValueError)):
        session.request("GET", url)


def test_url_is_encoded_once(session: client.Session, server: misbehave.Server) -> None:
    server.serve("/a%20b%C3%A9", misbehave.Page(b"data"))
    for path in ("/a b\u00e9", "/a%20b%C3%A9"):
        with session.request("GET", server.url(path)) as answer:
            assert answer.request.url == server.url("/a%20b%C3%A9")
            assert answer.status_code == 200


def test_cookie_is_not_sent_back(server: misbehave.Server) -> None:
    url = server.serve("/disk", http_disk.changed(headers={"Set-Cookie": "session=1"}))
    with http_disk.opened(url) as source:
        assert http_disk.whole(source) == http_disk.DATA
    assert len(server.requests) > 1
    assert all("cookie" not in request.headers for request in server.requests)
