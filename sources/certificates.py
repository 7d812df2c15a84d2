"""TLS contexts, and the certificates that they trust: what curl and Go accept."""

from __future__ import annotations

import base64
import codecs
import contextlib
import datetime as dt
import functools
import logging
import os
import re
import ssl
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from cdi_worker import errors, masking
from cdi_worker.sources import smallfile, sockets

log = logging.getLogger(__name__)

Context = TypeVar("Context", bound=ssl.SSLContext)

#: A certificate in PEM form, with the labels that OpenSSL accepts (PEM_read_bio_X509_AUX). One without an end
#: ends with the next dashes.
_BLOCK: Final = re.compile(
    rb"-----BEGIN (?P<label>(?:X509 |TRUSTED )?CERTIFICATE)-----(?P<text>[^-]*)"
    rb"(?P<end>-----END (?P=label)-----)?"
)
#: Most bytes of a file of certificates. Those of distributions have a quarter of a MiB.
LARGEST: Final = 16 << 20
#: Most certificates of a file that are logged, and most characters of a subject.
LISTED: Final = 20
LONGEST: Final = 200
#: The attributes of a name that are shown (RFC 4514, 3).
_ATTRIBUTES: Final = {"commonName": "CN", "organizationName": "O", "organizationalUnitName": "OU"}


class Certificate(NamedTuple):
    """A certificate of a file: its number there, its subject, and when it expires."""

    block: int
    subject: str
    until: dt.datetime | None

    @property
    def has_expired(self) -> bool:
        return self.until is not None and self.until < dt.datetime.now(dt.UTC)


class Bundle(NamedTuple):
    """The usable certificates of a file as PEM text, what they are, and the numbers of damaged ones."""

    text: bytes
    certificates: tuple[Certificate, ...]
    damaged: tuple[int, ...]


def context(protocol: int = ssl.PROTOCOL_TLS_CLIENT) -> ssl.SSLContext:
    """Return a TLS context that trusts nothing yet.

    Python 3.13 would refuse a CA without key identifiers or key usage, and Python 3.11 a certificate that is
    trusted by itself, such as an intermediate. curl and Go accept both.
    """
    return prepare(ssl.SSLContext(protocol))


def prepare(tls: Context) -> Context:
    """Set what every context of this program has; return it."""
    tls.verify_flags = (tls.verify_flags | ssl.VERIFY_X509_PARTIAL_CHAIN) & ~ssl.VERIFY_X509_STRICT
    if tls.protocol == ssl.PROTOCOL_TLS_CLIENT:
        tls.sslsocket_class = sockets.Secure
    return tls


def trust(tls: ssl.SSLContext, *files: str) -> None:
    """Add the certificates of PEM files. Raises ``errors.RequestError``; see ``usable``."""
    for text in read(files):
        load(tls, text)


def read(files: Iterable[str]) -> Iterator[bytes]:
    """Yield the usable certificates of each file as PEM text.

    A file without any is only warned about if another one has some: a folder may hold such a file.
    """
    faults: list[str] = []
    has_some = False
    for path in files:
        try:
            yield usable(smallfile.read(path, LARGEST), path)
            has_some = True
        except errors.RequestError as err:
            faults += err.faults
    if faults and not has_some:
        raise errors.RequestError(*faults)
    for each in faults:
        log.warning("ignored: %s", each)


def load(tls: ssl.SSLContext, text: bytes) -> None:
    """Add the certificates of a PEM text through a file in memory: OpenSSL reads fewer labels in strings."""
    with memory_file(text) as path:
        tls.load_verify_locations(cafile=path)


def load_pair(tls: ssl.SSLContext, certificate: bytes, key: bytes, name: str) -> None:
    """Set the certificate of this end and its key, PEM texts, of which the first may have both.

    Raises ``errors.RequestError``; ``name``: where the texts are from.
    """
    masking.register(tls, (key or certificate).decode(errors="replace"))
    try:
        # OpenSSL reads a key only from a file.
        with memory_file(certificate) as one, memory_file(key or certificate) as other:
            tls.load_cert_chain(one, other)
    except ssl.SSLError as err:
        # OpenSSL's messages are for its own authors.
        mismatch = "the key is not that of the certificate; give the pair that was issued together"
        reason = mismatch if err.reason == "KEY_VALUES_MISMATCH" else "no certificate and key in PEM form"
        raise errors.RequestError(f"{name}: {reason}") from err


@contextlib.contextmanager
def memory_file(text: bytes) -> Iterator[str]:
    """Yield the path of a file in memory: a pod may have no folder that can be written."""
    with open(os.memfd_create("pem"), "wb") as file:
        file.write(text)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"


def holds_any(data: bytes) -> bool:
    """Return whether ``data`` looks like certificates, in PEM or in DER form."""
    return bool(_BLOCK.search(_decode(data))) or _is_der(data)


@functools.lru_cache(maxsize=64)
def usable(data: bytes, name: str) -> bytes:
    """Return the usable certificates of a file as PEM text; log them, and warn about the others.

    ``name``: of the file, for messages. Raises ``errors.RequestError`` if none is usable.
    """
    found = bundle(data, name)
    for number in found.damaged:
        log.warning("certificate ignored: it is damaged file=%r block=%d", name, number)
    # Nobody here can renew those of a bundle of the public CAs.
    level = logging.WARNING if len(found.certificates) <= LISTED else logging.INFO
    for each in found.certificates:
        if each.has_expired:
            log.log(level, "certificate %d of %s has expired subject=%r", each.block, name, each.subject)
    for each in found.certificates[:LISTED]:
        log.info("trusts file=%r subject=%r until=%s", name, each.subject, day(each.until))
    if more := len(found.certificates[LISTED:]):
        log.info("trusts file=%r more=%d", name, more)
    return found.text


def bundle(data: bytes, name: str) -> Bundle:
    """Return what a file of certificates has. Raises ``errors.RequestError`` if none is usable."""
    blocks = list(_BLOCK.finditer(_decode(data)))
    if not blocks and _is_der(data):
        command = f"openssl x509 -inform der -in {name} -out {name.removesuffix('.der')}.pem"
        raise errors.RequestError(f"{name}: a DER certificate, not a PEM one; convert it: {command}")
    scratch, good = context(), {}
    for number, block in enumerate(blocks, 1):
        with contextlib.suppress(ValueError, ssl.SSLError):
            text = _normal(block)
            load(scratch, text)
            good[number] = text
    if not good:
        reason = f"{len(blocks)} damaged" if blocks else "no line BEGIN CERTIFICATE"
        raise errors.RequestError(f"{name}: not a valid PEM certificate: {reason}; get the CA's file again")
    known = dict(zip(scratch.get_ca_certs(binary_form=True), scratch.get_ca_certs(), strict=True))
    details = tuple(_detail(number, text, known) for number, text in good.items())
    return Bundle(b"".join(good.values()), details, tuple({*range(1, len(blocks) + 1)} - good.keys()))


def system_files() -> tuple[Path, ...]:
    """Return the files of the system's CAs: one file, or on some systems a folder of links named by hash."""
    known = ssl.get_default_verify_paths()
    if known.cafile:
        return (Path(known.cafile),)
    return tuple(sorted(Path(known.capath).glob("*.[0-9]"))) if known.capath else ()


def day(moment: dt.datetime | None) -> str:
    """Return a date for messages."""
    return moment.strftime("%Y-%m-%d") if moment else "unknown"


def _normal(block: re.Match[bytes]) -> bytes:
    """Return a block in lines (RFC 7468). Raises ``ValueError`` for one without an end or not in base64."""
    if not block["end"]:
        raise ValueError
    body = base64.encodebytes(base64.b64decode(b"".join(block["text"].split()), validate=True))
    return b"-----BEGIN %b-----\n%b-----END %b-----\n" % (block["label"], body, block["label"])


def _decode(data: bytes) -> bytes:
    """Return a text without the byte-order mark and the UTF-16 of Windows."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return data.decode("utf-16", "replace").encode("utf-8", "replace")
    return data


def _is_der(data: bytes) -> bool:
    """Return whether ``data`` is a certificate in DER form, and not another SEQUENCE such as PKCS #12."""
    # Its length has two bytes (X.690, 8.1.3).
    if data[:2] != b"\x30\x82" or int.from_bytes(data[2:4], "big") + 4 != len(data):
        return False
    with contextlib.suppress(ssl.SSLError):
        context().load_verify_locations(cadata=data)
        return True
    return False


def _detail(number: int, text: bytes, known: Mapping[bytes, Any]) -> Certificate:
    """Return what one certificate is. ``known``: those that ``ssl`` has decoded, only of CAs."""
    body = base64.b64decode(b"".join(text.split(b"\n")[1:-2]))
    if body not in known:
        # Not at the top: it takes 20 ms, and few trust a server's own certificate.
        from cryptography import x509

        try:
            found = x509.load_der_x509_certificate(body)
            subject = masking.quoted(found.subject.rfc4514_string(), LONGEST)
            return Certificate(number, subject, found.not_valid_after_utc)
        except ValueError:  # what follows a TRUSTED CERTIFICATE is OpenSSL's own
            return Certificate(number, "unknown", None)
    about = known[body]
    names = [(_ATTRIBUTES.get(name, name), value) for pairs in about["subject"] for name, value in pairs]
    until = dt.datetime.fromtimestamp(ssl.cert_time_to_seconds(about["notAfter"]), dt.UTC)
    subject = ",".join(f"{name}={value}" for name, value in names)
    return Certificate(number, masking.quoted(subject, LONGEST), until)
