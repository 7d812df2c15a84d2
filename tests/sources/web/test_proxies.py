"""Which proxy is used: each rule of Go's http package as one fact."""

from __future__ import annotations

import pytest

from cdi_worker import errors
from cdi_worker.sources import base
from cdi_worker.sources.web import proxies

PROXY = "http://proxy"
#: Exclusions of each kind at once: none may match what another one means.
NO_PROXY = (
    "sample.org, .below.net, *.star.io, 172.16.5.1, 172.16.5.2:81, 172.16.5.3:80, 10.8.0.0/30, "
    "2001:db8::7, [2001:db8::8]:443, [2001:db8::9]:80, 2002:db8:a::45/64"
)


def chosen(url: str, no_proxy: str = "", **proxy: str) -> str:
    return proxies.find(base.Access(no_proxy=no_proxy, **(proxy or {"http_proxy": PROXY})), url)


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("10.0.0.9:3128", "http://10.0.0.9:3128"),
        ("127.0.0.1:3128", "http://127.0.0.1:3128"),
        ("squid.lan:3128", "http://squid.lan:3128"),
        ("squid.lan", "http://squid.lan"),
        ("localhost", "http://localhost"),
        ("localhost:3128", "http://localhost:3128"),
        ("[fd00::1]:3128", "http://[fd00::1]:3128"),
        ("me:p%40ss@squid.lan:3128", "http://me:p%40ss@squid.lan:3128"),
        ("http://squid.lan:3128", "http://squid.lan:3128"),
        ("http://me:s3cret@squid.lan:3128", "http://me:s3cret@squid.lan:3128"),
        ("https://squid.lan", "https://squid.lan"),
        ("https://127.0.0.1:3128", "https://127.0.0.1:3128"),
        ("", ""),
    ],
)
def test_proxy_without_a_scheme_is_spoken_to_over_http(given: str, used: str) -> None:
    assert chosen("http://disks.example/", http_proxy=given) == used
    assert chosen("https://disks.example/", https_proxy=given) == used


@pytest.mark.parametrize("given", ["foo://host", "socks5://127.0.0.1", "socks5h://squid.lan:1080"])
def test_unsupported_proxy_scheme_is_refused(given: str) -> None:
    with pytest.raises(errors.RequestError, match=f"http_proxy: .*{given.partition(':')[0]}"):
        chosen("http://disks.example/", http_proxy=given)


@pytest.mark.parametrize("given", ["http://", "me:s3cret@squid:x", "http://me:s3cret@[squid"])
def test_malformed_proxy_is_refused_without_its_password(given: str) -> None:
    with pytest.raises(errors.RequestError, match="http_proxy: malformed") as caught:
        chosen("http://disks.example/", http_proxy=given)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "used"),
    [
        ("http://plain.example/", "http://one"),
        ("https://secure.example/", "http://two"),
        ("ftp://plain.example/", ""),
    ],
)
def test_scheme_of_the_url_selects_the_proxy(url: str, used: str) -> None:
    assert chosen(url, http_proxy="one", https_proxy="two") == used
    assert chosen("https://secure.example/", http_proxy="one") == ""
    assert chosen("http://plain.example/", https_proxy="two") == ""


@pytest.mark.parametrize(
    ("host", "is_proxied"),
    [
        # This machine, whatever the exclusions.
        ("localhost", False),
        ("127.0.0.1", False),
        ("127.0.0.2", False),
        ("[::1]", False),
        ("[::ffff:127.0.0.1]", False),
        ("[::2]", True),
        ("localhost.net", True),
        ("local.localhost", True),
        # Addresses and networks, with and without a port.
        ("172.16.5.1", False),
        ("172.16.5.2", True),
        ("172.16.5.3", False),
        ("172.16.5.4", True),
        ("10.8.0.2", False),
        ("10.8.0.4", True),
        ("[::ffff:10.8.0.2]", False),
        ("[2001:db8::7]", False),
        ("[2001:db8::8]", True),
        ("[2001:db8::9]", False),
        ("[2002:db8:a::123]", False),
        ("[2002:db8:b::123]", True),
        ("[fe80::424b:c8be:1643:a1b6]", True),
        # Names: itself and below, or only below.
        ("sample.org", False),
        ("SAMPLE.org", False),
        ("www.sample.org", False),
        ("asample.org", True),
        ("ample.org", True),
        ("below.net", True),
        ("www.below.net", False),
        ("abelow.net", True),
        ("star.io", True),
        ("nested.star.io", False),
        ("a.nested.star.io", False),
        ("astar.io", True),
    ],
)
def test_no_proxy_excludes_names_addresses_and_networks(host: str, is_proxied: bool) -> None:
    assert chosen(f"http://{host}/disk", NO_PROXY) == (PROXY if is_proxied else "")
    assert chosen(f"http://{host}:80/disk", NO_PROXY) == (PROXY if is_proxied else "")
    assert chosen(f"http://{host}/disk", "*") == ""
    assert chosen(f"http://{host}/disk", f"{NO_PROXY}, *") == ""


@pytest.mark.parametrize(
    ("no_proxy", "url", "is_proxied"),
    [
        ("example.com", "http://example.com/", False),
        (".example.com", "http://example.com/", True),
        ("ample.com", "http://example.com/", True),
        ("example.com", "http://foo.example.com/", False),
        (".foo.com", "http://example.com/", True),
        ("example.com:81", "http://example.com/", True),
        ("example.com:81", "http://a.example.com:81/", False),
        ("*.example.com:81", "http://a.example.com:81/", False),
        ("*.example.com:81", "http://a.example.com/", True),
        (" Example.COM ,", "http://example.com/", False),
        (":1", "http://example.com/", True),
        (",,", "http://example.com/", True),
        ("10.0.0.0/99", "http://10.0.0.1/", True),
        ("10.0.0.0/255.0.0.0", "http://10.0.0.1/", True),
        ("[fd00::1]", "http://[fd00::1]/", False),
        ("[::1]", "http://[::1]/", False),
        # Internationalized names, in either form.
        (".bücher.example", "http://www.bücher.example/", False),
        ("xn--bcher-kva.example", "http://www.bücher.example/", False),
        ("bücher.example", "http://www.xn--bcher-kva.example/", False),
        ("bücher.example", "http://www.buecher.example/", True),
        # A zone of an address is not a domain.
        ("example.com", "http://[1000::%25.example.com]:123/", True),
    ],
)
def test_entry_of_no_proxy(no_proxy: str, url: str, is_proxied: bool) -> None:
    assert chosen(url, no_proxy) == (PROXY if is_proxied else "")


@pytest.mark.parametrize(
    ("proxy", "header"),
    [
        ("http://squid", ""),
        ("http://me:secret@squid", "Basic bWU6c2VjcmV0"),
        ("http://me@squid", "Basic bWU6"),
        ("http://me:p%40s%3As@squid", "Basic bWU6cEBzOnM="),
        ("http://me:gr%C3%BC%C3%9Fe@squid", "Basic bWU6Z3LDvMOfZQ=="),
    ],
)
def test_credentials_of_a_proxy_are_sent_as_utf8(proxy: str, header: str) -> None:
    assert proxies.headers(proxy).get("Proxy-Authorization", "") == header
