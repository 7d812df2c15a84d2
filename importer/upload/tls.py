"""TLS of the upload server: certificates, and versions and ciphers in Kubernetes' spelling."""

from __future__ import annotations

import dataclasses
import logging
import pathlib
import re
import ssl

from cdi_worker import errors
from cdi_worker.sources import certificates, smallfile

log = logging.getLogger(__name__)

#: The names of OpenShift's TLS profiles and of k8s.io/component-base/cli/flag.
VERSIONS = {
    "VersionTLS10": ssl.TLSVersion.TLSv1,
    "VersionTLS11": ssl.TLSVersion.TLSv1_1,
    "VersionTLS12": ssl.TLSVersion.TLSv1_2,
    "VersionTLS13": ssl.TLSVersion.TLSv1_3,
}
_NEWEST = re.compile(r"TLS_(AES|CHACHA20)_[A-Z0-9_]+")
_GO = re.compile(r"TLS_([A-Z_]+)_WITH_([A-Z0-9_]+)")


@dataclasses.dataclass(frozen=True)
class Server:
    """PEM files, cipher names (comma separated) and the lowest version, as in the environment."""

    certificate: str
    key: str
    client_authority: str
    ciphers: str = ""
    minimum: str = "VersionTLS12"

    def context(self) -> ssl.SSLContext:
        """Return a server's context that verifies a client certificate if there is one."""
        made = certificates.context(ssl.PROTOCOL_TLS_SERVER)
        made.options |= ssl.OP_NO_RENEGOTIATION
        # A client that ends only TCP gets an answer, too. Lengths and chunks show where a body ends.
        made.options |= ssl.OP_IGNORE_UNEXPECTED_EOF
        if self.minimum not in VERSIONS:
            hint = errors.supported(self.minimum, VERSIONS)
            raise errors.RequestError(f"TLS_MIN_VERSION={self.minimum!r}: unknown; {hint}")
        made.minimum_version = VERSIONS[self.minimum]
        names = _usable(self.ciphers)
        if VERSIONS[self.minimum] < ssl.TLSVersion.TLSv1_2:
            # TLS 1.0 and 1.1 sign with SHA-1, which OpenSSL 3 allows only at security level 0.
            names = [*(names or ["DEFAULT"]), "@SECLEVEL=0"]
        if names:
            made.set_ciphers(":".join(names))
        for path in (self.certificate, self.key, self.client_authority):
            if pathlib.Path(path).is_fifo():  # its writer would be waited for
                raise errors.RequestError(f"{path}: is a pipe; name a file")
        pair = smallfile.read(self.certificate), smallfile.read(self.key)
        certificates.load_pair(made, *pair, f"{self.certificate}, {self.key}")
        certificates.trust(made, self.client_authority)
        # The kubelet's probes have no certificate; uploads are refused without one (http.authorize).
        made.verify_mode = ssl.CERT_OPTIONAL
        return made


def openssl_name(name: str) -> str:
    """Return OpenSSL's name of a TLS 1.2 cipher suite given by its IANA (and Go) name or OpenSSL's."""
    found = _GO.fullmatch(name)
    if not found:
        return name
    exchange, cipher = found.groups()
    cipher = re.sub(r"AES_(128|256)", r"AES\1", cipher).replace("_CBC_SHA", "-SHA")
    cipher = cipher.replace("3DES_EDE-SHA", "DES-CBC3-SHA").replace(
        "CHACHA20_POLY1305_SHA256", "CHACHA20-POLY1305"
    )
    exchange = "" if exchange == "RSA" else f"{exchange}-"
    return (exchange + cipher).replace("_", "-")


def _usable(ciphers: str) -> list[str]:
    """Return the ciphers that this OpenSSL supports, without those of TLS 1.3, which are always enabled.

    Raises ``errors.RequestError`` if all others are unknown.
    """
    names, unknown = [], []
    for name in filter(None, map(str.strip, ciphers.split(","))):
        if _NEWEST.fullmatch(name):
            continue
        try:
            certificates.context(ssl.PROTOCOL_TLS_SERVER).set_ciphers(openssl_name(name))
        except ssl.SSLError:
            unknown.append(name)
        else:
            names.append(openssl_name(name))
    if unknown and not names:
        raise errors.RequestError(f"TLS_CIPHERS={ciphers!r}: no cipher that OpenSSL supports")
    for name in unknown:
        log.warning("unknown cipher ignored name=%r", name)
    return names
