"""The contract's roles: run one and write its report."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping

from cdi_worker import collector, errors
from cdi_worker.images.engine import cancelling
from cdi_worker.importer import contract, report

log = logging.getLogger(__name__)

#: Seconds before the first of ``retries``; each wait is twice the one before, up to the longest.
FIRST_WAIT = 2
LONGEST_WAIT = 300

Role = Callable[[Mapping[str, str], contract.Paths, cancelling.Cancel], report.Report]


def role_of(name: str) -> Role:
    """Import the modules of a role, and return the function that runs it."""
    if name == "importer":
        from cdi_worker.importer.roles import importer

        return importer.run
    if name == "uploadserver":
        with errors.optional("the upload server", package="h11 or multipart", extra="upload"):
            from cdi_worker.importer.upload import server
        return server.run
    from cdi_worker.importer.send import volume

    return volume.run


def run(
    role: str,
    env: Mapping[str, str],
    paths: contract.Paths,
    cancel: cancelling.Cancel,
    *,
    strict: bool = False,
    retries: int = 0,
    faults: tuple[str, ...] = (),
) -> int:
    """Run ``role``, write the termination message and return the exit status.

    ``strict``: a failure has the exit status of commands. Without it two failures have status 0, as CDI's
    controllers expect, which read the message instead. ``retries``: how often to repeat a failed role in
    this process. ``faults``: of the pod's options, which end it at once.
    """
    source = env.get("IMPORTER_SOURCE", "")
    try:
        if faults:
            raise errors.RequestError(*faults)
        if paths.settings.get("existing") == contract.COMPARE and role != "importer":
            raise errors.RequestError(contract.NOT_VERIFIED)
        if os.path.lexists(paths.policy):
            log.warning(
                "%s: is not read; demand a signature with %s_SIGNED_BY", paths.policy, contract.PREFIX
            )
        with collector.pause():
            run_role = role_of(role)
        outcome = _repeated(lambda: run_role(env, paths, cancel), retries, cancel, source)
    except errors.Error as err:
        log.error("failed: %s", report.message(err, source))  # noqa: TRY400  (the traceback is logged only with -v=4)
        log.debug("trace", exc_info=True)
        outcome = report.failure(err, source)
        if strict:
            outcome = outcome._replace(status=err.status, unsaid=None)
    except Exception as err:
        # A defect: the traceback goes to the log, one line to the controller.
        log.exception("internal error")
        outcome = report.internal(err)
    return report.write(outcome, paths.termination_log)


def _repeated(
    call: Callable[[], report.Report], retries: int, cancel: cancelling.Cancel, source: str
) -> report.Report:
    """Return the result of ``call``, repeated up to ``retries`` times after failures that a retry may mend.

    ``images.engine.retry`` ends a wait without progress; this repeats the whole role, as the kubelet does.
    """
    wait = FIRST_WAIT
    for left in range(retries, 0, -1):
        try:
            return call()
        except errors.Error as err:
            if err.status in errors.FINAL:
                raise
            log.warning("failed, retry in %d s, %d left: %s", wait, left, report.message(err, source))
            if cancel.wait(wait):
                raise cancel.error() from err
        wait = min(wait * 2, LONGEST_WAIT)
    return call()
