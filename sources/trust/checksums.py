"""Files that say what a disk must be: read them, and verify whose they are, before a byte of it is read.

In a checksum file the disk is looked up. A block map (``maps``) is read by the same rules.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

from cdi_worker import errors
from cdi_worker.formats import checksum, checksum_file, signature
from cdi_worker.formats.signature import keyring, minisign, openpgp
from cdi_worker.images.engine import cancelling, retry
from cdi_worker.images.tools import gpgv
from cdi_worker.sources import base, kind
from cdi_worker.sources.trust import Demand, document, keyfiles

log = logging.getLogger(__name__)

#: Of a signature's file, in bytes.
LARGEST_SIGNATURE: Final = 1 << 20
#: For these hashes, two files with one checksum can be made.
BROKEN: Final = frozenset({"md5", "sha1"})


class Listed(NamedTuple):
    """What a checksum file says of a disk. ``details`` are for ``inspect``."""

    checksum: str
    details: Mapping[str, object]
    signatures: tuple[signature.Signature, ...]


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


class Statement(NamedTuple):
    """A file about a disk. ``text``: what is signed of it, or all. ``signer``: empty if not demanded."""

    name: str
    text: bytes
    signer: str


def read(
    url: str, demand: Demand, of: kind.Kind, location: base.Location, reading: Reading, *, limit: int
) -> Statement:
    """Return the file at ``url``, of at most ``limit`` bytes, about the disk at ``location``.

    Raises ``errors.Untrusted`` unless it has the demanded signature, ``errors.SourceError``.
    """
    path = demand.signed_by
    known = None if path is None else keyring.read(keyfiles.read(path), path)
    place = document.place(url, of, of.accept(location))
    data = reading.read(place, limit)
    clear = openpgp.clear(data, place.name)
    signer = ""
    if known is not None:
        signer = (
            _clear_signer(known, clear, place.name, reading.cancel)
            if clear
            else _signer(known, data, place, reading)
        )
    # Only what was signed counts. Its last line end is not (RFC 9580, 7.1), but every text file has one.
    return Statement(place.name, clear.text + b"\n" if clear else data, signer)


def look_up(demand: Demand, of: kind.Kind, location: base.Location, reading: Reading) -> Listed:
    """Look up the disk at ``location`` in its checksum file, once its signature, if demanded, is verified.

    Raises ``errors.Untrusted``, ``errors.SourceError``.
    """
    url, disk = demand.checksum_file or "", of.accept(location)
    name, text, signer = read(url, demand, of, disk, reading, limit=checksum_file.LARGEST)
    found = _find(text, disk.file_name, name, is_signed=bool(demand))
    log.info("checksum file url=%r checksum=%r signed by=%r", name, found, signer)
    details: dict[str, object] = {"checksumFile": name, "checksum": found}
    signatures = (signature.Signature(signer=signer, digest=found, reference=name),) if signer else ()
    if signatures:
        details["signatures"] = [dataclasses.asdict(each) for each in signatures]
    return Listed(found, details, signatures)


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


def _clear_signer(known: keyring.Keyring, clear: openpgp.Clear, name: str, cancel: cancelling.Cancel) -> str:
    if not known.openpgp:
        reason = "it is an OpenPGP signature, and --signed-by has no OpenPGP keys"
        raise errors.Untrusted(url=name, fault=signature.OTHER_KEY, reason=reason)
    return gpgv.verify(known.openpgp, clear.signature, clear.text, name, cancel)


def _signer(known: keyring.Keyring, data: bytes, place: document.Place, reading: Reading) -> str:
    """Return who signed ``data``, by the first valid signature beside it. Raises ``errors.Untrusted``."""
    failed = []
    for name, proof in _signatures(known, place, reading):
        try:
            return _verify(known, proof, data, name, reading.cancel)
        except errors.Untrusted as err:
            log.info("signature not accepted: %s", err)
            failed.append(err)
    if (closest := signature.worst(failed)) is not None:
        raise closest
    tried = ", ".join(known.endings)
    reason = f"not clear-signed, and no signature beside it (the same name with {tried})"
    raise errors.Untrusted(url=place.name, fault=signature.MISSING, reason=reason)


def _signatures(
    known: keyring.Keyring, place: document.Place, reading: Reading
) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of the signatures beside the file."""
    for ending in known.endings:
        beside = place.beside(ending)
        try:
            yield beside.name, reading.read(beside, LARGEST_SIGNATURE)
        except errors.TransferFailed:
            raise
        except errors.SourceError as err:
            # Not there; a store may also answer 403 for it.
            log.info("no signature: %s", err)


def _verify(known: keyring.Keyring, proof: bytes, data: bytes, name: str, cancel: cancelling.Cancel) -> str:
    """Return who made the signature ``proof``, whose form its content says. Raises ``errors.Untrusted``."""
    if proof.startswith(minisign.BEGIN):
        return minisign.signer(known.minisign, proof, data, name)
    if not known.openpgp:
        reason = "its form is not that of the keys in --signed-by"
        raise errors.Untrusted(url=name, fault=signature.OTHER_KEY, reason=reason)
    return gpgv.verify(known.openpgp, proof, data, name, cancel)
