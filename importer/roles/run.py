"""The contract's roles: what a pod does when its environment tells it to."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping

from cdi_worker import contract, errors, lazy, report
from cdi_worker.images.engine import cancelling

log = logging.getLogger(__name__)

Role = Callable[[Mapping[str, str], contract.Paths, cancelling.Cancel], report.Report]
#: A pod loads the modules of its own role.
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
    """Play ``role`` and return the exit status; the outcome is in the termination log.

    ``strict``: any failure has the status that it has for commands. CDI's controllers read the
    message instead, and want 0 for two failures.
    """
    source = env.get("IMPORTER_SOURCE", "")
    try:
        outcome = ROLES[role](env, paths, cancel)
    except errors.Error as err:
        log.error("failed: %s", err)  # noqa: TRY400  (the sentence is for people, the trace for -v=4)
        log.debug("trace", exc_info=True)
        outcome = report.failure(err, source)
        if strict:
            outcome = dataclasses.replace(outcome, status=err.status)
    except Exception as err:
        # A defect of ours. The controller reads one line, so it gets one.
        log.exception("internal error")
        outcome = report.internal(err)
    report.write(outcome, paths.termination_log)
    return outcome.status
