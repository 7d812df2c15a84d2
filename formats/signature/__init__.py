"""Signatures: verify bytes and return the signer. No files, no network.

``keys``: public keys. ``simple``, ``bundle``: two forms of signatures of container images. Each form has a
function from bytes to a ``Signature``, which raises ``errors.Untrusted``. ``openpgp``: signatures of files,
and the keys for them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Final

from cdi_worker import errors

MISSING: Final = "missing"
MALFORMED: Final = "malformed"
OTHER_KEY: Final = "of another key"
EXPIRED: Final = "expired"
REVOKED: Final = "of a revoked key"
OTHER_DATA: Final = "of other data"
OTHER_REFERENCE: Final = "of another reference"
#: The source, or this kind of signature, cannot be verified.
UNVERIFIABLE: Final = "not verifiable"
#: What went wrong, what a signature got through first, last: the reason to report among several signatures.
ORDER: Final = (
    MISSING, UNVERIFIABLE, MALFORMED, OTHER_KEY, EXPIRED, REVOKED, OTHER_DATA, OTHER_REFERENCE,
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Signature:
    """A verified signature. ``signer``: by whom, for people.

    ``digest``: of the signed manifest. ``reference``: its name, empty if the signature has none.
    """

    signer: str
    digest: str
    reference: str = ""

    def check(self, digests: Collection[str], name: str) -> None:
        """Raise ``errors.Untrusted`` unless it is about one of ``digests``."""
        if self.digest not in digests:
            reason = f"{self.signer} signed {self.digest}, not {' or '.join(digests)}"
            raise errors.Untrusted(url=name, fault=OTHER_DATA, reason=reason)


def worst(found: Iterable[errors.Untrusted]) -> errors.Untrusted | None:
    """Return the failure of the signature that came closest; None if there is none."""
    return max(found, key=lambda err: ORDER.index(str(err.fields["fault"])), default=None)


def malformed(name: str, reason: object) -> errors.Untrusted:
    """Return the error for a signature that cannot be read."""
    return errors.Untrusted(url=name, fault=MALFORMED, reason=reason)
