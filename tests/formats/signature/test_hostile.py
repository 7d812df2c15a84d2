"""Signature files that a hostile server made: long, or with text that looks like a tool's."""

from __future__ import annotations

import time

import pytest

from cdi_worker import errors
from cdi_worker.formats.signature import openpgp, ssh

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
    "status", ["", "\n", "[GNUPG:]", "[GNUPG:] NEWSIG", "[GNUPG:] NEWSIG\n[GNUPG:] GOODSIG"]
)
def test_short_status_is_no_signature(status: str) -> None:
    with pytest.raises(errors.Untrusted):
        openpgp.signer(status, "sums.asc")
