"""The hook before a source is opened: what is demanded is verified, or nothing is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.formats import signature
from cdi_worker.sources import base, trust
from cdi_worker.sources.registry import locations as registry
from cdi_worker.sources.web import locations as web

KEYS = trust.Demand(signed_by="keys.pem")
SIGNED = signature.Signature(signer="somebody", digest="sha256:0")


VERIFYING = registry.Registry("docker://registry.example.org/disk")
OTHER = base.Location("http://example.org/disk")


def opened(demand: trust.Demand, *signatures: signature.Signature) -> trust.Judging | None:
    """Open a source that has verified ``signatures``; return what it was opened with."""
    given = []

    def open_(judging: trust.Judging | None) -> base.Facts:
        given.append(judging)
        return base.Facts(name="a disk", signatures=signatures)

    trust.opened(open_, demand, "x")
    return given[0]


def test_source_that_cannot_verify_is_refused_before_it_is_contacted() -> None:
    reason = "a disk.*source 'x': only images in a registry"
    with pytest.raises(errors.Untrusted, match=reason) as caught:
        trust.check(KEYS, "x", OTHER, "a disk")
    assert caught.value.fields["fault"] == signature.UNVERIFIABLE
    trust.check(KEYS, "x", VERIFYING, "a disk")
    trust.check(trust.NOTHING, "x", OTHER, "a disk")


def test_image_that_a_node_has_pulled_is_refused_if_a_policy_demands_anything(tmp_path: Path) -> None:
    policy = tmp_path / "policy.json"
    policy.write_text('{"default": [{"type": "reject"}]}')
    pulled, demand = web.Http("http://localhost/", pull_method="node"), trust.Demand(policy=str(policy))
    with pytest.raises(errors.Untrusted, match="the node pulled the image"):
        trust.check(demand, "http", pulled, "a disk")
    trust.check(demand, "http", web.Http("http://localhost/"), "a disk")
    policy.write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
    trust.check(demand, "http", pulled, "a disk")


def test_source_that_should_have_verified_and_has_not_is_refused() -> None:
    reason = "source 'x' has not verified it"
    with pytest.raises(errors.Untrusted, match=reason) as caught:
        opened(KEYS)
    assert caught.value.fields["fault"] == signature.MISSING


def test_source_with_a_verified_signature_is_opened() -> None:
    assert opened(KEYS, SIGNED) is not None


def test_without_a_demand_nothing_is_judged() -> None:
    assert opened(trust.NOTHING) is None


@pytest.mark.parametrize("demand", [KEYS, trust.Demand(checksum_file="SHA256SUMS")])
def test_data_without_signatures_is_refused(demand: trust.Demand) -> None:
    with pytest.raises(errors.Untrusted, match="it has none"):
        demand.refuse("upload server", "it has none")
    trust.Demand(policy="policy.json").refuse("upload server", "it has none")
