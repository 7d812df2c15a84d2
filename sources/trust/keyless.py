"""Signatures without a key: by a certificate of Fulcio, in the log Rekor. No network: what proves it is here.

sigstore/protobuf-specs; the library is the reference implementation in Python, kept by the Sigstore project.
"""

from __future__ import annotations

import datetime as dt
import functools
from typing import TYPE_CHECKING, Final

from cryptography import exceptions, x509

from cdi_worker import errors
from cdi_worker.formats import signature
from cdi_worker.formats.signature import bundle, simple

if TYPE_CHECKING:
    from collections.abc import Callable

    from cdi_worker.sources import trust

with errors.optional("a signature with a certificate", package="sigstore", extra="trust"):
    import sigstore.errors
    import sigstore.models
    import sigstore.verify
    import sigstore.verify.policy

#: What the library raises for a bundle, and for a certificate that lacks or repeats an extension.
_FAILURES: Final = (
    ValueError,
    exceptions.UnsupportedAlgorithm,
    sigstore.errors.Error,
    x509.DuplicateExtension,
    x509.ExtensionNotFound,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)


def verify(demand: trust.Demand) -> Callable[[trust.Candidate], signature.Signature]:
    """Return the function that verifies a signature, with the authorities and logs of the trusted root.

    Raises ``errors.RequestError`` if the file of the trusted root is missing or malformed.
    """
    path = demand.trusted_root or ""
    try:
        root = sigstore.models.TrustedRoot.from_file(path)
        verifier = sigstore.verify.Verifier(trusted_root=root)
    except OSError as err:
        raise errors.RequestError(f"{path}: {errors.words(err)}") from err
    except (ValueError, sigstore.errors.Error) as err:
        raise errors.RequestError(f"{path}: not a trusted root of Sigstore: {err}") from err
    return functools.partial(_signature, verifier, demand)


def _signature(
    verifier: sigstore.verify.Verifier, demand: trust.Demand, candidate: trust.Candidate
) -> signature.Signature:
    name = candidate.name
    if candidate.bundle is None:
        reason = (
            "it has no proof of its log that can be verified here; sign with cosign 3, which writes a bundle"
        )
        raise errors.Untrusted(url=name, fault=signature.UNVERIFIABLE, reason=reason)
    bundle.envelope(candidate.bundle, name)
    who = f"{demand.identity} ({demand.issuer})"
    policy = sigstore.verify.policy.Identity(identity=demand.identity or "", issuer=demand.issuer)
    try:
        given = sigstore.models.Bundle.from_json(candidate.bundle)
    except _FAILURES as err:
        raise simple.malformed(name, f"the bundle is not one with a certificate: {err}") from err
    try:
        policy.verify(given.signing_certificate)
    except _FAILURES as err:
        reason = f"its certificate is not of {who}: {err}"
        raise errors.Untrusted(url=name, fault=signature.OTHER_SIGNER, reason=reason) from err
    _check_time(given, candidate.bundle, name)
    try:
        _, payload = verifier.verify_dsse(given, policy)
    except sigstore.errors.CertValidationError as err:
        reason = f"its certificate is not by an authority in {demand.trusted_root}: {err}"
        raise errors.Untrusted(url=name, fault=signature.OTHER_SIGNER, reason=reason) from err
    except _FAILURES as err:
        raise simple.malformed(name, f"{demand.trusted_root}: {err}") from err
    return bundle.statement(payload, who, name)


def _check_time(given: sigstore.models.Bundle, data: bytes, name: str) -> None:
    """Raise ``errors.Untrusted`` if the certificate was not valid when the log took the signature in.

    ``sigstore`` decides about it, too; its error does not say that this is the cause.
    """
    material = simple.member(simple.load(data, name), "verificationMaterial", dict, name)
    entries = material.get("tlogEntries")
    entry = entries[0] if isinstance(entries, list) and entries and isinstance(entries[0], dict) else {}
    try:
        when = dt.datetime.fromtimestamp(int(entry["integratedTime"]), dt.UTC)
    except (KeyError, TypeError, ValueError, OverflowError, OSError):
        # A newer log states no time; another authority has.
        return
    certificate = given.signing_certificate
    if not certificate.not_valid_before_utc <= when <= certificate.not_valid_after_utc:
        until = f"{certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
        reason = f"the certificate was valid until {until}, and the signature is of {when:%Y-%m-%d %H:%M} UTC"
        raise errors.Untrusted(url=name, fault=signature.EXPIRED, reason=reason)
