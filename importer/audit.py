"""Read a finished disk back from storage."""

from __future__ import annotations

import hashlib
import logging
from typing import Final

from cdi_worker import errors
from cdi_worker.images import readback, volume
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
_PIECE: Final = 4 << 20


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
    with errors.on_target(result.target, "read back"), destination.open_disk(request, result.target) as read:
        while at < result.size and (data := read(at, min(result.size - at, _PIECE))):
            hashed.update(data)
            compare.take(volume.Data(at, memoryview(data)))
            progress.advance(len(data))
            at += len(data)
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
