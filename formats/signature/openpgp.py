"""OpenPGP: armor, clear-signed text, and gpgv's verdict on a signature (RFC 9580, sections 4, 6 and 7).

Three things are read here, because gpgv 2.2 does not do them: it reads no armored keys; as a detached
signature it accepts compressed packets, packets of other types behind it, and thousands of signatures; and it
accepts ``NotDashEscaped`` in a clear-signed text, which must also be read if no signature is demanded.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from cdi_worker import errors
from cdi_worker.formats import signature

KEYS: Final = "PUBLIC KEY BLOCK"
SIGNATURE: Final = "SIGNATURE"
_BEGIN: Final = b"-----BEGIN PGP SIGNED MESSAGE-----"
_BEGIN_SIGNATURE: Final = b"-----BEGIN PGP SIGNATURE-----"
# At most 32 headers: without a limit, each of many beginnings within headers is tried to the end of the file.
_ARMOR: Final = re.compile(
    rb"-----BEGIN PGP ([A-Z ]+)-----\r?\n(?:[A-Za-z]+: [^\n]*\n){0,32}[ \t\r]*\n([A-Za-z0-9+/=\s]*?)"
    rb"(?:\n=[A-Za-z0-9+/]{4}\s*)?-----END PGP \1-----"
)
#: Packets of one signature file: one for each signer.
_MOST: Final = 64
_SIGNATURE_PACKET: Final = 2
_KEY_PACKET, _SECRET_PACKET = 6, 5
#: A signature of a binary or of a text document, not one of a key (RFC 9580, 5.2.1).
_OF_DOCUMENTS: Final = {"00", "01"}
#: MD5, SHA-1 and RIPEMD-160 by their numbers (RFC 9580, 9.5): two texts with one hash can be made.
_BROKEN: Final = {"1": "MD5", "2": "SHA-1", "3": "RIPEMD-160"}
#: Keywords for invalid signatures, with their faults and reasons (GnuPG, doc/DETAILS).
_FAULTS: Final = (
    ("BADSIG", signature.OTHER_DATA, "{key} signed other data"),
    ("REVKEYSIG", signature.REVOKED, "{key} is revoked"),
    ("EXPKEYSIG", signature.EXPIRED, "{key} has expired"),
    ("EXPSIG", signature.EXPIRED, "the signature of {key} has expired"),
)
#: The reason in ERRSIG when the key is not known (GnuPG, doc/DETAILS).
_NO_KEY: Final = "9"


class Clear(NamedTuple):
    """A clear-signed text, as it was signed, and its signature."""

    text: bytes
    signature: bytes


def clear(data: bytes, name: str) -> Clear | None:
    """Return the signed text in ``data``; None if it is not clear-signed.

    Text outside of it is not signed and not returned. Raises ``errors.Untrusted``.
    """
    # White space at the end of a line is not signed (7.2).
    lines = [line.rstrip(b" \t\r") for line in data.split(b"\n")]
    if _BEGIN not in lines:
        return None
    if lines.count(_BEGIN) > 1:
        raise _malformed(name, "several signed texts in one file")
    rest = iter(lines[lines.index(_BEGIN) + 1 :])
    for line in rest:
        if not line:
            break
        if not line.startswith(b"Hash: "):
            # Text in a header would look signed to a reader, and is not.
            raise _malformed(name, "a header other than Hash before the signed text")
    text = []
    for line in rest:
        if line == _BEGIN_SIGNATURE:
            break
        if line.startswith(b"-") and not line.startswith(b"- "):
            raise _malformed(name, "a line of the signed text begins with a dash that is not escaped")
        text.append(line.removeprefix(b"- "))
    else:
        raise _malformed(name, "no signature after the signed text")
    return Clear(b"\n".join(text), b"\n".join([_BEGIN_SIGNATURE, *rest]))


def detached(data: bytes, name: str) -> bytes:
    """Return the packets of a detached signature. Raises ``errors.Untrusted``.

    A signed message is refused here, too: what is signed would be that message, not the document.
    """
    try:
        found = dearmored(data, SIGNATURE)
        tags = list(_tags(found))
    except ValueError as err:
        raise _malformed(name, f"not an OpenPGP signature: {err}") from err
    if len(tags) > _MOST or set(tags) != {_SIGNATURE_PACKET}:
        raise _malformed(name, "not a detached OpenPGP signature")
    return found


def keyring(data: bytes, name: str) -> bytes:
    """Return the packets of public keys. Raises ``errors.RequestError``."""
    try:
        found = dearmored(data, KEYS)
        first = next(_tags(found), 0)
    except ValueError as err:
        raise errors.RequestError(f"{name}: malformed OpenPGP keys: {err}") from err
    if first == _SECRET_PACKET:
        raise errors.RequestError(f"{name}: a private key; name the file with the public key")
    if first != _KEY_PACKET:
        raise errors.RequestError(f"{name}: no OpenPGP public keys; write them with gpg --export")
    return found


def dearmored(data: bytes, label: str) -> bytes:
    """Return the bytes in all armored blocks of ``data``; ``data`` if it is binary. Raises ``ValueError``."""
    if data[:1] and data[0] & 0x80:
        return data
    found = b""
    for block in _ARMOR.finditer(data):
        if block[1].decode() != label:
            raise ValueError(f"a {block[1].decode().lower()} instead of a {label.lower()}")
        try:
            found += base64.b64decode(b"".join(block[2].split()), validate=True)
        except binascii.Error as err:
            raise ValueError(str(err)) from err
    if not found:
        raise ValueError(f"no {label.lower()}")
    return found


def signer(status: str, name: str) -> str:
    """Return who signed, by the lines of gpgv's ``--status-fd``. Raises ``errors.Untrusted``.

    One valid signature of several is enough: in a change of keys, both sign for a while.
    """
    said: list[dict[str, list[str]]] = []
    for line in status.split("\n"):
        # Only at the beginning of a line: names of keys are repeated as they are.
        mark, keyword, *words = [*line.split(" "), ""]
        if mark == "[GNUPG:]" and keyword == "NEWSIG":
            said.append({})
        elif mark == "[GNUPG:]" and said:
            said[-1][keyword] = words[:-1]
    failed = []
    for each in said:
        try:
            return _signer(each, name)
        except errors.Untrusted as err:
            failed.append(err)
    raise signature.worst(failed) or _malformed(name, "no OpenPGP signature in it")


def _signer(said: dict[str, list[str]], name: str) -> str:
    """Return who made one signature, of which gpgv ``said`` words by keyword (GnuPG, doc/DETAILS)."""

    def fail(fault: str, reason: str) -> errors.Untrusted:
        return errors.Untrusted(url=name, fault=fault, reason=reason)

    def key(keyword: str) -> str:
        return " ".join(["key", said[keyword][0], f"({' '.join(said[keyword][1:])})"])

    for keyword, fault, reason in _FAULTS:
        if keyword in said:
            raise fail(fault, reason.format(key=key(keyword)))
    if "ERRSIG" in said:
        if said["ERRSIG"][5:6] == [_NO_KEY]:
            raise fail(signature.OTHER_KEY, f"it is by key {said['ERRSIG'][0]}, which is not in the keyring")
        raise fail(signature.UNVERIFIABLE, "gpgv does not support its algorithm")
    valid = said.get("VALIDSIG", [])
    if "GOODSIG" not in said or len(valid) < 10:
        raise _malformed(name, "gpgv does not say whether it is valid")
    if valid[7] in _BROKEN:
        raise fail(signature.UNVERIFIABLE, f"it is of a {_BROKEN[valid[7]]} hash, which can be forged")
    if valid[8] not in _OF_DOCUMENTS:
        raise fail(signature.OTHER_DATA, "it is not the signature of a document")
    return f"key {valid[9]} ({' '.join(said['GOODSIG'][1:])})"


def _tags(data: bytes) -> Iterator[int]:
    """Yield the types of the packets (4.2). Raises ``ValueError`` unless they fill ``data``."""
    at = 0
    while at < len(data):
        tag, at, length = _header(data, at)
        at += length
        if at > len(data):
            raise ValueError("it ends within a packet")
        yield tag


def _header(data: bytes, at: int) -> tuple[int, int, int]:
    """Return type, position and length of the packet whose header is ``at``."""
    first = data[at]
    if not first & 0x80:
        raise ValueError("not a packet")
    following = data[at + 1 : at + 6].ljust(5, b"\0")
    if not first & 0x40:
        # The older form: two bits for the number of bytes of the length.
        size = (1, 2, 4, 0)[first & 3]
        if not size:
            raise ValueError("a packet without a length")
        return first >> 2 & 15, at + 1 + size, int.from_bytes(following[:size], "big")
    if following[0] < 192:
        return first & 63, at + 2, following[0]
    if following[0] < 224:
        return first & 63, at + 3, ((following[0] - 192) << 8) + following[1] + 192
    if following[0] == 255:
        return first & 63, at + 6, int.from_bytes(following[1:5], "big")
    raise ValueError("a packet without a length")


def _malformed(name: str, reason: str) -> errors.Untrusted:
    return errors.Untrusted(url=name, fault=signature.MALFORMED, reason=reason)
