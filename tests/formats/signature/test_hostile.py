"""Signature files that a hostile server made: long, malformed, or with text that looks like a tool's."""

from __future__ import annotations

import base64
import re
import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from cdi_worker import errors
from cdi_worker.formats import signature
from cdi_worker.formats.signature import keys, minisign, openpgp, ssh
from tests.support import signers

#: Bytes of the largest signature that is read.
LARGEST = 1 << 20
#: Of CPU time, in seconds. A pattern that tries each beginning to the end of the file needs minutes.
SOON = 10.0

_BEGIN = b"-----BEGIN PGP SIGNATURE-----\n"


@pytest.mark.parametrize(
    "proof",
    [
        (b"A: " + _BEGIN) * (LARGEST // 33),
        _BEGIN * (LARGEST // len(_BEGIN)),
        _BEGIN + b"\n" * LARGEST,
        _BEGIN + b"\n" + b"\n=AAAA" * (LARGEST // 6),
        _BEGIN + b"\n" + b"=" * LARGEST,
        b"-----BEGIN PGP " * (LARGEST // 15),
    ],
)
def test_long_armor_is_read_in_time(proof: bytes) -> None:
    began = time.process_time()
    with pytest.raises(errors.Untrusted, match="not an OpenPGP signature"):
        openpgp.detached(proof, "sums.asc")
    assert time.process_time() - began < SOON


@pytest.mark.parametrize(
    "proof",
    [
        ssh.BEGIN + b"\n" * LARGEST,
        (ssh.BEGIN + b"\n") * (LARGEST // 31),
        ssh.BEGIN + b"A\n" * (LARGEST // 2),
    ],
)
def test_long_ssh_signature_is_read_in_time(proof: bytes) -> None:
    began = time.process_time()
    with pytest.raises(errors.Untrusted, match="not an SSH signature"):
        ssh.signer([], proof, b"", "sums.sig")
    assert time.process_time() - began < SOON


@pytest.mark.parametrize("fault", ["EXPKEYSIG", "REVKEYSIG"])
def test_user_id_is_not_a_status_line(fault: str) -> None:
    """The owner of a key chooses its name, and gpgv repeats it."""
    status = (
        "[GNUPG:] NEWSIG\n"
        f"[GNUPG:] {fault} 0011223344556677 [GNUPG:] NEWSIG[GNUPG:] GOODSIG 0011223344556677 somebody\n"
        f"[GNUPG:] VALIDSIG {'A' * 40} 2026-11-22 1 0 4 0 22 8 00 {'A' * 40}\n"
    )
    with pytest.raises(errors.Untrusted, match=r"has expired|is revoked"):
        openpgp.signer(status, "sums.asc")


@pytest.mark.parametrize(
    "status",
    [
        f"[GNUPG:] NEWSIG\n[GNUPG:] VALIDSIG {'A' * 40} 2026-11-22 1 0 4 0 22 8 00 {'A' * 40}\n",
        "",
        "\n",
        "[GNUPG:]",
        "[GNUPG:] NEWSIG",
        "[GNUPG:] NEWSIG\n[GNUPG:] GOODSIG",
    ],
)
def test_short_status_is_no_signature(status: str) -> None:
    with pytest.raises(errors.Untrusted):
        openpgp.signer(status, "sums.asc")


def _status(line: str = "GOODSIG 0011223344556677 somebody", kind: str = "00") -> str:
    valid = f"VALIDSIG {'A' * 40} 2026-11-22 1 0 4 0 22 8 {kind} {'A' * 40}"
    return f"[GNUPG:] NEWSIG\n[GNUPG:] {line}\n[GNUPG:] {valid}\n"


@pytest.mark.parametrize("kind", ["10", "13", "18", "1F", "40"])
def test_signature_of_a_key_is_not_one_of_a_file(kind: str) -> None:
    """A signer publishes certifications of keys, and a server could offer one for a file."""
    assert openpgp.signer(_status(kind="00"), "sums.asc")
    with pytest.raises(errors.Untrusted, match="not the signature of a document") as caught:
        openpgp.signer(_status(kind=kind), "sums.asc")
    assert caught.value.fields["fault"] == signature.OTHER_DATA


def test_algorithm_that_gpgv_does_not_support_is_refused() -> None:
    line = f"ERRSIG 0011223344556677 99 8 00 1 4 {'A' * 40}"
    with pytest.raises(errors.Untrusted, match="gpgv does not support") as caught:
        openpgp.signer(_status(line), "sums.asc")
    assert caught.value.fields["fault"] == signature.UNVERIFIABLE


@pytest.mark.parametrize(
    ("proof", "reason"),
    [
        (b"\x88\x00\x01", "not a packet"),
        (b"\xc2\xe0\x00", "a packet without a length"),
        (b"\x8b\x88\x00", "a packet without a length"),
        (b"", "not an OpenPGP signature: no signature"),
        (
            _BEGIN.replace(b"SIGNATURE", b"MESSAGE") + b"\nAAAA\n-----END PGP MESSAGE-----\n",
            "a message instead",
        ),
        (_BEGIN + b"\nAAAAA\n-----END PGP SIGNATURE-----\n", "not an OpenPGP signature"),
    ],
)
def test_malformed_packets_are_refused(proof: bytes, reason: str) -> None:
    with pytest.raises(errors.Untrusted, match=reason):
        openpgp.detached(proof, "sums.asc")


def test_keyring_of_other_packets_is_refused() -> None:
    with pytest.raises(errors.RequestError, match="no OpenPGP public keys"):
        openpgp.keyring(b"\x88\x00", "keys")


def test_signed_text_without_a_signature_is_refused() -> None:
    with pytest.raises(errors.Untrusted, match="no signature after the signed text"):
        openpgp.clear(b"-----BEGIN PGP SIGNED MESSAGE-----\nHash: SHA256\n\ntext\n", "sums.asc")


def test_several_signed_texts_are_refused() -> None:
    signed = b"-----BEGIN PGP SIGNED MESSAGE-----\n\ntext\n" + _BEGIN + b"\n-----END PGP SIGNATURE-----\n"
    assert openpgp.clear(signed, "sums.asc")
    with pytest.raises(errors.Untrusted, match="several signed texts"):
        openpgp.clear(signed * 2, "sums.asc")


def test_minisign_signature_of_an_unknown_form_is_refused(tmp_path: Path) -> None:
    signer = signers.Minisign(tmp_path)
    keys = [*minisign.read(signer.public)]
    proof = signer.sign(b"sums", "-l")
    assert minisign.signer(keys, proof, b"sums", "sums.minisig")
    lines = proof.split(b"\n")
    raw = base64.b64decode(lines[1])
    for changed in (
        [lines[0], base64.b64encode(b"XX" + raw[2:]), *lines[2:]],
        [*lines[:2], lines[2].removeprefix(b"trusted comment: "), *lines[3:]],
        [lines[0], base64.b64encode(raw + b"x"), *lines[2:]],
    ):
        with pytest.raises(errors.Untrusted) as caught:
            minisign.signer(keys, b"\n".join(changed), b"sums", "sums.minisig")
        assert caught.value.fields["fault"] == signature.MALFORMED


def _packed(*parts: bytes) -> bytes:
    return b"".join(len(each).to_bytes(4, "big") + each for each in parts)


def _unpacked(data: bytes) -> list[bytes]:
    found = []
    while data:
        end = 4 + int.from_bytes(data[:4], "big")
        found.append(data[4:end])
        data = data[end:]
    return found


def _armored(data: bytes) -> bytes:
    return ssh.BEGIN + b"\n" + base64.b64encode(data) + b"\n-----END SSH SIGNATURE-----\n"


@pytest.mark.parametrize(
    ("kind", "other"),
    [
        (("ed25519",), b"ssh-rsa"),
        # With SHA-1.
        (("rsa", "2048"), b"ssh-rsa"),
        (("ecdsa", "256"), b"ecdsa-sha2-nistp384"),
    ],
)
def test_changed_ssh_signature_is_refused(tmp_path: Path, kind: tuple[str, ...], other: bytes) -> None:
    signer = signers.SSH(tmp_path / "id", kind)
    allowed = [*ssh.read(b"a " + signer.public, "allowed")]
    text = re.sub(rb"-----[A-Z ]+-----", b"", signer.sign(b"sums"))
    head, fields = base64.b64decode(text)[:10], _unpacked(base64.b64decode(text)[10:])
    key, namespace, reserved, algorithm, made = fields
    assert not reserved
    assert ssh.signer(allowed, _armored(head + _packed(*fields)), b"sums", "sums.sig")
    size = (len(made) + 1).to_bytes(4, "big")
    for changed in (b"SSHSIG\0\0\0\2", b"SSHSIX\0\0\0\1"):
        with pytest.raises(errors.Untrusted, match="not an SSH signature"):
            ssh.signer(allowed, _armored(changed + _packed(*fields)), b"sums", "sums.sig")
    for data, fault in (
        (_packed(key, namespace, b"x", algorithm, made), signature.MALFORMED),
        (_packed(*fields) + b"x", signature.MALFORMED),
        (_packed(*fields[:4]) + size + made, signature.MALFORMED),
        (_packed(*fields[:4], _packed(other, _unpacked(made)[1])), signature.OTHER_DATA),
    ):
        with pytest.raises(errors.Untrusted) as caught:
            ssh.signer(allowed, _armored(head + data), b"sums", "sums.sig")
        assert caught.value.fields["fault"] == fault


def test_ssh_signature_that_is_not_base64_is_refused() -> None:
    with pytest.raises(errors.Untrusted, match="not an SSH signature"):
        ssh.signer([], ssh.BEGIN + b"\nA\n-----END SSH SIGNATURE-----\n", b"", "sums.sig")


@pytest.mark.parametrize(
    ("namespaces", "is_accepted"),
    [
        ("file", True), ("git,file", True), ("*", True), ("f?le", True), ("!git,*", True),
        ("*,!file", False), ("!file,file", False), ("!f*,*", False), ("!git", False), ("", False),
        ("[f]ile", False),
    ],
)  # fmt: skip
def test_namespaces_of_a_key_are_read_as_ssh_does(namespaces: str, is_accepted: bool) -> None:
    """ssh_config(5), PATTERNS: a negated pattern that matches excludes; brackets have no meaning."""
    public = ed25519.Ed25519PrivateKey.generate().public_key()
    form = public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()
    found = [*ssh.read(f'a@b namespaces="{namespaces}" {form}\n'.encode(), "x")]
    assert bool(found) is is_accepted


@pytest.mark.parametrize(
    ("zone", "date"),
    [
        ("America/New_York", "99991231235959"),
        ("Asia/Tokyo", "00010101"),
        ("UTC", "20241301"),
        ("UTC", "2024"),
    ],
)
def test_date_of_a_signer_that_does_not_exist_is_refused(
    tmp_path: Path, zone: str, date: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a Z it is in the local time, which UTC may have in another year."""
    line = f'a valid-before="{date}" '.encode() + signers.SSH(tmp_path / "id").public
    with monkeypatch.context() as changed:
        changed.setenv("TZ", zone)
        time.tzset()
        with pytest.raises(errors.RequestError, match="allowed: SSH key: "):
            [*ssh.read(line, "allowed")]
    time.tzset()


def test_long_file_of_keys_is_read_in_time() -> None:
    began = time.process_time()
    with pytest.raises(errors.RequestError, match="no public key in PEM form"):
        keys.read(b"-----BEGIN A-----\n" * (LARGEST // 18), "keys")
    assert time.process_time() - began < SOON
