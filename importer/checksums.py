"""Checksum files: look up the checksum of the disk, and verify whose file it is, before a byte is read."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from cdi_worker import errors, sources
from cdi_worker.formats import checksum, checksum_file, signature
from cdi_worker.formats.signature import keyring, minisign, openpgp
from cdi_worker.images.engine import cancelling, retry
from cdi_worker.images.tools import gpgv
from cdi_worker.importer import request
from cdi_worker.sources import document, keyfiles

log = logging.getLogger(__name__)

#: Of a signature's file, in bytes.
LARGEST_SIGNATURE: Final = 1 << 20
#: For these hashes, two files with one checksum can be made.
BROKEN: Final = frozenset({"md5", "sha1"})


class _Files:
    """The checksum file and what is beside it; each is fetched once."""

    def __init__(
        self,
        wanted: request.Request,
        cancel: cancelling.Cancel,
        retried: Callable[[errors.Transient], None],
    ) -> None:
        kind = sources.find(wanted.source)
        self.place = document.place(wanted.demand.checksum_file or "", kind, kind.accept(wanted.location))
        self.name = self.place.name
        self.cancel = cancel
        self._patience = wanted.connect_patience
        self._retried = retried

    def read(self, place: document.Place, limit: int) -> bytes:
        """Return a file; retry transient failures. Raises ``errors.SourceError``."""
        return retry.patiently(
            lambda: place.read(limit, self.cancel), self._patience, self.cancel, self._retried
        )


def resolved(
    wanted: request.Request,
    cancel: cancelling.Cancel,
    retried: Callable[[errors.Transient], None] = lambda _: None,
) -> tuple[request.Request, Mapping[str, object], tuple[signature.Claims, ...]]:
    """Return the request with the checksum in its checksum file, details for ``inspect``, and who signed it.

    A demanded signature is that of the checksum file: the result demands none, but the checksum. Raises
    ``errors.Untrusted``, ``errors.SourceError``.
    """
    demand = wanted.demand
    path = demand.signed_by
    known = None if path is None else keyring.read(keyfiles.read(path), path)
    files = _Files(wanted, cancel, retried)
    data = files.read(files.place, checksum_file.LARGEST)
    clear = openpgp.clear(data, files.name)
    signer = ""
    if known is not None:
        signer = _clear_signer(known, clear, files) if clear else _signer(known, data, files)
    # Only what was signed counts.
    found = _find(clear.text if clear else data, wanted, files.name)
    log.info("checksum file url=%r checksum=%r signed by=%r", files.name, found, signer)
    rest = signature.Demand(policy=demand.policy)
    details: dict[str, object] = {"checksumFile": files.name, "checksum": found}
    claims = (signature.Claims(signer=signer, digest=found, reference=files.name),) if signer else ()
    if claims:
        details["signatures"] = [dataclasses.asdict(each) for each in claims]
    return dataclasses.replace(wanted, checksum=found, demand=rest), details, claims


def _find(text: bytes, wanted: request.Request, name: str) -> str:
    """Return the checksum of the disk. Raises ``errors.Untrusted`` if a signature is demanded, but does not
    cover it, else ``errors.SourceError``.
    """
    disk = sources.find(wanted.source).accept(wanted.location).file_name
    try:
        found = checksum_file.find(text, disk)
    except errors.SourceError as err:
        if wanted.demand:
            raise errors.Untrusted(url=name, fault=signature.OTHER_REFERENCE, reason=err) from err
        raise errors.SourceError(reason=f"{name}: {err}") from err
    if wanted.demand:
        if not any(line.name for line in checksum_file.parse(text)):
            reason = f"the signed checksum is without a name, and may be of another file than {disk!r}"
            raise errors.Untrusted(url=name, fault=signature.OTHER_REFERENCE, reason=reason)
        if checksum.parse(found).algorithm in BROKEN:
            reason = f"only an {checksum.parse(found).algorithm} checksum of {disk!r}, which can be forged"
            raise errors.Untrusted(url=name, fault=signature.UNVERIFIABLE, reason=reason)
    return found


def _clear_signer(known: keyring.Keyring, clear: openpgp.Clear, files: _Files) -> str:
    if not known.openpgp:
        reason = "it is an OpenPGP signature, and --signed-by has no OpenPGP keys"
        raise errors.Untrusted(url=files.name, fault=signature.OTHER_KEY, reason=reason)
    return gpgv.verify(known.openpgp, clear.signature, clear.text, files.name, files.cancel)


def _signer(known: keyring.Keyring, data: bytes, files: _Files) -> str:
    """Return who signed ``data``, by the first valid signature beside it. Raises ``errors.Untrusted``."""
    failed = []
    for name, proof in _signatures(known, files):
        try:
            return _verify(known, proof, data, name, files.cancel)
        except errors.Untrusted as err:
            log.info("signature not accepted: %s", err)
            failed.append(err)
    if (closest := signature.worst(failed)) is not None:
        raise closest
    tried = ", ".join(known.endings)
    reason = f"not clear-signed, and no signature beside it (the same name with {tried})"
    raise errors.Untrusted(url=files.name, fault=signature.MISSING, reason=reason)


def _signatures(known: keyring.Keyring, files: _Files) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of the signatures beside the checksum file."""
    for ending in known.endings:
        place = files.place.beside(ending)
        try:
            yield place.name, files.read(place, LARGEST_SIGNATURE)
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
