"""Trust: whose data a disk must be, which is verified before it is opened.

``Demand`` says what is demanded. ``checksums`` looks up a disk in a signed checksum file (``document`` reads
it), and ``maps`` reads a block map. ``images`` decides on the signatures of a container image: by keys
(``keyfiles``), by a certificate (``keyless``), or by a policy (``policy``, ``identity``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from cdi_worker import errors

if TYPE_CHECKING:
    from cdi_worker.formats.signature import simple
    from cdi_worker.sources import base, reference
    from cdi_worker.sources.trust import images


class Demand(NamedTuple):
    """The signature that a disk must have; false if it demands nothing.

    ``signed_by``: a file of public keys, or a folder of such files; a signature by one of them is enough.
    ``identity``, ``issuer``: those of the signer's certificate from Fulcio; ``trusted_root``: the file that
    says which Fulcio and Rekor to trust. ``annotations``: pairs that must have been signed. ``policy``: a
    policy.json of containers, which only concerns container images (containers-policy.json(5)).
    ``checksum_file``: URL or path of a file with the disk's checksum (SHA256SUMS, CHECKSUM), which the
    signature is of. ``map``: that of a block map of bmaptool, with the checksums of all ranges of the disk;
    both are signed then. None: not given; an empty text is a fault, because it may be a demand that got lost.
    """

    signed_by: str | None = None
    identity: str | None = None
    issuer: str | None = None
    trusted_root: str | None = None
    annotations: tuple[tuple[str, str], ...] = ()
    policy: str | None = None
    checksum_file: str | None = None
    map: str | None = None

    def __bool__(self) -> bool:
        return bool(self.signed_by or self.is_keyless or self.annotations)

    @property
    def is_keyless(self) -> bool:
        """Whether the signer is named by a certificate."""
        return bool(self.identity or self.issuer or self.trusted_root)

    @property
    def rest(self) -> Demand:
        """What is still demanded when the checksum file and the map are verified."""
        return Demand(policy=self.policy)

    @property
    def is_given(self) -> bool:
        """Whether anything is demanded of this disk. A policy concerns all images, and only images."""
        return bool(self or self.checksum_file or self.map)

    def refuse(self, name: str, reason: str) -> None:
        """Raise ``errors.Untrusted`` if anything is demanded of ``name``, which has no signatures."""
        if self.is_given:
            raise _unverifiable(name, reason)

    def faults(self) -> Iterator[str]:
        """Yield a message for each empty, missing or contradictory part."""
        for name, value in self._asdict().items():
            if isinstance(value, str) and not value.strip():
                yield f"demand: {name} is empty; give a value or leave it out"
        if self.signed_by and self.is_keyless:
            yield "--signed-by and --certificate-identity exclude each other: name keys or a certificate"
        if self.is_keyless and not (self.identity and self.issuer and self.trusted_root):
            yield "a certificate needs --certificate-identity, --certificate-oidc-issuer and --trusted-root"
        if self.annotations and not (self.signed_by or self.is_keyless):
            yield "--signature-annotation needs a signer: use --signed-by or --certificate-identity"
        if self.checksum_file and (self.is_keyless or self.annotations):
            yield "--checksum-file: use --signed-by; a checksum file has neither certificates nor annotations"
        if self.map and (self.is_keyless or self.annotations):
            yield "--map: use --signed-by; a map has neither certificates nor annotations"


#: No signature is required.
NOTHING = Demand()


class Candidate(NamedTuple):
    """A signature that is not verified yet: of either form, or why it could not be read.

    ``name`` is for messages.
    """

    name: str
    simple: simple.Signed | None = None
    bundle: bytes | None = None
    fault: errors.Untrusted | None = None


#: Returns the judge of an image's signatures (``images.Judge``).
Judging: TypeAlias = "Callable[[reference.Reference | reference.ArchiveReference], images.Judge]"


def opened(open_: Callable[[Judging | None], base.Facts], demand: Demand, kind: str) -> base.Facts:
    """Open a source of this kind: that verifies what is demanded, before its disk is read.

    ``open_`` gets what the source is opened with, see ``base.Opening``. Raises ``errors.Untrusted`` if the
    source has not verified it. ``check`` is called before.
    """
    facts = open_(functools.partial(_judge, demand) if demand or demand.policy else None)
    if demand and not facts.signatures:
        from cdi_worker.formats import signature

        reason = f"source {kind!r} has not verified it"
        raise errors.Untrusted(url=facts.name, fault=signature.MISSING, reason=reason)
    return facts


def check(demand: Demand, kind: str, location: base.Location, name: str) -> None:
    """Raise ``errors.Untrusted`` if a signature is demanded that opening the source does not verify.

    ``location``: that of a source of this kind. ``name``: the address without secrets, for the message.
    """
    if demand and location.unverifiable:
        raise _unverifiable(name, f"source {kind!r}: {location.unverifiable}")
    if location.pulled_elsewhere and demand.policy:
        from cdi_worker.sources.trust import policy

        # It would otherwise be a way around the policy.
        if not policy.read(demand.policy).accepts_everything:
            raise _unverifiable(name, f"{demand.policy}: {location.unverifiable}")


def _judge(demand: Demand, of: reference.Reference | reference.ArchiveReference) -> images.Judge:
    from cdi_worker.sources.trust import images

    return images.Judge(demand, of)


def _unverifiable(name: str, reason: str) -> errors.Untrusted:
    from cdi_worker.formats import signature

    return errors.Untrusted(url=name, fault=signature.UNVERIFIABLE, reason=reason)
