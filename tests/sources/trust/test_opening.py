"""Before and after a source is opened: what is demanded is verified, or nothing is read."""

from __future__ import annotations

import pytest

from cdi_worker import errors
from cdi_worker.formats import signature
from cdi_worker.sources import base, trust
from cdi_worker.sources.registry import locations as registry
from cdi_worker.sources.web import locations as web

KEYS = trust.Demanded(signed_by="keys.pem")
SIGNED = signature.Signature(signer="somebody", digest="sha256:0")


VERIFYING = registry.Registry("docker://registry.example.org/disk")
OTHER = base.Location("http://example.org/disk")


def test_source_that_cannot_verify_is_refused_before_it_is_contacted() -> None:
    reason = "a disk.*source 'x': only images in a registry"
    with pytest.raises(errors.Untrusted, match=reason) as caught:
        trust.check(KEYS, "x", OTHER, "a disk")
    assert caught.value.fields["fault"] == signature.UNVERIFIABLE
    trust.check(KEYS, "x", VERIFYING, "a disk")
    trust.check(trust.Demanded(), "x", OTHER, "a disk")


def test_image_that_a_node_has_pulled_is_refused() -> None:
    pulled = web.Http("http://localhost/", pull_method="node")
    with pytest.raises(errors.Untrusted, match="the node pulled the image"):
        trust.check(KEYS, "http", pulled, "a disk")
    trust.check(trust.Demanded(), "http", pulled, "a disk")


def test_source_that_should_have_verified_and_has_not_is_refused() -> None:
    reason = "source 'x' has not verified it"
    with pytest.raises(errors.Untrusted, match=reason) as caught:
        trust.confirm(KEYS, "x", base.Facts(name="a disk"))
    assert caught.value.fields["fault"] == signature.MISSING


def test_source_with_a_verified_signature_is_accepted() -> None:
    trust.confirm(KEYS, "x", base.Facts(name="a disk", signatures=(SIGNED,)))


def test_without_a_demand_nothing_must_be_verified() -> None:
    trust.confirm(trust.Demanded(), "x", base.Facts(name="a disk"))


@pytest.mark.parametrize("demand", [trust.Demand("keys.pem"), trust.Demand(checksum_file="SHA256SUMS")])
def test_data_without_signatures_is_refused(demand: trust.Demand) -> None:
    with pytest.raises(errors.Untrusted, match="it has none"):
        demand.refuse("upload server", "it has none")
    trust.NOTHING.refuse("upload server", "it has none")
