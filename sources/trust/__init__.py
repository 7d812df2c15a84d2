"""Trust: who must have signed a disk, which is verified before the disk is opened.

A request has a ``Demand``; ``Demanded`` is what it and its checksum file say of the bytes. ``images``
verifies the signatures of a container image by public keys. ``checksums`` looks up a disk in a
signed checksum file (``document`` reads it).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from cdi_worker import errors

if TYPE_CHECKING:
    from cdi_worker.formats import signature
    from cdi_worker.formats.signature import simple
    from cdi_worker.sources import base


class Demand(NamedTuple):
    """The signature and the checksum file that a request demands.

    ``signed_by``: a file of public keys, or a folder of such files; a signature by one of them is enough.
    ``checksum_file``: URL or path of a file with the disk's checksum (SHA256SUMS, CHECKSUM), which the
    signature is of. None: not given; an empty text is a fault, because it may be a demand that got lost.
    """

    signed_by: str | None = None
    checksum_file: str | None = None

    def refuse(self, name: str, reason: str) -> None:
        """Raise ``errors.Untrusted`` if anything is demanded of ``name``, which has no signatures."""
        if any(self):
            raise _unverifiable(name, reason)

    def faults(self) -> Iterator[str]:
        """Yield a message for each empty part."""
        for name, value in self._asdict().items():
            if value is not None and not value.strip():
                yield f"demand: {name} is empty; give a value or leave it out"


#: No signature is required.
NOTHING = Demand()


class Demanded(NamedTuple):
    """What the bytes of a source must be, as the request and its checksum file say.

    ``checksum``: ``ALGORITHM:HEX`` of the bytes as served. ``signed_by``: the keys for what opening the
    source verifies. ``details``, ``signatures``: of the checksum file, for ``inspect`` and the result.
    """

    checksum: str | None = None
    signed_by: str = ""
    details: Mapping[str, object] = MappingProxyType({})
    signatures: tuple[signature.Signature, ...] = ()


class Candidate(NamedTuple):
    """A signature that is not verified yet: a payload, a bundle, or why it could not be read.

    ``name`` is for messages.
    """

    name: str
    content: simple.Signed | bytes | errors.Untrusted


def check(demanded: Demanded, kind: str, location: base.Location, name: str) -> None:
    """Raise ``errors.Untrusted`` if a signature is demanded that opening the source does not verify.

    ``location``: that of a source of this kind. ``name``: the address without secrets, for the message.
    """
    if demanded.signed_by and location.unverifiable:
        raise _unverifiable(name, f"source {kind!r}: {location.unverifiable}")


def confirm(demanded: Demanded, kind: str, facts: base.Facts) -> None:
    """Raise ``errors.Untrusted`` if an open source has not verified the demanded signature."""
    if demanded.signed_by and not facts.signatures:
        from cdi_worker.formats import signature

        reason = f"source {kind!r} has not verified it"
        raise errors.Untrusted(url=facts.name, fault=signature.MISSING, reason=reason)


def _unverifiable(name: str, reason: str) -> errors.Untrusted:
    from cdi_worker.formats import signature

    return errors.Untrusted(url=name, fault=signature.UNVERIFIABLE, reason=reason)
