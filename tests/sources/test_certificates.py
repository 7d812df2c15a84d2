"""Which certificates are trusted: those that curl and Go accept, with each library that makes connections."""

from __future__ import annotations

import codecs
import contextlib
import datetime as dt
import socket
import ssl
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.importer import contract
from cdi_worker.importer.metrics import server as metrics_server
from cdi_worker.importer.send import client as upload_client
from cdi_worker.importer.send import file as send_file
from cdi_worker.importer.upload import tls as upload_tls
from cdi_worker.sources import base, wire
from cdi_worker.sources.glance import keystone
from cdi_worker.sources.glance import locations as glance
from cdi_worker.sources.nbd import handshake
from cdi_worker.sources.nbd import locations as nbd
from cdi_worker.sources.objects import aws, gcp
from cdi_worker.sources.objects import locations as objects
from cdi_worker.sources.ovirt import backend as backends
from cdi_worker.sources.ovirt import data, engine
from cdi_worker.sources.ovirt import locations as ovirt
from cdi_worker.sources.vmware import locations as vmware
from cdi_worker.sources.vmware import session as vmware_session
from cdi_worker.sources.web import session as web_session
from tests.support import nbd_exports, pairs, processes, tls, uploads


class Trust(NamedTuple):
    """What a client trusts, and the server's certificate."""

    anchor: Path
    pair: tls.KeyPair

    @property
    def access(self) -> base.Access:
        return base.Access(user="user", password="secret", ca_files=(str(self.anchor),))


def _usual(folder: Path, **given: Any) -> Trust:
    authority = tls.Authority(folder)
    return Trust(authority.certificate, authority.issue(**given))


def _bare(folder: Path, **given: Any) -> Trust:
    authority = tls.Authority(folder, bare=True)
    return Trust(authority.certificate, authority.issue(**given))


def _first_version(folder: Path, **given: Any) -> Trust:
    authority = tls.Authority(folder, bare=True).become_first_version()
    return Trust(authority.certificate, authority.issue(**given))


def _intermediate(folder: Path, **given: Any) -> Trust:
    authority = tls.Authority(folder / "sub", "Sub", parent=tls.Authority(folder / "root", "Root"))
    return Trust(authority.certificate, authority.issue(**given))


def _itself(folder: Path, **given: Any) -> Trust:
    """The certificate itself, of a CA that the other end does not know."""
    pair = tls.Authority(folder).issue(**given)
    return Trust(pair.certificate, pair)


TRUSTS = {
    "usual": _usual,
    "bare": _bare,
    "version 1": _first_version,
    "intermediate": _intermediate,
    "itself": _itself,
}


class Listening(NamedTuple):
    """A server that closes each connection after the first bytes of a request, which it keeps."""

    port: int
    requests: list[bytes]

    def url(self, path: str = "/") -> str:
        return f"https://localhost:{self.port}{path}"


@contextlib.contextmanager
def listening(pair: tls.KeyPair) -> Iterator[Listening]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    found: list[bytes] = []

    def serve() -> None:
        while True:
            try:
                taken, _ = listener.accept()
            except OSError:
                return
            with taken, contextlib.suppress(OSError), context.wrap_socket(taken, server_side=True) as secure:
                if request := secure.recv(1 << 16):
                    found.append(request)
                    # pyVmomi leaves the connection open after any other failure.
                    status = b"500 Fault" if request.startswith(b"POST /sdk") else b"404 Not Found"
                    secure.sendall(b"HTTP/1.1 %b\r\nConnection: close\r\nContent-Length: 0\r\n\r\n" % status)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield Listening(listener.getsockname()[1], found)
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


# -- one way to make a context ---------------------------------------------------------------------


def _of_imageio(trust: Trust) -> ssl.SSLContext:
    backend = type("Backend", (backends.Backend,), {"access": trust.access})
    made = backend(urllib.parse.urlparse("https://host/x"), connect=False)
    context: ssl.SSLContext = made._create_ssl_context()
    return context


def _of_sending(trust: Trust) -> ssl.SSLContext:
    settings = send_file.Settings("disk", "https://localhost", access=trust.access)
    return send_file._tls(settings)


CONTEXTS: dict[str, Callable[[Trust], ssl.SSLContext]] = {
    "sources": lambda trust: wire.tls_context(trust.access),
    "imageio": _of_imageio,
    "upload": _of_sending,
    "clone": lambda trust: upload_client.context(
        *(path.read_text() for path in (trust.anchor, trust.pair.certificate, trust.pair.key))
    ),
    "upload server": lambda trust: upload_tls.Server(
        str(trust.pair.certificate), str(trust.pair.key), str(trust.anchor)
    ).context(),
    "vSphere by thumbprint": lambda trust: vmware_session.pinned(trust.pair.thumbprint),
    "metrics": lambda _: metrics_server._context(),
}


@pytest.mark.parametrize("made", CONTEXTS)
def test_every_context_verifies_as_curl_does(made: str, tmp_path: Path) -> None:
    """Python 3.13 sets the strict flag by default, and Python 3.11 leaves the other one out."""
    flags = CONTEXTS[made](_usual(tmp_path)).verify_flags
    assert not flags & ssl.VERIFY_X509_STRICT
    assert flags & ssl.VERIFY_X509_PARTIAL_CHAIN


# -- each library ----------------------------------------------------------------------------------


def _http(trust: Trust, server: Listening) -> None:
    with web_session.new_session(trust.access, cancelling.NEVER) as session:
        session.get(server.url())


def _aws(trust: Trust, server: Listening) -> None:
    keys = aws.Keys(trust.access, cancelling.NEVER)
    login = {"aws_access_key_id": "x", "aws_secret_access_key": "y", "region_name": "us-east-1"}
    keys._session().client("sts", endpoint_url=server.url(), **login).get_caller_identity()


def _google(trust: Trust, server: Listening) -> None:
    with contextlib.closing(gcp.Keys(objects.Gcs("gs://b/o", trust.access), cancelling.NEVER)) as keys:
        keys._transport(server.url())


def _keystone(trust: Trust, server: Listening) -> None:
    where = glance.Glance(server.url("/v3"), trust.access, image_id="7", project_id="p", user_domain_id="d")
    with contextlib.closing(keystone.Keystone(where, cancelling.NEVER)) as login:
        login.token()


def _vsphere(trust: Trust, server: Listening) -> None:
    where = vmware.Vddk(server.url("/sdk"), trust.access, uuid="u", backing_file="f")
    with vmware_session.Session(where):
        pass


def _engine(trust: Trust, server: Listening) -> None:
    where = ovirt.Imageio(server.url("/ovirt-engine/api"), trust.access, disk_id="d")
    with wire.authorities(trust.access) as authorities:
        engine.Engine(where, authorities, cancelling.NEVER).log_in()


def _imageio(trust: Trust, server: Listening) -> None:
    data.Pool("disk", trust.access, cancelling.NEVER).connect([server.url("/images/x")])


def _upload(trust: Trust, server: Listening) -> None:
    settings = send_file.Settings("disk", server.url(), access=trust.access)
    upload_client.Client(server.url(), send_file._tls(settings), cancelling.Cancel()).ask("HEAD", "/")


LIBRARIES = {
    "requests": _http,
    "botocore": _aws,
    "google-auth": _google,
    "keystoneauth1": _keystone,
    "pyVmomi": _vsphere,
    "ovirtsdk4": _engine,
    "ovirt_imageio": _imageio,
    "upload": _upload,
}


@pytest.mark.parametrize(
    ("library", "kind"),
    # Each library meets a certificate that strict verification refuses, and one without its root.
    [*pairs.dealt(LIBRARIES, ["bare", "version 1"]), *pairs.dealt(LIBRARIES, ["intermediate", "itself"])],
)
def test_library_trusts_what_curl_trusts(library: str, kind: str, tmp_path: Path) -> None:
    """Each reports the error of the answer; that the server has received a request proves the handshake."""
    trust = TRUSTS[kind](tmp_path)
    with listening(trust.pair) as server:
        with contextlib.suppress(Exception):
            LIBRARIES[library](trust, server)
        assert server.requests


@pytest.mark.parametrize("library", LIBRARIES)
def test_library_refuses_another_authority(library: str, tmp_path: Path) -> None:
    known = Trust(tls.Authority(tmp_path / "other").certificate, _usual(tmp_path).pair)
    with listening(known.pair) as server:
        with contextlib.suppress(Exception):
            LIBRARIES[library](known, server)
        assert not server.requests


@pytest.mark.parametrize("kind", TRUSTS)
def test_nbd_trusts_what_curl_trusts(kind: str, tmp_path: Path) -> None:
    trust = TRUSTS[kind](tmp_path)
    folder = tmp_path / "server"
    folder.mkdir()
    for name, path in (
        ("ca-cert.pem", trust.anchor),
        ("server-cert.pem", trust.pair.certificate),
        ("server-key.pem", trust.pair.key),
    ):
        (folder / name).write_bytes(path.read_bytes())
    options = ("--tls=require", f"--tls-certificates={folder}")
    with nbd_exports.nbdkit(tmp_path, "-r", *options, "memory", "1M") as port:
        where = nbd.Nbd(f"nbds://localhost:{port}/", trust.access)
        with handshake.credentials(where) as credentials:
            server = handshake.Server("disk", nbd.parse(where.endpoint), folder=credentials)
            handle, _ = handshake.connect(server, cancelling.Cancel(), processes.PATIENCE)
            assert handle.get_size() == 1 << 20
            handle.shutdown()  # nbdkit waits for its client


@pytest.mark.parametrize("kind", TRUSTS)
def test_upload_server_trusts_what_go_trusts(kind: str, tmp_path: Path) -> None:
    own = tls.Authority(tmp_path / "own", "Own").issue()
    trust = TRUSTS[kind](tmp_path / "clients", common_name=uploads.CLIENT, client=True)
    context = upload_tls.Server(str(own.certificate), str(own.key), str(trust.anchor)).context()
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.load_verify_locations(own.certificate)
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_cert_chain(trust.pair.certificate, trust.pair.key)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(back, there, server_hostname="localhost"),
        context.wrap_bio(there, back, server_side=True),
    )
    for end in ends * 2:
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
    assert (("commonName", uploads.CLIENT),) in ends[1].getpeercert()["subject"]


# -- files of certificates -------------------------------------------------------------------------


def _one_line(good: bytes) -> bytes:
    """Two certificates, as `cat` joins files without a line break at their ends."""
    return good.rstrip() + good


def _der(good: bytes) -> bytes:
    return ssl.PEM_cert_to_DER_cert(good.decode())


def _truncated(good: bytes) -> bytes:
    head, _, rest = good.partition(b"\n")
    return head + b"\n" + rest[40:]


READABLE: dict[str, Callable[[bytes], bytes]] = {
    "one line": _one_line,
    "byte-order mark": lambda good: codecs.BOM_UTF8 + good,
    "UTF-16": lambda good: good.decode().encode("utf-16"),
    "Windows lines": lambda good: good.replace(b"\n", b"\r\n"),
    "no line breaks": lambda good: good.replace(b"\n", b"").replace(b"-----M", b"-----\nM"),
    "text": lambda good: "# Größe der Zertifikate\n".encode() + good + b"-----BEGIN X509 CRL-----\n",
    "label": lambda good: good.replace(b"CERTIFICATE", b"X509 CERTIFICATE"),
    "damaged before": lambda good: _truncated(good) + good,
    "damaged after": lambda good: good + _truncated(good),
    "no end": lambda good: good.partition(b"-----END")[0] + good,
    "no base64": lambda good: b"-----BEGIN CERTIFICATE-----\n<h1>\n-----END CERTIFICATE-----\n" + good,
}


@pytest.mark.parametrize("form", READABLE)
def test_usable_certificates_of_a_file_are_trusted(
    form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trust = _usual(tmp_path)
    trust.anchor.write_bytes(READABLE[form](trust.anchor.read_bytes()))
    for use in (_http, _engine, _imageio, _upload):
        with listening(trust.pair) as server:
            with contextlib.suppress(Exception):
                use(trust, server)
            assert server.requests, use
    number = {"damaged before": 1, "damaged after": 2, "no end": 1, "no base64": 1}.get(form)
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    expected = f"certificate ignored: it is damaged file={str(trust.anchor)!r} block={number}"
    assert warnings == ([expected] if number else [])


@pytest.mark.parametrize("form", READABLE)
def test_usable_certificates_of_a_folder_and_of_texts_are_trusted(form: str, tmp_path: Path) -> None:
    trust = _usual(tmp_path)
    data = READABLE[form](trust.anchor.read_bytes())
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "ca.crt").write_bytes(data)
    assert contract.certificate_files(str(tmp_path / "folder")) == (str(tmp_path / "folder/ca.crt"),)
    if form != "UTF-16":  # not in a variable
        texts = (path.read_text() for path in (trust.pair.certificate, trust.pair.key))
        context = upload_client.context(data.decode(), *texts)
        assert context.cert_store_stats()["x509"] == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_der, "ca.pem: a DER certificate, not a PEM one; convert it: openssl x509 -inform der -in"),
        (_truncated, "ca.pem: not a valid PEM certificate: 1 damaged"),
        (lambda _: b"", "ca.pem: not a valid PEM certificate: no line BEGIN CERTIFICATE"),
    ],
)
def test_file_without_a_usable_certificate_is_refused(
    change: Callable[[bytes], bytes], message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another file makes it a warning."""
    anchor, good = tls.Authority(tmp_path).certificate, tls.Authority(tmp_path / "other").certificate
    anchor.write_bytes(change(anchor.read_bytes()))
    for made in (wire.tls_context, lambda access: wire.authorities(access).__enter__()):
        with pytest.raises(errors.RequestError) as caught:
            made(base.Access(ca_files=(str(anchor),)))
        assert message in str(caught.value)
        assert "_ssl.c" not in str(caught.value)
    caplog.clear()
    wire.tls_context(base.Access(ca_files=(str(anchor), str(good))))
    assert message in caplog.text


def test_what_is_trusted_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority = tls.Authority(tmp_path)
    expired = authority.issue(common_name="old.example.org", days=-1).certificate
    bundle = tmp_path / "bundle.pem"
    bundle.write_bytes(authority.certificate.read_bytes() + expired.read_bytes())
    caplog.set_level("INFO")
    wire.tls_context(base.Access(ca_files=(str(bundle),)))
    until = (dt.datetime.now(dt.UTC) + dt.timedelta(days=30)).strftime("%Y-%m-%d")
    assert f"trusts file={str(bundle)!r} subject='CN=Test CA' until={until}" in caplog.text
    assert f"certificate 2 of {bundle} has expired subject='CN=old.example.org'" in caplog.text


def test_expired_certificates_of_a_large_bundle_are_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in the bundle of a distribution, which has some of public CAs."""
    authority = tls.Authority(tmp_path)
    bundle = tmp_path / "bundle.pem"
    issued = [authority.issue(common_name=f"{number}.example.org", days=-1) for number in range(21)]
    bundle.write_bytes(b"".join(each.certificate.read_bytes() for each in issued))
    wire.tls_context(base.Access(ca_files=(str(bundle),)))
    assert "has expired" not in caplog.text


def test_key_of_another_certificate_is_named(tmp_path: Path) -> None:
    authority = tls.Authority(tmp_path)
    one, other = authority.issue(), authority.issue()
    server = upload_tls.Server(str(one.certificate), str(other.key), str(authority.certificate))
    with pytest.raises(errors.RequestError, match="the key is not that of the certificate"):
        server.context()
    one.certificate.write_bytes(b"")
    with pytest.raises(errors.RequestError, match=r"no certificate and key in PEM form$"):
        upload_tls.Server(str(one.certificate), str(one.key), str(authority.certificate)).context()
