"""What may follow a finished import: the disk is read back, and a report is written."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from cdi_worker.importer import execute, plan, request
from cdi_worker.importer.settings import Settings

if TYPE_CHECKING:
    from cdi_worker.importer import provenance

log = logging.getLogger(__name__)

#: The routes after which a disk may be read back: not a blank disk, nor a folder.
WRITTEN: Final = frozenset(plan.Route) - {plan.Route.BLANK, plan.Route.UNPACK}


def check(wanted: request.Request, settings: Settings) -> None:
    """Raise ``errors.RequestError`` if the report of an import cannot be written."""
    _report(wanted, settings)


def run(wanted: request.Request, settings: Settings, work: Callable[[], execute.Result]) -> execute.Result:
    """Return the result of ``work``, the import of ``wanted``, when its report is written.

    Raises ``errors.Error``; a disk whose report cannot be written stays.
    """
    report = _report(wanted, settings)
    result = work()
    read_back = settings.read_back and result.plan.route in WRITTEN
    return finish([result], report, read_back=read_back)[0]


def finish(
    results: Sequence[execute.Result], report: provenance.Report | None, *, read_back: bool
) -> list[execute.Result]:
    """Return the results, with the SHA-256 of each disk if they are read back, once the report is written."""
    done = [_with_sha256(result) for result in results] if read_back else list(results)
    if report is not None:
        report.write(done)
    return done


def _with_sha256(result: execute.Result) -> execute.Result:
    # Imported when used (start-up time).
    from cdi_worker.images import stored

    found = stored.sha256(result.target, result.size)
    log.info("read back sha256=%s", found)
    return dataclasses.replace(result, sha256=found)


def _report(wanted: request.Request, settings: Settings) -> provenance.Report | None:
    """Return the report to write after the import, None if none is asked for."""
    if not settings.report:
        return None
    # Imported when used (start-up time).
    from cdi_worker.importer import provenance

    return provenance.Report(settings.report, wanted)
