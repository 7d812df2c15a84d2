"""Signatures by SSH keys (OpenSSH, PROTOCOL.sshsig), and who may sign (ALLOWED SIGNERS in ssh-keygen(1))."""

from __future__ import annotations

import base64
import binascii
import datetime as dt
import fnmatch
import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from cryptography import exceptions
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa, utils

from cdi_worker import errors
from cdi_worker.formats import signature
from cdi_worker.formats.signature import keys as pem

#: What a signature file begins with.
BEGIN: Final = b"-----BEGIN SSH SIGNATURE-----"
#: The namespace of files: a signature made for a login or for git is not one of a file.
NAMESPACE: Final = "file"
_MAGIC: Final = b"SSHSIG"
_ARMOR: Final = re.compile(BEGIN + rb"([A-Za-z0-9+/=\s]+?)-----END SSH SIGNATURE-----")
_LINE: Final = re.compile(
    r"(?:(.*?)\s+)?((?:ssh|ecdsa|sk-ssh|sk-ecdsa)-[\w@.-]+)\s+([A-Za-z0-9+/=]+)(?:\s.*)?"
)
_OPTION: Final = re.compile(r'([a-z-]+)(?:="([^"]*)")?(?:,|$)')
_HASHES: Final = {b"sha256": hashlib.sha256, b"sha512": hashlib.sha512}
_RSA: Final = {b"rsa-sha2-256": hashes.SHA256, b"rsa-sha2-512": hashes.SHA512}
_ECDSA: Final[dict[int, type[hashes.SHA256 | hashes.SHA384 | hashes.SHA512]]] = {
    256: hashes.SHA256,
    384: hashes.SHA384,
    521: hashes.SHA512,
}


class Signer(NamedTuple):
    """A key that may sign files. ``blob``: the key in SSH's form. ``since``, ``until``: when it is valid."""

    names: str
    blob: bytes
    public: pem.PublicKey
    since: dt.datetime | None = None
    until: dt.datetime | None = None

    def __str__(self) -> str:
        return f"{self.names} ({fingerprint(self.blob)})" if self.names else fingerprint(self.blob)

    def check_date(self, now: dt.datetime, name: str) -> None:
        """Raise ``errors.Untrusted`` if the key is not valid ``now``."""
        signature.check_date((self.since, self.until), now, str(self), name)


def fingerprint(blob: bytes) -> str:
    """Return the fingerprint of a key as ssh-keygen prints it."""
    return f"SSH key SHA256:{base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip('=')}"


def read(data: bytes, where: str) -> Iterator[Signer]:
    """Yield the keys for files in a file of allowed signers or public keys; none if it is of another form.

    Raises ``errors.RequestError``.
    """
    for line in data.decode("utf-8", "replace").splitlines():
        found = None if line.lstrip().startswith("#") else _LINE.fullmatch(line.strip())
        if not found:
            continue
        try:
            made = _signer(found[1] or "", found[2], found[3])
        except (ValueError, OverflowError, exceptions.UnsupportedAlgorithm) as err:
            raise errors.RequestError(f"{where}: SSH key: {err}") from err
        if made is not None:
            yield made


def signer(allowed: Sequence[Signer], proof: bytes, message: bytes, name: str) -> str:
    """Return who signed ``message``; ``proof`` is the signature's file. Raises ``errors.Untrusted``."""
    try:
        blob, namespace, algorithm, made = _parts(proof)
        prefixed = (namespace, b"", algorithm, _HASHES[algorithm](message).digest())
        kind, raw = _strings(made, 2)
    except (ValueError, KeyError) as err:
        raise errors.Untrusted(url=name, fault=signature.MALFORMED, reason="not an SSH signature") from err
    if namespace != NAMESPACE.encode():
        reason = f"it is for {namespace.decode('ascii', 'replace')!r}, not for files (ssh-keygen -n file)"
        raise errors.Untrusted(url=name, fault=signature.OTHER_DATA, reason=reason)
    known = [each for each in allowed if each.blob == blob]
    if not known:
        reason = f"it is by {fingerprint(blob)}, which is not in the keyring"
        raise errors.Untrusted(url=name, fault=signature.OTHER_KEY, reason=reason)
    try:
        _verify(known[0].public, kind, raw, _MAGIC + b"".join(map(_packed, prefixed)))
    except (exceptions.InvalidSignature, ValueError) as err:
        reason = f"it is not {known[0]}'s signature of this file"
        raise errors.Untrusted(url=name, fault=signature.OTHER_DATA, reason=reason) from err
    failed = []
    for each in known:
        try:
            each.check_date(dt.datetime.now(dt.UTC), name)
        except errors.Untrusted as err:
            failed.append(err)
        else:
            return str(each)
    raise failed[-1]


def _signer(before: str, kind: str, text: str) -> Signer | None:
    """Return the signer of a line; None if it may not sign files."""
    names, _, options = before.partition(" ")
    given = {}
    at, options = 0, options.strip()
    while at < len(options):
        option = _OPTION.match(options, at)
        if not option or option[1] not in {"cert-authority", "namespaces", "valid-after", "valid-before"}:
            raise ValueError(f"unknown option {options[at:]!r}")
        given[option[1]] = option[2] or ""
        at = option.end()
    if "cert-authority" in given:
        raise ValueError("cert-authority is not supported; list the keys of the signers")
    if not _signs_files(given.get("namespaces", NAMESPACE)):
        return None
    public = pem.usable(serialization.load_ssh_public_key(f"{kind} {text}".encode()))
    since, until = (_date(given[each]) if each in given else None for each in ("valid-after", "valid-before"))
    return Signer(names, base64.b64decode(text), public, since, until)


def _signs_files(namespaces: str) -> bool:
    """Return whether a list of patterns matches ``NAMESPACE``; a negated one excludes (ssh_config(5))."""
    # Their only special characters are * and ?.
    patterns = [each.replace("[", "[[]") for each in namespaces.split(",")]
    matching = [each for each in patterns if fnmatch.fnmatchcase(NAMESPACE, each.removeprefix("!"))]
    return bool(matching) and not any(each.startswith("!") for each in matching)


def _date(text: str) -> dt.datetime:
    """Return the time ``YYYYMMDD[HHMM[SS]][Z]``, without Z in the local time zone."""
    form = {8: "%Y%m%d", 12: "%Y%m%d%H%M", 14: "%Y%m%d%H%M%S"}.get(len(text.rstrip("Zz")), "")
    found = dt.datetime.strptime(text.rstrip("Zz"), form)  # noqa: DTZ007  (the zone is set below)
    return found.replace(tzinfo=dt.UTC) if text[-1:] in "Zz" else found.astimezone(dt.UTC)


def _verify(public: pem.PublicKey, kind: bytes, raw: bytes, message: bytes) -> None:
    """Raise ``InvalidSignature`` or ``ValueError`` unless ``raw`` is the signature of ``message``."""
    if isinstance(public, ed25519.Ed25519PublicKey):
        if kind != b"ssh-ed25519":
            raise ValueError(kind)
        public.verify(raw, message)
    elif isinstance(public, rsa.RSAPublicKey):
        if kind not in _RSA:
            # ssh-rsa is SHA-1.
            raise ValueError(kind)
        public.verify(raw, message, padding.PKCS1v15(), _RSA[kind]())
    else:
        if kind != f"ecdsa-sha2-nistp{public.curve.key_size}".encode():
            raise ValueError(kind)
        first, second = (int.from_bytes(each, "big") for each in _strings(raw, 2))
        form = utils.encode_dss_signature(first, second)
        public.verify(form, message, ec.ECDSA(_ECDSA[public.curve.key_size]()))


def _parts(proof: bytes) -> tuple[bytes, bytes, bytes, bytes]:
    """Return key, namespace, hash and signature of a signature file. Raises ``ValueError``."""
    found = _ARMOR.search(proof)
    try:
        data = base64.b64decode(b"".join(found[1].split()), validate=True) if found else b""
    except binascii.Error as err:
        raise ValueError(str(err)) from err
    if data[:10] != _MAGIC + b"\0\0\0\1":
        raise ValueError("another version")
    key, namespace, reserved, algorithm, made = _strings(data[10:], 5)
    if reserved:
        raise ValueError("something in the reserved field")
    return key, namespace, algorithm, made


def _strings(data: bytes, count: int) -> list[bytes]:
    """Return the ``count`` strings that fill ``data`` (RFC 4251, 5). Raises ``ValueError``."""
    found = []
    for _ in range(count):
        size = int.from_bytes(data[:4], "big")
        if len(data) < 4 + size:
            raise ValueError("truncated")
        found.append(data[4 : 4 + size])
        data = data[4 + size :]
    if data:
        raise ValueError("more data than expected")
    return found


def _packed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data
