"""The contract's roles: run one and write its report."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping

from cdi_worker import contract, errors, lazy, report
from cdi_worker.images.engine import cancelling

log = logging.getLogger(__name__)

Role = Callable[[Mapping[str, str], contract.Paths, cancelling.Cancel], report.Report]
#: A pod imports only the modules of its own role (start-up time).
ROLES: lazy.Table[str, Role] = lazy.Table(
    {
        "importer": "cdi_worker.roles.importer:run",
        "uploadserver": "cdi_worker.upload.role:run",
        "cloner": "cdi_worker.send.volume:run",
    }
)


def run(
    role: str,
    env: Mapping[str, str],
    paths: contract.Paths,
    cancel: cancelling.Cancel,
    *,
    strict: bool = False,
) -> int:
    """Run ``role``, write the termination message and return the exit status.

    ``strict``: a failure has the exit status of commands. Without it two failures have status 0, as CDI's
    controllers expect, which read the message instead.
    """
    source = env.get("IMPORTER_SOURCE", "")
    try:
        outcome = ROLES[role](env, paths, cancel)
    except errors.Error as err:
        log.error("failed: %s", err)  # noqa: TRY400  (the traceback is logged only with -v=4)
        log.debug("trace", exc_info=True)
        outcome = report.failure(err, source)
        if strict:
            outcome = dataclasses.replace(outcome, status=err.status)
    except Exception as err:
        # A defect: the traceback goes to the log, one line to the controller.
        log.exception("internal error")
        outcome = report.internal(err)
    report.write(outcome, paths.termination_log)
    return outcome.status
