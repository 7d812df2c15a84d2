"""Block maps of bmaptool: read them, and verify whose they are, before a byte of the disk is read."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from typing import TYPE_CHECKING

from cdi_worker import errors
from cdi_worker.formats import bmap, signature
from cdi_worker.sources.trust import checksums

if TYPE_CHECKING:
    from cdi_worker.sources import base, kind
    from cdi_worker.sources.trust import Demand

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Blocks:
    """The map of a disk. ``name``: its address without secrets. ``digest``: ``ALGORITHM:HEX`` of it."""

    name: str
    map: bmap.Map = dataclasses.field(repr=False)
    digest: str
    signatures: tuple[signature.Signature, ...] = ()

    def details(self) -> dict[str, object]:
        """Return what ``inspect`` shows."""
        return {
            "map": self.name,
            "mapSize": self.map.size,
            "mapped": self.map.mapped,
            "mapRanges": len(self.map.ranges),
        }


def read(
    url: str, demand: Demand, of: kind.Kind, location: base.Location, reading: checksums.Reading
) -> Blocks:
    """Return the map at ``url`` of the disk at ``location``, once its signature, if demanded, is verified.

    Raises ``errors.Untrusted``, ``errors.SourceError``, ``errors.ImageError`` for what is not a map.
    """
    name, text, signer = checksums.read(url, demand, of, location, reading, limit=bmap.LARGEST)
    try:
        found = bmap.parse(text)
    except errors.ImageError as err:
        raise type(err)(**{**err.fields, "reason": f"{name}: {err.fields['reason']}"}) from err
    digest = f"sha256:{hashlib.sha256(text).hexdigest()}"
    log.info("map url=%r size=%d ranges=%d signed by=%r", name, found.size, len(found.ranges), signer)
    signatures = (signature.Signature(signer=signer, digest=digest, reference=name),) if signer else ()
    return Blocks(name, found, digest, signatures)
