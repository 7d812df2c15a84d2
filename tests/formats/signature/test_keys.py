"""Public keys: which ones are accepted."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa

from cdi_worker import errors
from cdi_worker.formats.signature import keys


def pem(public: ed448.Ed448PublicKey | keys.PublicKey) -> bytes:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return public.public_bytes(serialization.Encoding.PEM, form)


def test_key_that_is_easily_forged_is_refused() -> None:
    short, usable = (rsa.generate_private_key(65537, bits).public_key() for bits in (1024, 2048))
    assert len(keys.read(pem(usable), "cosign.pub")) == 1
    with pytest.raises(errors.RequestError, match="an RSA key of 1024 bits; at least 2048"):
        keys.read(pem(usable) + pem(short), "cosign.pub")


def test_key_of_another_kind_is_refused() -> None:
    for usable in (ec.generate_private_key(ec.SECP256R1()), ed25519.Ed25519PrivateKey.generate()):
        assert len(keys.read(pem(usable.public_key()), "cosign.pub")) == 1
    with pytest.raises(errors.RequestError, match="not an ECDSA, RSA or Ed25519 key"):
        keys.read(pem(ed448.Ed448PrivateKey.generate().public_key()), "cosign.pub")


def test_file_without_a_public_key_is_refused() -> None:
    private = ed25519.Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    with pytest.raises(errors.RequestError, match="a private key"):
        keys.read(private, "cosign.key")
    for data in (b"", b"ssh-ed25519 AAAA", pem(ed25519.Ed25519PrivateKey.generate().public_key())[:-10]):
        with pytest.raises(errors.RequestError, match="no public key in PEM form"):
            keys.read(data, "cosign.pub")
