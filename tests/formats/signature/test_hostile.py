"""Signature files that a hostile server made: long, malformed, or with text that looks like a tool's."""

from __future__ import annotations

import time

import pytest

from cdi_worker import errors
from cdi_worker.formats import signature
from cdi_worker.formats.signature import keys, openpgp

#: Bytes of the largest file of keys that is read.
LARGEST = 1 << 20
#: Of CPU time, in seconds. A pattern that tries each beginning to the end of the file needs minutes.
SOON = 10.0

_BEGIN = b"-----BEGIN PGP SIGNATURE-----\n"
_BEGIN_KEY = b"-----BEGIN PGP PUBLIC KEY BLOCK-----\n"


@pytest.mark.parametrize(
    "data",
    [
        (b"A: " + _BEGIN_KEY) * (LARGEST // 40),
        _BEGIN_KEY * (LARGEST // len(_BEGIN_KEY)),
        _BEGIN_KEY + b"\n" * LARGEST,
        _BEGIN_KEY + b"\n" + b"\n=AAAA" * (LARGEST // 6),
        _BEGIN_KEY + b"\n" + b"=" * LARGEST,
        b"-----BEGIN PGP " * (LARGEST // 15),
    ],
)
def test_long_armor_is_read_in_time(data: bytes) -> None:
    began = time.process_time()
    with pytest.raises(errors.RequestError, match="no OpenPGP public keys"):
        openpgp.keyring(data, "keys.asc")
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


def test_keyring_of_other_packets_is_refused() -> None:
    with pytest.raises(errors.RequestError, match="no OpenPGP public keys"):
        openpgp.keyring(b"\x88\x00", "keys")
    with pytest.raises(errors.RequestError, match="malformed OpenPGP keys"):
        openpgp.keyring(_BEGIN_KEY + b"\nAAAAA\n-----END PGP PUBLIC KEY BLOCK-----\n", "keys")


def test_signed_text_without_a_signature_is_refused() -> None:
    with pytest.raises(errors.Untrusted, match="no signature after the signed text"):
        openpgp.clear(b"-----BEGIN PGP SIGNED MESSAGE-----\nHash: SHA256\n\ntext\n", "sums.asc")


def test_several_signed_texts_are_refused() -> None:
    signed = b"-----BEGIN PGP SIGNED MESSAGE-----\n\ntext\n" + _BEGIN + b"\n-----END PGP SIGNATURE-----\n"
    assert openpgp.clear(signed, "sums.asc")
    with pytest.raises(errors.Untrusted, match="several signed texts"):
        openpgp.clear(signed * 2, "sums.asc")


def test_long_file_of_keys_is_read_in_time() -> None:
    began = time.process_time()
    with pytest.raises(errors.RequestError, match="no public key in PEM form"):
        keys.read(b"-----BEGIN A-----\n" * (LARGEST // 18), "keys")
    assert time.process_time() - began < SOON


def test_long_file_without_ssh_keys_is_read_in_time() -> None:
    for data in (b"ssh-" * (LARGEST // 4), b"a ssh-a " * (LARGEST // 8), b"a\n" * (LARGEST // 2)):
        began = time.process_time()
        with pytest.raises(errors.RequestError, match="no OpenPGP keys"):
            openpgp.keys_in([("keys", data)], "keys")
        assert time.process_time() - began < SOON
