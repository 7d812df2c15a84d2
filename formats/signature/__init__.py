"""Signatures: verify bytes and return the signer. No files, no network.

``keys``: public keys. ``simple``, ``bundle``: two forms of signatures of container images. Each form has a
function from bytes to a ``Signature``, which raises ``errors.Untrusted``. ``openpgp``, ``minisign``:
signatures of files, and ``keyring``: the keys for them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
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
class Signature:
    """A verified signature. ``signer``: by whom, for people.

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
