"""Checksum files: verify whose they are, and look up a disk, before a byte of it is read."""

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
from cdi_worker.sources import base, kind
from cdi_worker.sources.trust import Demand, Demanded, document, keyfiles

log = logging.getLogger(__name__)

#: Most bytes of a signature.
LARGEST_SIGNATURE: Final = 1 << 20
#: Suffixes of signatures beside a file.
ENDINGS: Final = (".gpg", ".sign", ".asc", ".sig")
#: Hashes for which two files with the same checksum can be made.
BROKEN: Final = frozenset({"md5", "sha1"})


@dataclasses.dataclass(frozen=True, slots=True)
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
    path, disk = demand.signed_by, of.accept(location)
    known = None if path is None else openpgp.keys_in(keyfiles.read(path), path)
    place = document.place(demand.checksum_file or "", of, disk)
    data = reading.read(place, checksum_file.LARGEST)
    clear = openpgp.clear(data, place.name)
    signer = ""
    if known is not None:
        signer = (
            gpgv.verify(known, clear.signature, clear.text, place.name, reading.cancel)
            if clear
            else _signer(known, data, place, reading)
        )
    # Only what was signed counts. Its last line end is not (RFC 9580, 7.1), but every text file has one.
    text, name = clear.text + b"\n" if clear else data, place.name
    found = _find(text, disk.file_name, name, is_signed=bool(demand.signed_by))
    log.info("checksum file url=%r checksum=%r signed by=%r", name, found, signer)
    details: dict[str, object] = {"checksumFile": name, "checksum": found}
    signatures = (signature.Signature(signer=signer, digest=found, reference=name),) if signer else ()
    if signatures:
        details["signatures"] = [dataclasses.asdict(each) for each in signatures]
    return Demanded(found, details=details, signatures=signatures)


def _find(text: bytes, disk: str, name: str, *, is_signed: bool) -> str:
    """Return the checksum of ``disk``. Raises ``errors.Untrusted`` if a signature is demanded, but does not
    cover it, else ``errors.SourceError``.
    """
    try:
        found = checksum_file.find(text, disk)
    except errors.SourceError as err:
        if is_signed:
            raise errors.Untrusted(url=name, fault=signature.OTHER_REFERENCE, reason=err) from err
        raise errors.SourceError(reason=f"{name}: {err}") from err
    if is_signed:
        if not any(line.name for line in checksum_file.parse(text)):
            reason = f"the signed checksum is without a name, and may be of another file than {disk!r}"
            raise errors.Untrusted(url=name, fault=signature.OTHER_REFERENCE, reason=reason)
        if checksum.parse(found).algorithm in BROKEN:
            reason = f"only an {checksum.parse(found).algorithm} checksum of {disk!r}, which can be forged"
            raise errors.Untrusted(url=name, fault=signature.UNVERIFIABLE, reason=reason)
    return found


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
