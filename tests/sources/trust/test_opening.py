"""The hook before a source is opened: what is demanded is verified, or nothing is read."""

from __future__ import annotations

import pytest

from cdi_worker import errors
from cdi_worker.formats import signature
from cdi_worker.sources import base, trust

KEYS = trust.Demand(signed_by="keys.pem")
SIGNED = signature.Signature(signer="somebody", digest="sha256:0")


class Verifying(base.Source):
    """A source that says that opening it verifies signatures."""

    name = "a disk"
    unverifiable = ""


def test_source_that_cannot_verify_is_not_opened() -> None:
    reason = "source 'x': only images in a registry"
    with pytest.raises(errors.Untrusted, match=reason) as caught, trust.opening(base.Source(), KEYS, "x"):
        raise AssertionError("the source was opened")
    assert caught.value.fields["fault"] == signature.UNVERIFIABLE


def test_source_that_should_have_verified_and_has_not_is_refused() -> None:
    reason = "source 'x' has not verified it"
    with pytest.raises(errors.Untrusted, match=reason) as caught, trust.opening(Verifying(), KEYS, "x"):
        pass
    assert caught.value.fields["fault"] == signature.MISSING


def test_source_with_a_verified_signature_is_opened() -> None:
    source = Verifying()
    with trust.opening(source, KEYS, "x") as judging:
        assert judging is not None
        source.signatures = (SIGNED,)


def test_without_a_demand_nothing_is_judged() -> None:
    with trust.opening(base.Source(), trust.NOTHING, "x") as judging:
        assert judging is None


def test_failure_to_open_is_not_hidden() -> None:
    with pytest.raises(errors.Unreachable), trust.opening(Verifying(), KEYS, "x"):
        raise errors.Unreachable(url="x", reason="refused")


@pytest.mark.parametrize("demand", [KEYS, trust.Demand(checksum_file="SHA256SUMS")])
def test_data_without_signatures_is_refused(demand: trust.Demand) -> None:
    with pytest.raises(errors.Untrusted, match="it has none"):
        demand.refuse("upload server", "it has none")
    trust.Demand(policy="policy.json").refuse("upload server", "it has none")
