"""OpenPGP: armored keys, clear-signed text, and gpgv's verdict on a signature (RFC 9580, sections 4 to 7).

gpgv reads everything else. It reads no armored keys, and a clear-signed text must also be read if no
signature is demanded.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from cdi_worker import errors
from cdi_worker.formats import signature

_BEGIN: Final = b"-----BEGIN PGP SIGNED MESSAGE-----"
_BEGIN_SIGNATURE: Final = b"-----BEGIN PGP SIGNATURE-----"
# At most 32 headers: without a limit, each of many beginnings within headers is tried to the end of the file.
_ARMOR: Final = re.compile(
    rb"-----BEGIN PGP (?:PUBLIC|PRIVATE) KEY BLOCK-----\r?\n(?:[A-Za-z]+: [^\n]*\n){0,32}[ \t\r]*\n"
    rb"([A-Za-z0-9+/=\s]*?)(?:\n=[A-Za-z0-9+/]{4}\s*)?-----END PGP "
)
_KEY_PACKET, _SECRET_PACKET = 6, 5
_PEM: Final = re.compile(rb"^-----BEGIN (PUBLIC KEY|CERTIFICATE)-----", re.MULTILINE)
#: A public key of SSH, also in a line of an allowed signers file (ssh-keygen(1)).
_SSH: Final = re.compile(rb"^(?!#)(?:.*[ \t])?(?:sk-)?(?:ssh|ecdsa)-[\w@.-]+[ \t]+AAAA", re.MULTILINE)
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
        raise signature.malformed(name, "several signed texts in one file")
    rest = iter(lines[lines.index(_BEGIN) + 1 :])
    for line in rest:
        if not line:
            break
        if not line.startswith(b"Hash: "):
            # Text in a header would look signed to a reader, and is not.
            raise signature.malformed(name, "a header other than Hash before the signed text")
    text = []
    for line in rest:
        if line == _BEGIN_SIGNATURE:
            break
        if line.startswith(b"-") and not line.startswith(b"- "):
            raise signature.malformed(
                name, "a line of the signed text begins with a dash that is not escaped"
            )
        text.append(line.removeprefix(b"- "))
    else:
        raise signature.malformed(name, "no signature after the signed text")
    return Clear(b"\n".join(text), b"\n".join([_BEGIN_SIGNATURE, *rest]))


def keyring(data: bytes, name: str) -> bytes:
    """Return public keys as gpgv reads them: without armor. Raises ``errors.RequestError``."""
    try:
        blocks = [data]
        if data[:1] < b"\x80":
            # Armored keys, also private ones.
            blocks = [
                base64.b64decode(b"".join(block[1].split()), validate=True) for block in _ARMOR.finditer(data)
            ]
    except binascii.Error as err:
        raise errors.RequestError(f"{name}: malformed OpenPGP keys: {err}") from err
    found = b"".join(blocks)
    # The type of the first packet, in the form of today and in the older one (4.2).
    first = found[0] if found else 0
    kind = first & 63 if first & 0x40 else first >> 2 & 15
    if kind == _SECRET_PACKET:
        raise errors.RequestError(f"{name}: a private key; name the file with the public key")
    if kind != _KEY_PACKET:
        raise errors.RequestError(f"{name}: no OpenPGP public keys; write them with gpg --export")
    return found


def keys_in(files: Iterable[tuple[str, bytes]], where: str) -> bytes:
    """Return the OpenPGP keys in files, given with their names, as gpgv reads them.

    Raises ``errors.RequestError``.
    """
    keys, has_pem = b"", False
    for name, data in files:
        if _SSH.search(data):
            raise errors.RequestError(f"{name}: SSH keys are not supported; sign with OpenPGP")
        if (data[:1] and data[0] & 0x80) or re.search(rb"^-----BEGIN PGP ", data, re.MULTILINE):
            if keys:
                reason = "a second file of OpenPGP keys; write all of them to one file with gpg --export"
                raise errors.RequestError(f"{name}: {reason}")
            keys = keyring(data, name)
        elif data[8:12] == b"KBXf":
            raise errors.RequestError(f"{name}: a keybox; write its keys to a file with gpg --export")
        elif _PEM.search(data):
            # For images in a registry; a folder may have keys for both.
            has_pem = True
    if not keys:
        hint = "; keys in PEM form verify images in a registry" if has_pem else ""
        raise errors.RequestError(f"{where}: no OpenPGP keys for a checksum file{hint}")
    return keys


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
    raise signature.worst(failed) or signature.malformed(name, "no OpenPGP signature in it")


def _signer(said: dict[str, list[str]], name: str) -> str:
    """Return the signer of one signature; ``said``: gpgv's status by keyword (GnuPG, doc/DETAILS)."""

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
        raise signature.malformed(name, "gpgv does not say whether it is valid")
    if valid[7] in _BROKEN:
        raise fail(signature.UNVERIFIABLE, f"it is of a {_BROKEN[valid[7]]} hash, which can be forged")
    if valid[8] not in _OF_DOCUMENTS:
        raise fail(signature.OTHER_DATA, "it is not the signature of a document")
    return f"key {valid[9]} ({' '.join(said['GOODSIG'][1:])})"
