"""What an administrator asks of every finished import of a pod: to read the disk back, and a report."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from cdi_worker import contract, execute, plan, request

if TYPE_CHECKING:
    from cdi_worker import provenance

log = logging.getLogger(__name__)

#: The routes after which a disk may be read back: not a blank disk, nor a folder.
WRITTEN: Final = frozenset(plan.Route) - {plan.Route.BLANK, plan.Route.UNPACK}


def check(wanted: request.Request, tuning: contract.Tuning) -> None:
    """Raise ``errors.RequestError`` if the report of an import cannot be written."""
    _report(wanted, tuning)


def run(
    wanted: request.Request, tuning: contract.Tuning, work: Callable[[], execute.Result]
) -> execute.Result:
    """Return the result of ``work``, the import of ``wanted``, when its report is written.

    Raises ``errors.Error``; a disk whose report cannot be written stays.
    """
    report = _report(wanted, tuning)
    result = work()
    if tuning.read_back and result.plan.route in WRITTEN:
        # Imported when used (start-up time).
        from cdi_worker.images import stored

        result = dataclasses.replace(result, sha256=stored.sha256(result.target, result.size))
        log.info("read back sha256=%s", result.sha256)
    if report is not None:
        report.write([result])
    return result


def _report(wanted: request.Request, tuning: contract.Tuning) -> provenance.Report | None:
    """Return the report to write after the import, None if none is asked for."""
    if not tuning.report:
        return None
    # Imported when used (start-up time).
    from cdi_worker import provenance

    return provenance.Report(tuning.report, wanted)
