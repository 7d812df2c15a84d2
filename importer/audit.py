"""What may follow a finished import: its disks are read back, its map and a report are written."""

from __future__ import annotations

import dataclasses
import logging
from typing import Final

from cdi_worker import errors
from cdi_worker.formats import bmap
from cdi_worker.images import readback, stored, volume
from cdi_worker.importer import destination
from cdi_worker.importer.plan import Route
from cdi_worker.importer.progress import Progress
from cdi_worker.importer.report import file, provenance
from cdi_worker.importer.request import Request
from cdi_worker.importer.result import Result
from cdi_worker.scratch import journal

log = logging.getLogger(__name__)

#: The routes after which a disk may be read back: not a blank disk, nor a folder.
ADVICE: Final = "do not use this disk; check its storage"
WRITTEN: Final = frozenset(Route) - {Route.BLANK, Route.UNPACK}


class Audit:
    """What follows the import of a request.

    Raises ``errors.RequestError`` if the report or the map cannot be written, before anything is imported.
    """

    def __init__(self, request: Request, progress: Progress) -> None:
        self._progress = progress
        self._request = request
        self._report = provenance.Report(request.report, request) if request.report else None
        self._map = file.File(request.write_map, "--write-map", request.target) if request.write_map else None

    def finish(self, results: list[Result]) -> list[Result]:
        """Return the results, with the SHA-256 of each disk that is read back."""
        if self._request.read_back:
            results = [self._read_back(each) if each.plan.route in WRITTEN else each for each in results]
        for each in results:
            if self._map is not None and each.map is not None and not self._request.maps_first:
                self._map.write(bmap.write(each.map), "the disk is complete, its map is not")
        if self._report is not None:
            self._report.write(results)
        return results

    def _read_back(self, result: Result) -> Result:
        """Read a disk from storage; compare it with the digest of its source, and with what has arrived."""
        self._progress.phase("readback", result.size)
        opened = destination.finished(self._request) or stored.file
        received = result.received or journal.Journal(None, "", 0)
        compare = readback.Compare(received, result.target)

        def seen(offset: int, data: bytes) -> None:
            compare.take(volume.Piece(offset, memoryview(data)))
            self._progress.advance(len(data))

        digest = stored.sha256(result.target, result.size, seen, opened)
        compare.end()
        log.info("read back sha256=%s compared=%d differed=%d", digest, compare.total, compare.differing)
        if compare.differing:
            where = f"{compare.differing} bytes differ from those received, from byte {compare.first} on"
            raise errors.TargetError(path=result.target, reason=f"read back: {where}; {ADVICE}")
        if result.sha256 not in {"", digest}:
            reason = f"read back: sha256 {digest} is not that of the source, {result.sha256}; {ADVICE}"
            raise errors.TargetError(path=result.target, reason=reason)
        return dataclasses.replace(result, sha256=digest, confirmed=compare.total)
