"""Which proxy a request uses: the rules of Go's http package, which CDI and Kubernetes follow.

golang.org/x/net/http/httpproxy, ``Config``. One deviation: an entry of ``no_proxy`` may be an IPv6 address in
brackets without a port, which Go ignores.
"""

from __future__ import annotations

import base64
import ipaddress
import urllib.parse

import idna

from cdi_worker import errors
from cdi_worker.sources import wire
from cdi_worker.sources.base import Access

#: Go also knows socks5.
SCHEMES = ("http", "https")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def find(access: Access, url: str) -> str:
    """Return the URL of the proxy for ``url``; empty for none. Raises ``errors.RequestError``.

    An http URL uses only ``http_proxy``, an https URL only ``https_proxy``. Loopback is never proxied.
    """
    scheme, host, port = wire.origin(url)
    chosen = {"http": access.http_proxy, "https": access.https_proxy}.get(scheme, "")
    host = _ascii(host)
    address = _address(host)
    if not chosen or host == "localhost" or (address is not None and address.is_loopback):
        return ""
    entries = filter(None, (entry.strip().lower() for entry in access.no_proxy.split(",")))
    if any(entry == "*" or _matches(entry, host, address, str(port)) for entry in entries):
        return ""
    # Without a scheme it is spoken to over http.
    proxy = chosen if "://" in chosen else f"http://{chosen}"
    try:
        parts = urllib.parse.urlsplit(proxy)
        is_whole = bool(parts.scheme and parts.hostname) and parts.port != 0
    except ValueError:
        is_whole = False
    if not is_whole:
        # Without the text, which may contain a password; nor does the exception belong to the message.
        expected = "[http://][user:password@]host[:port]"
        raise errors.RequestError(f"{scheme}_proxy: malformed; expected {expected}") from None
    if parts.scheme not in SCHEMES:
        reason = f"proxies of the scheme {parts.scheme!r} are not supported; use http or https"
        raise errors.RequestError(f"{scheme}_proxy: {reason}")
    return proxy


def headers(proxy: str) -> dict[str, str]:
    """Return Proxy-Authorization for the credentials in a proxy's URL; empty without them."""
    parts = urllib.parse.urlsplit(proxy)
    if parts.username is None:
        return {}
    # RFC 7617, 2.1: UTF-8. The password may be empty.
    login = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
    encoded = base64.b64encode(login.encode("utf-8", "surrogateescape")).decode()
    return {"Proxy-Authorization": f"Basic {encoded}"}


def _matches(entry: str, host: str, address: Address | None, port: str) -> bool:
    """Return whether one entry matches: a network, an address or a domain, the last two also with a port."""
    network, slash, prefix = entry.partition("/")
    if slash and _address(network) is not None and prefix.isascii() and prefix.isdigit():
        try:
            return address is not None and address in ipaddress.ip_network(entry, strict=False)
        except ValueError:
            return False
    name, wanted = _split(entry)
    if not name or wanted not in {"", port}:
        return False
    found = _address(name)
    if address is not None or found is not None:
        return address == found
    # ``x`` matches itself and what is below, ``.x`` and ``*.x`` only what is below.
    name = _ascii(name.removeprefix("*") if name.startswith("*.") else name)
    return host.endswith(name) if name.startswith(".") else host == name or host.endswith(f".{name}")


def _split(entry: str) -> tuple[str, str]:
    """Split ``host:port`` or ``[address]:port``; the port is empty without one."""
    if entry.startswith("[") and "]" in entry:
        name, _, rest = entry[1:].partition("]")
        return name, rest.removeprefix(":")
    if entry.count(":") == 1:
        name, _, port = entry.partition(":")
        return name, port
    return entry, ""


def _address(text: str) -> Address | None:
    """Return an IP address, an IPv4 address in IPv6 as IPv4, without its zone; None for a name."""
    try:
        found = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found


def _ascii(name: str) -> str:
    """Return the form of a name that is sent, with labels in punycode; a name that has none as it is."""
    if name.isascii():
        return name
    try:
        # A suffix begins with a dot, an empty label.
        dot, rest = (".", name[1:]) if name.startswith(".") else ("", name)
        return dot + idna.encode(rest, uts46=True).decode("ascii")
    except idna.IDNAError:
        return name
