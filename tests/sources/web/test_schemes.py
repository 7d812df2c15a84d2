"""http:// to a TLS port, and https:// to a port without TLS: the error names the scheme to use."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdi_worker import errors, sources
from cdi_worker.images.engine import cancelling
from cdi_worker.importer.send import client
from cdi_worker.sources import base, wire
from cdi_worker.sources.objects import locations, s3
from tests.support import http_disk, misbehave, proxy, registries, servers, tls, worker

GO = b"Client sent an HTTP request to an HTTPS server.\n"


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Web]:
    """An nginx with TLS."""
    directory = tmp_path_factory.mktemp("secure")
    (directory / "root").mkdir()
    pair = tls.Authority(directory).issue()
    with servers.nginx(directory, directory / "root", servers.Settings(pair=pair)) as server:
        yield server


def test_plain_http_to_nginx_with_tls_advises_https(secure: servers.Web) -> None:
    with pytest.raises(errors.Unreachable, match=f"400 Bad Request; .* use https://127.0.0.1:{secure.port}$"):
        http_disk.refused(f"http://127.0.0.1:{secure.port}/disk")


def test_plain_http_to_a_go_server_with_tls_advises_https(guarded: registries.Registry) -> None:
    with pytest.raises(errors.Unreachable, match=f"; .* use https://127.0.0.1:{guarded.port}$"):
        http_disk.refused(f"http://127.0.0.1:{guarded.port}/v2/")


def test_plain_http_to_s3_with_tls_advises_https(secure: servers.Web) -> None:
    location = locations.S3(
        f"http://127.0.0.1:{secure.port}/bucket/disk", base.Access(user="u", password="p")
    )
    source = s3.S3Source(location, cancelling.NEVER)
    with pytest.raises(errors.Unreachable, match=f"use https://127.0.0.1:{secure.port}"):
        source.open(base.Opening())


def test_redirect_to_a_tls_port_is_named(server: misbehave.Server, secure: servers.Web) -> None:
    there = f"http://localhost:{secure.port}/disk"
    url = server.serve("/disk", misbehave.Page(status=302, to=(there,)))
    with pytest.raises(errors.Unreachable, match=f"use https://localhost:{secure.port}$"):
        http_disk.refused(url)


@pytest.mark.parametrize(
    ("body", "advises"),
    [(GO, True), (b"", False), (b"bad \x1b[2J", False), (b" " * 100_000 + GO, False), (GO * 100_000, True)],
)
def test_only_the_beginning_of_a_body_counts(server: misbehave.Server, body: bytes, advises: bool) -> None:
    url = server.serve("/disk", misbehave.Page(body, status=400))
    with pytest.raises(errors.Unreachable, match="400 Bad Request") as caught:
        http_disk.refused(url)
    assert ("use https://" in str(caught.value)) == advises
    assert "\x1b" not in str(caught.value)


def test_endless_body_of_a_refusal_ends(server: misbehave.Server) -> None:
    url = server.serve("/disk", misbehave.Page(GO, status=400, framing="close", tail=(GO, None)))
    with pytest.raises(errors.Unreachable, match="use https://"):
        http_disk.refused(url)


def test_https_to_nginx_without_tls_advises_http(web: servers.Web) -> None:
    with pytest.raises(errors.Unreachable, match=f"does not speak TLS; use http://127.0.0.1:{web.port}$"):
        http_disk.refused(f"https://127.0.0.1:{web.port}/disk")


def test_registry_without_tls_advises_insecure(server: misbehave.Server, tmp_path: Path) -> None:
    reference, plain = f"docker://127.0.0.1:{server.port}/disk", "does not speak TLS; allow plain http"
    location = base.Location(reference)
    found = sources.find("registry").open(sources.find("registry").accept(location), cancelling.NEVER)
    with pytest.raises(errors.Unreachable, match=r"does not speak TLS; allow plain http \(insecure\)$"):
        found.open(base.Opening())
    done = worker.call("import", reference, tmp_path / "disk.img")
    assert done.error_message.endswith(f"{plain} (--insecure)")
    pod = worker.Pod(tmp_path / "pod")
    pod.call(IMPORTER_SOURCE="registry", IMPORTER_ENDPOINT=reference)
    assert pod.message.endswith(f"{plain} (insecureRegistries in the configuration of CDI)")


def test_plain_http_that_is_allowed_is_not_advised(server: misbehave.Server, tmp_path: Path) -> None:
    url = f"docker://127.0.0.1:{server.port}/a"
    done = worker.call("import", url, tmp_path / "disk.img", "--insecure")
    (warning,) = [line for line in done.errors.splitlines() if "trying http" in line]
    assert warning.endswith(": the port does not speak TLS")


def test_proxy_without_tls_is_named() -> None:
    with proxy.Proxy() as found:
        access = base.Access(https_proxy=f"https://127.0.0.1:{found.port}")
        with pytest.raises(errors.Unreachable, match="the proxy does not speak TLS: write http://"):
            http_disk.refused("https://disks.example/disk", access)


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("127.0.0.1:1", "the proxy: connection refused"),
        ("nowhere.invalid:3128", "the proxy: unknown host"),
        ("", "the proxy answers 501"),
    ],
)
def test_failure_of_a_proxy_has_its_cause(server: misbehave.Server, address: str, reason: str) -> None:
    access = base.Access(https_proxy=f"http://{address or f'127.0.0.1:{server.port}'}")
    with pytest.raises(errors.Unreachable, match=f"{reason}; check the proxy and its URL"):
        http_disk.refused("https://disks.example/disk", access)


@pytest.mark.parametrize(
    "reason", ["WRONG_VERSION_NUMBER] wrong", "RECORD_LAYER_FAILURE] record", "] record"]
)
def test_each_openssl_is_understood(reason: str) -> None:
    text = f"[SSL{reason if reason[0] == ']' else f': {reason}'} layer failure (_ssl.c:1029)"
    found = wire.failure("https://h/x", ssl.SSLError(1, text), first=True)
    assert "use http://h" in str(found)
    other = wire.failure("https://h/x", ssl.SSLError(1, "[SSL: TLSV1_ALERT] no"), first=True)
    assert "use http://" not in str(other)


def test_upload_to_the_other_scheme_advises_it(secure: servers.Web, web: servers.Web) -> None:
    for given, better in (
        (f"http://127.0.0.1:{secure.port}", f"https://127.0.0.1:{secure.port}"),
        (f"https://127.0.0.1:{web.port}", f"http://127.0.0.1:{web.port}"),
    ):
        asking = client.Client(given, ssl.create_default_context(), cancelling.NEVER)
        with pytest.raises(errors.Unreachable, match=f"use {better}"):
            asking.ask("POST", "/x")
