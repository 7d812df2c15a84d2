"""Why a TLS handshake failed, and what to do about it."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterable
from typing import Final, NamedTuple

from cdi_worker.errors import Remedy, Way


class Cause(NamedTuple):
    """Why a handshake failed."""

    reason: str
    remedy: Remedy | None = None


PLAIN: Final = Remedy([("allow plain http", "insecure")])
_UNVERIFIED: Final[Way] = ("do not verify it", "insecure")
_UNKNOWN: Final = Remedy([("add the CA that signed it", "ca_files"), _UNVERIFIED])
_OTHER_NAME: Final = Remedy(
    [("use a host name that is in the certificate", ""), ("have it issued for this one", "")]
)
_FAULTY_CA: Final = Remedy([("replace the CA's certificate", "ca_files"), _UNVERIFIED])
#: By OpenSSL's codes (x509_vfy.h). A self-signed certificate can be trusted like a CA. With 7 and 30, a CA of
#: the same name with another key is trusted, such as its predecessor.
_REMEDIES: Final = {
    **dict.fromkeys((2, 7, 19, 20, 21, 30), _UNKNOWN),
    # Its key cannot be read, its path length, trust settings, key usage, name constraints, weak key; no CA.
    **dict.fromkeys((6, 24, 25, 27, 28, 32, 47, 48, 67, 79), _FAULTY_CA),
    9: Remedy([("correct the clock of this machine", ""), ("renew the server's certificate", "")]),
    10: Remedy([("renew the server's certificate", ""), ("correct the clock of this machine", "")]),
    18: Remedy([("trust this certificate", "ca_files"), _UNVERIFIED]),
    62: _OTHER_NAME,
    64: _OTHER_NAME,
}
_UNUSABLE: Final = Remedy([("replace the server's certificate", ""), _UNVERIFIED])
#: For GnuTLS and libcurl, which do not say what is wrong with the certificate.
UNSPECIFIED: Final = Remedy([("check its dates and its host name", ""), *_UNKNOWN])

#: OpenSSL's reasons. After an alert of the server, only the server's log says more.
_REASONS: Final = (
    (
        "UNSUPPORTED_PROTOCOL|ALERT_PROTOCOL_VERSION|NO_PROTOCOLS|VERSION_TOO_LOW|(?i:legacy.sigalg)",
        "no version of TLS in common with the server",
        Remedy([("enable TLS 1.2 or 1.3 on the server", "")]),
    ),
    (
        "ALERT_(HANDSHAKE_FAILURE|INSUFFICIENT_SECURITY)|NO_(SHARED_CIPHER|CIPHERS)|DH_KEY_TOO_SMALL",
        "no cipher in common with the server",
        Remedy([("enable current ciphers on the server", "")]),
    ),
    (
        "CERTIFICATE_REQUIRED|ALERT_(UNKNOWN_CA|(BAD|UNSUPPORTED)_CERTIFICATE|CERTIFICATE_[EUR])",
        "the server refuses the certificate of this client, or demands one",
        Remedy([("check the client's certificate and the CA that the server trusts", "")]),
    ),
)


def cause(links: Iterable[BaseException]) -> Cause | None:
    """Return the cause of a failed handshake by its chain of exceptions; None if it is unknown."""
    chain = list(links)
    for link in chain:
        if isinstance(link, ssl.SSLCertVerificationError):
            return certificate(link)
    text = " ".join(map(str, chain))
    if found := re.search("certificate verify failed: ([^(]+)", text):
        return Cause(f"TLS: certificate verify failed: {found[1].strip()}", _UNUSABLE)
    for pattern, reason, remedy in _REASONS:
        if re.search(pattern, text):
            return Cause(f"TLS: {reason}", remedy)
    return None


def certificate(err: ssl.SSLCertVerificationError) -> Cause:
    """Return why the server's certificate was refused."""
    # Without the attributes, the exception was made by Python's own code.
    code, text = getattr(err, "verify_code", 0), getattr(err, "verify_message", "") or str(err)
    reason = f"TLS: certificate verify failed: {text.rstrip('.')}"
    return Cause(reason, _REMEDIES.get(code, _UNUSABLE))
