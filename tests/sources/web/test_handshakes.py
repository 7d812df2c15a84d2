"""A TLS handshake that fails: each cause has its own advice, in the words of whoever reads it."""

from __future__ import annotations

import contextlib
import functools
import pickle
import socket
import ssl
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.importer import contract, report
from cdi_worker.importer.send import volume
from tests.support import http_disk, misbehave, tls, worker

UNKNOWN = "add the CA that signed it"
TRUST = "trust this certificate"
REPLACE = "replace the CA's certificate"
RENEW = "renew the server's certificate, or correct the clock of this machine"
CLOCK = "correct the clock of this machine, or renew the server's certificate"
NAME = "use a host name that is in the certificate, or have it issued for this one"
Change = Callable[[ssl.SSLContext], object]


def _old(context: ssl.SSLContext) -> None:
    context.set_ciphers("ALL:@SECLEVEL=0")
    with warnings.catch_warnings():
        # Deprecated by Python, and just what a server of the past does.
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1


def _rare(context: ssl.SSLContext) -> None:
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    # An anonymous key exchange, which no client offers.
    context.set_ciphers("ADH-AES128-SHA256:@SECLEVEL=0")


class Case(NamedTuple):
    """A server's certificate, what OpenSSL calls the fault, and the advice; ``ca``: it begins with a CA's."""

    pair: Callable[[tls.Authority, tls.Authority], tls.KeyPair]
    fault: str
    advice: str
    ca: bool = False
    change: Change = lambda _: None


CASES = {
    "expired": Case(lambda known, _: known.issue(days=-1), "certificate has expired", RENEW),
    "early": Case(lambda known, _: known.issue(after=1), "certificate is not yet valid", CLOCK),
    "name": Case(lambda known, _: known.issue("other.example.org"), "ismatch", NAME),
    "unknown": Case(lambda _, other: other.issue(), "unable to get local issuer", UNKNOWN, ca=True),
    "no CA": Case(
        lambda known, _: known.lose_its_right().issue(), "invalid CA certificate", REPLACE, ca=True
    ),
    "namesake": Case(
        lambda known, _: tls.Authority(known.directory / "new", "Known", bare=True).issue(),
        "certificate signature failure", UNKNOWN, ca=True,
    ),
    "own": Case(lambda known, _: known.issue(own=True), "self-signed certificate", TRUST, ca=True),
    "version": Case(
        lambda known, _: known.issue(), "no version of TLS in common", "enable TLS 1.2 or 1.3 on the server",
        change=_old,
    ),
    "cipher": Case(
        lambda known, _: known.issue(), "no cipher in common", "enable current ciphers on the server",
        change=_rare,
    ),
}  # fmt: skip


@contextlib.contextmanager
def listening(pair: tls.KeyPair, change: Change) -> Iterator[int]:
    """Run a server that makes TLS handshakes and nothing else; yield its port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    change(context)

    def serve() -> None:
        while True:
            try:
                taken, _ = listener.accept()
            except OSError:
                return
            with taken, contextlib.suppress(OSError), context.wrap_socket(taken, server_side=True) as secure:
                secure.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


class Site(NamedTuple):
    """A server with a faulty certificate, and the CA that the client trusts."""

    case: Case
    port: int
    ca: Path

    def check(self, message: str, *ways: str) -> None:
        """Check the whole advice: with each way of ``ways`` if the case can be mended by a setting."""
        expected = self.case.advice
        if self.case.ca:
            expected = f"{expected} ({ways[0]})"
            expected += f", or do not verify it ({ways[1]})" if ways[1:] else ""
        assert self.case.fault in message, message
        assert message.endswith(f"; {expected}"), message


@pytest.fixture
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    """Run the server of a case of ``CASES``."""
    case = CASES[request.param]
    known, other = tls.Authority(tmp_path / "ca", "Known"), tls.Authority(tmp_path / "other", "Other")
    with listening(case.pair(known, other), case.change) as port:
        yield Site(case, port, known.certificate)


#: One case that a setting mends and one that none does: the front ends differ in the names of settings.
each_kind = pytest.mark.parametrize("site", ["unknown", "expired"], indirect=True)


@pytest.mark.parametrize("site", CASES, indirect=True)
def test_library_names_the_field_of_the_access(site: Site) -> None:
    access = functools.partial(http_disk.base.Access, ca_files=(str(site.ca),))
    with pytest.raises(errors.Unreachable) as caught:
        http_disk.refused(f"https://127.0.0.1:{site.port}/disk", access())
    site.check(str(caught.value), "ca_files", "insecure")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert str(caught.value.as_fields()["remedy"]) in str(caught.value)


@each_kind
def test_terminal_names_the_option(site: Site, tmp_path: Path) -> None:
    url = f"https://127.0.0.1:{site.port}/disk"
    done = worker.call("import", url, tmp_path / "disk.img", "--ca-file", site.ca)
    assert done.status == 3, done.errors
    site.check(done.error_message, "--ca-file", "--insecure")


@each_kind
def test_upload_names_the_option(site: Site, tmp_path: Path) -> None:
    (tmp_path / "image").write_bytes(bytes(4096))
    done = worker.call("upload", tmp_path / "image", f"https://127.0.0.1:{site.port}", "--ca-file", site.ca)
    assert done.status == 3, done.errors
    site.check(done.error_message, "--ca-file", "--insecure")


@pytest.mark.parametrize(
    ("site", "source"), [("unknown", "http"), ("unknown", "registry"), ("expired", "http")], indirect=["site"]
)
def test_pod_names_the_field_of_the_data_volume(site: Site, tmp_path: Path, source: str) -> None:
    trusted = tmp_path / "trusted"
    trusted.mkdir()
    (trusted / "ca.crt").write_bytes(site.ca.read_bytes())
    pod = worker.Pod(tmp_path)
    scheme = {"http": "https", "registry": "docker"}[source]
    pod.call(
        IMPORTER_SOURCE=source,
        IMPORTER_ENDPOINT=f"{scheme}://127.0.0.1:{site.port}/disk",
        IMPORTER_CERT_DIR=str(trusted),
    )
    insecure = ("insecureRegistries in the configuration of CDI",) if source == "registry" else ()
    site.check(pod.message, f"spec.source.{source}.certConfigMap", *insecure)
    assert "IMPORTER_" not in pod.message


def test_pod_that_tries_again_names_the_field(tmp_path: Path) -> None:
    pod = worker.Pod(tmp_path)
    with misbehave.Server(tls.Authority(tmp_path / "ca").issue()) as server:
        env = {**pod.env, "IMPORTER_SOURCE": "http", "IMPORTER_ENDPOINT": server.url("/disk")}
        done = worker.call(*pod.arguments, "--retries=1", env=env)
    (again,) = [line for line in done.errors.splitlines() if "retry in" in line]
    assert again.endswith("; add the CA that signed it (spec.source.http.certConfigMap)")


@each_kind
def test_clone_source_names_no_setting(site: Site, tmp_path: Path) -> None:
    """CDI's controllers give both pods of a clone their certificates."""
    (tmp_path / "volume").write_bytes(bytes(4096))
    client = tls.Authority(tmp_path / "clients").issue(common_name="client", client=True)
    env = {
        "UPLOAD_URL": f"https://127.0.0.1:{site.port}/v1beta1/upload",
        "VOLUME_MODE": "block",
        "MOUNT_POINT": str(tmp_path / "volume"),
        "CLIENT_KEY": client.key.read_text(),
        "CLIENT_CERT": client.certificate.read_text(),
        "SERVER_CA_CERT": site.ca.read_text(),
    }
    with pytest.raises(errors.Unreachable) as caught:
        volume.run(env, contract.Paths(metrics_port=0), cancelling.Cancel())
    site.check(
        report.failure(caught.value, "").message,
        "delete this pod: CDI makes it again with its current CA",
    )
