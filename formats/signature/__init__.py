"""Signatures: from bytes to the verdict, whose data it is. No files, no network.

``keys``: public keys. ``simple``, ``bundle``: two forms of signatures of container images. Each form has a
function from bytes to ``Claims``, which raises ``errors.Untrusted``. ``openpgp``, ``minisign``: signatures of
files, and ``keyring``: the keys for them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from cdi_worker import errors

MISSING: Final = "missing"
MALFORMED: Final = "malformed"
OTHER_KEY: Final = "of another key"
OTHER_SIGNER: Final = "of another signer"
EXPIRED: Final = "expired"
REVOKED: Final = "of a revoked key"
OTHER_DATA: Final = "of other data"
OTHER_REFERENCE: Final = "of another reference"
OTHER_ANNOTATION: Final = "without the annotation"
#: The source, or this kind of signature, cannot be verified.
UNVERIFIABLE: Final = "not verifiable"
#: Refused by a policy without looking at signatures.
REJECTED: Final = "rejected by policy"
#: What went wrong, what a signature got through first, last: the reason to report among several signatures.
ORDER: Final = (
    MISSING, UNVERIFIABLE, MALFORMED, OTHER_KEY, OTHER_SIGNER, EXPIRED, REVOKED, OTHER_DATA, OTHER_REFERENCE,
    OTHER_ANNOTATION, REJECTED,
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The signature that a disk must have; false if it demands nothing.

    ``signed_by``: a file of public keys, or a folder of such files; a signature by one of them is enough.
    ``identity``, ``issuer``: those of the signer's certificate from Fulcio; ``trusted_root``: the file that
    says which Fulcio and Rekor to trust. ``annotations``: pairs that must have been signed. ``policy``: a
    policy.json of containers, which only concerns container images (containers-policy.json(5)).
    ``checksum_file``: URL or path of a file with the disk's checksum (SHA256SUMS, CHECKSUM), which the
    signature is of. None: not given; an empty text is a fault, because it may be a demand that got lost.
    """

    signed_by: str | None = None
    identity: str | None = None
    issuer: str | None = None
    trusted_root: str | None = None
    annotations: tuple[tuple[str, str], ...] = ()
    policy: str | None = None
    checksum_file: str | None = None

    def __bool__(self) -> bool:
        return bool(self.signed_by or self.is_keyless or self.annotations)

    @property
    def is_keyless(self) -> bool:
        """Whether the signer is named by a certificate."""
        return bool(self.identity or self.issuer or self.trusted_root)

    def faults(self) -> Iterator[str]:
        """Yield a message for each empty, missing or contradictory part."""
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if isinstance(value, str) and not value.strip():
                yield f"demand: {each.name} is empty; give a value or leave it out"
        if self.signed_by and self.is_keyless:
            yield "--signed-by and --certificate-identity exclude each other: name keys or a certificate"
        if self.is_keyless and not (self.identity and self.issuer and self.trusted_root):
            yield "a certificate needs --certificate-identity, --certificate-oidc-issuer and --trusted-root"
        if self.annotations and not (self.signed_by or self.is_keyless):
            yield "--signature-annotation needs a signer: use --signed-by or --certificate-identity"
        if self.checksum_file and (self.is_keyless or self.annotations):
            yield "--checksum-file: use --signed-by; a checksum file has neither certificates nor annotations"


#: The demand of whoever demands nothing.
NOTHING = Demand()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """What a valid signature says. ``signer``: by whom, for people.

    ``digest``: of the signed manifest. ``reference``: its name, empty if the signature has none.
    """

    signer: str
    digest: str
    reference: str = ""
    annotations: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def check(self, digests: Iterable[str], annotations: Iterable[tuple[str, str]], name: str) -> None:
        """Raise ``errors.Untrusted`` unless these are about one of ``digests``, with ``annotations``."""
        wanted = list(digests)
        if self.digest not in wanted:
            reason = f"{self.signer} signed {self.digest}, not {' or '.join(wanted)}"
            raise errors.Untrusted(url=name, fault=OTHER_DATA, reason=reason)
        for key, value in annotations:
            if self.annotations.get(key) != value:
                has = f"it has {self.annotations[key]!r}" if key in self.annotations else "it has none"
                raise errors.Untrusted(url=name, fault=OTHER_ANNOTATION, reason=f"{key}={value}: {has}")


def worst(found: Iterable[errors.Untrusted]) -> errors.Untrusted | None:
    """Return the failure of the signature that came closest; None if there is none."""
    return max(found, key=lambda err: ORDER.index(str(err.fields["fault"])), default=None)


def parse_annotation(text: str) -> tuple[str, str]:
    """Return key and value of ``KEY=VALUE``. Raises ``errors.RequestError``."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise errors.RequestError(f"{text!r}: expected KEY=VALUE")
    return key, value
