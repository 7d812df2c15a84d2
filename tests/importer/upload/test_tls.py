"""TLS versions and ciphers of the upload server, as set by the environment."""

from __future__ import annotations

import http.client
import os
import ssl
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.importer import contract
from cdi_worker.importer.send import client as upload_client
from cdi_worker.importer.upload import tls
from tests.support import processes, uploads

NAMES = {
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": "ECDHE-RSA-AES128-GCM-SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384": "ECDHE-ECDSA-AES256-GCM-SHA384",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-ECDSA-CHACHA20-POLY1305",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305": "ECDHE-RSA-CHACHA20-POLY1305",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA": "ECDHE-RSA-AES128-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA256": "ECDHE-ECDSA-AES128-SHA256",
    "TLS_RSA_WITH_AES_256_GCM_SHA384": "AES256-GCM-SHA384",
    "TLS_RSA_WITH_3DES_EDE_CBC_SHA": "DES-CBC3-SHA",
    "ECDHE-RSA-AES128-GCM-SHA256": "ECDHE-RSA-AES128-GCM-SHA256",
}


def test_cipher_is_known_by_name() -> None:
    assert {name: tls.openssl_name(name) for name in NAMES} == NAMES


CIPHERS = "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA,ECDHE-ECDSA-AES128-GCM-SHA256"


@pytest.mark.parametrize(
    ("minimum", "ciphers", "offered", "taken"),
    [
        ("", "", ssl.TLSVersion.TLSv1_2, True),
        ("", CIPHERS, ssl.TLSVersion.TLSv1_1, False),
        ("", CIPHERS, ssl.TLSVersion.TLSv1_2, True),
        ("VersionTLS13", "", ssl.TLSVersion.TLSv1_2, False),
        ("VersionTLS13", CIPHERS, ssl.TLSVersion.TLSv1_3, True),
        ("VersionTLS12", CIPHERS, ssl.TLSVersion.TLSv1_2, True),
        ("VersionTLS11", "", ssl.TLSVersion.TLSv1, False),
        ("VersionTLS11", CIPHERS, ssl.TLSVersion.TLSv1_1, True),
        ("VersionTLS10", "", ssl.TLSVersion.TLSv1, True),
        ("VersionTLS10", CIPHERS, ssl.TLSVersion.TLSv1, True),
        ("VersionTLS10", "", ssl.TLSVersion.TLSv1_2, True),
    ],
)
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1:DeprecationWarning")
def test_tls_version_is_negotiated(
    certificates: uploads.Certificates,
    paths: contract.Paths,
    minimum: str,
    ciphers: str,
    offered: ssl.TLSVersion,
    taken: bool,
) -> None:
    """Even versions that OpenSSL disables by default, if requested, as by OpenShift's profile Old."""
    env = {"TLS_MIN_VERSION": minimum, "TLS_CIPHERS": ciphers}
    with uploads.Server(certificates, env, paths) as server:
        context = certificates.context(None)
        context.set_ciphers("ALL:@SECLEVEL=0")
        context.minimum_version = context.maximum_version = offered
        if taken:
            assert shake_hands(server, context)[1] == offered.name.replace("_", ".")
        else:
            with pytest.raises(ssl.SSLError):
                shake_hands(server, context)


def test_unknown_ciphers_are_ignored(certificates: uploads.Certificates, paths: contract.Paths) -> None:
    ciphers = "TLS_AES_128_GCM_SHA256,TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384, nonsense"
    with uploads.Server(certificates, {"TLS_CIPHERS": ciphers}, paths) as server:
        context = certificates.context(None)
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        assert shake_hands(server, context)[0] == "ECDHE-ECDSA-AES256-GCM-SHA384"
        context.set_ciphers("ECDHE-ECDSA-AES128-GCM-SHA256")
        with pytest.raises(ssl.SSLError):
            shake_hands(server, context)


def shake_hands(server: uploads.Server, context: ssl.SSLContext) -> tuple[str, str]:
    """Return the cipher and the version that both ends agreed on."""
    port, limit = server.port, processes.PATIENCE
    client = http.client.HTTPSConnection("localhost", port, context=context, timeout=limit)
    try:
        client.connect()
        found = client.sock.cipher()
        return found[0], client.sock.version()
    finally:
        client.close()


@pytest.mark.parametrize(
    "env", [{"TLS_CIPHERS": "nonsense"}, {"TLS_MIN_VERSION": "1.2"}, {"TLS_CERT_FILE": "/missing"}]
)
def test_invalid_tls_setting_is_reported(
    certificates: uploads.Certificates, paths: contract.Paths, env: dict[str, str]
) -> None:
    with uploads.Server(certificates, env, paths) as server, pytest.raises(errors.RequestError):
        server.result()


@pytest.mark.parametrize("name", ["TLS_CERT_FILE", "TLS_KEY_FILE", "CLIENT_CERT_FILE"])
def test_pipe_for_a_certificate_is_refused(
    certificates: uploads.Certificates, paths: contract.Paths, tmp_path: Path, name: str
) -> None:
    """OpenSSL would wait for its writer."""
    os.mkfifo(tmp_path / "pipe")
    env = {name: str(tmp_path / "pipe")}
    with uploads.Server(certificates, env, paths) as server, pytest.raises(errors.RequestError, match="pipe"):
        server.result()


def test_malformed_certificate_is_reported() -> None:
    with pytest.raises(errors.RequestError):
        upload_client.context("no PEM", "", "")
