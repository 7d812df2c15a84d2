"""Read a finished disk back from storage."""

from __future__ import annotations

import hashlib
import logging
from typing import Final

from cdi_worker import errors
from cdi_worker.images import directio, readback, targets, volume
from cdi_worker.images.engine import cancelling
from cdi_worker.importer import destination
from cdi_worker.importer.plan import Route
from cdi_worker.importer.progress import Progress
from cdi_worker.importer.request import Request
from cdi_worker.importer.result import Result
from cdi_worker.scratch import journal

log = logging.getLogger(__name__)

ADVICE: Final = "do not use this disk; check its storage"
#: The routes after which a disk may be read back: not a blank disk, nor a folder.
WRITTEN: Final = frozenset(Route) - {Route.BLANK, Route.UNPACK}


def read_back(result: Result, request: Request, progress: Progress) -> Result:
    """Read a disk from storage; compare it with the digest of its source, and with the bytes received.

    Return the result with the SHA-256 of the disk. Raises ``errors.TargetError``.
    """
    if result.plan.route not in WRITTEN:
        return result
    progress.phase("readback", result.size)
    received = result.counts.received or journal.Journal(None, "", 0)
    compare = readback.Compare(received, result.target)
    hashed = hashlib.sha256()
    at = 0
    is_qcow2 = request.form is not None
    with (
        destination.open_finished(request, result.target, cancelling.NEVER, is_qcow2=is_qcow2) as held,
        targets.open(result.target, None, targets.TargetOptions(claim=held)) as out,
    ):
        for part in readback.parts(out.storage, result.size, [(0, result.size)]):
            compare.take(part)
            at = part.offset + part.length
            zeros = directio.zeros(part.offset, at)
            for _, data in [part] if isinstance(part, volume.Data) else zeros:
                hashed.update(data)
                progress.advance(len(data))
    if at < result.size:
        reason = f"read back: {result.size - at} bytes are missing at its end"
        raise errors.TargetError(path=result.target, reason=reason)
    digest = hashed.hexdigest()
    compare.end()
    log.info("read back sha256=%s compared=%d differed=%d", digest, compare.total, compare.differing)
    if compare.differing:
        where = f"{compare.differing} bytes differ from those received, from byte {compare.first} on"
        raise errors.TargetError(path=result.target, reason=f"read back: {where}; {ADVICE}")
    if result.sha256 not in {"", digest}:
        reason = f"read back: sha256 {digest} is not that of the source, {result.sha256}; {ADVICE}"
        raise errors.TargetError(path=result.target, reason=reason)
    return result._replace(sha256=digest, confirmed=compare.total)
