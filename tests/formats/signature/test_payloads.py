"""Payloads of container signatures: what they claim, and what is malformed."""

from __future__ import annotations

import base64

import pytest

from cdi_worker import errors
from cdi_worker.formats import signature
from cdi_worker.formats.signature import simple

CLAIMS = signature.Signature(signer="key", digest="sha256:a")


def test_signature_of_another_digest_is_refused() -> None:
    CLAIMS.check(["sha256:b", "sha256:a"], "image")
    with pytest.raises(errors.Untrusted) as caught:
        CLAIMS.check(["sha256:b", "sha256:c"], "image")
    assert caught.value.fields["fault"] == signature.OTHER_DATA


def test_proof_has_a_limited_length() -> None:
    limit = simple.LONGEST_PROOF
    for length in (1, limit):
        assert simple.decoded(base64.b64encode(bytes(length)).decode(), limit, "image") == bytes(length)
    for length in (0, limit + 1, 2 * limit):
        with pytest.raises(errors.Untrusted, match="empty or larger"):
            simple.decoded(base64.b64encode(bytes(length)).decode(), limit, "image")


@pytest.mark.parametrize("data", [b"[]", b"1", b'"critical"', b"null", b"", b"{}{}", b'{"a": 1, "a": 1}'])
def test_payload_that_is_not_an_object_is_refused(data: bytes) -> None:
    with pytest.raises(errors.Untrusted) as caught:
        simple.load(data, "image")
    assert caught.value.fields["fault"] == signature.MALFORMED
