"""Checksum files: verify their signatures, and look up a disk, before a byte of it is read."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Final

from cdi_worker import errors
from cdi_worker.formats import checksum, checksum_file, signature
from cdi_worker.formats.signature import openpgp
from cdi_worker.images.engine import cancelling, retry
from cdi_worker.images.tools import gpgv
from cdi_worker.sources import base, kind, smallfile
from cdi_worker.sources.trust import Demand, Demanded, document

log = logging.getLogger(__name__)

#: Most bytes of a signature.
LARGEST_SIGNATURE: Final = 1 << 20
#: Suffixes of signatures beside a file.
ENDINGS: Final = (".gpg", ".sign", ".asc", ".sig")
#: Hashes for which two files with the same checksum can be made.
BROKEN: Final = frozenset({"md5", "sha1"})


@dataclasses.dataclass(frozen=True)
class Reading:
    """How to read files. ``patience``: seconds to retry transient failures. ``retried`` gets each of them."""

    cancel: cancelling.Cancel
    patience: float
    retried: Callable[[errors.Transient], None] = lambda _: None

    def read(self, place: document.Place, limit: int) -> bytes:
        """Return a file; retry transient failures. Raises ``errors.SourceError``."""
        return retry.patiently(
            lambda: place.read(limit, self.cancel), self.patience, self.cancel, self.retried
        )


def look_up(demand: Demand, of: kind.Kind, location: base.Location, reading: Reading) -> Demanded:
    """Look up the disk at ``location`` in its checksum file, once its signature, if demanded, is verified.

    Raises ``errors.Untrusted``, ``errors.SourceError``.
    """
    disk = of.accept(location)
    place = document.place(demand.checksum_file or "", of, disk)
    name, signer = place.name, ""
    keys = demand.signed_by
    known = None if keys is None else openpgp.keys_in(smallfile.read_each(keys), keys)
    text = reading.read(place, checksum_file.LARGEST)
    clear = openpgp.clear(text, name)
    if known is not None:
        signer = (
            gpgv.verify(known, clear.signature, clear.text, name, reading.cancel)
            if clear
            else _signer(known, text, place, reading)
        )
    if clear:
        # Only what was signed counts. Its last line end is not (RFC 9580, 7.1), but every text file has one.
        text = clear.text + b"\n"
    try:
        stated = checksum_file.find(text, disk.file_name)
    except errors.SourceError as err:
        if known is None:
            raise errors.SourceError(reason=f"{name}: {err}") from err
        raise errors.Untrusted(url=name, fault=signature.OTHER_REFERENCE, reason=err) from err
    if known is not None:
        if not any(line.name for line in checksum_file.parse(text)):
            reason = (
                f"the signed checksum is without a name, and may be of another file than {disk.file_name!r}"
            )
            raise errors.Untrusted(url=name, fault=signature.OTHER_REFERENCE, reason=reason)
        if (algorithm := checksum.parse(stated).algorithm) in BROKEN:
            reason = f"only an {algorithm} checksum of {disk.file_name!r}, which can be forged"
            raise errors.Untrusted(url=name, fault=signature.UNVERIFIABLE, reason=reason)
    log.info("checksum file url=%r checksum=%r signed by=%r", name, stated, signer)
    details: dict[str, object] = {"checksumFile": name, "checksum": stated}
    signatures = (signature.Signature(signer=signer, digest=stated, reference=name),) if signer else ()
    if signatures:
        details["signatures"] = [dataclasses.asdict(each) for each in signatures]
    return Demanded(stated, details=details, signatures=signatures)


def _signer(known: bytes, data: bytes, place: document.Place, reading: Reading) -> str:
    """Return who signed ``data``, by the first valid signature beside it. Raises ``errors.Untrusted``."""
    failed = []
    for ending in ENDINGS:
        beside = place.beside(ending)
        try:
            proof = reading.read(beside, LARGEST_SIGNATURE)
        except errors.TransferFailed:
            raise
        except errors.SourceError as err:
            # Not there; a store may also answer 403 for it.
            log.info("no signature: %s", err)
            continue
        try:
            return gpgv.verify(known, proof, data, beside.name, reading.cancel)
        except errors.Untrusted as err:
            log.info("signature not accepted: %s", err)
            failed.append(err)
    if (closest := signature.worst(failed)) is not None:
        raise closest
    tried = ", ".join(ENDINGS)
    reason = f"not clear-signed, and no signature beside it (the same name with {tried})"
    raise errors.Untrusted(url=place.name, fault=signature.MISSING, reason=reason)
