"""The contract's roles: what a pod does when its environment tells it to."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import sys
from collections.abc import Mapping

from images import retry
from importer import contract, errors, execute, metrics, progress, report

log = logging.getLogger(__name__)


def run(
    role: str,
    env: Mapping[str, str],
    paths: contract.Paths,
    cancel: retry.Cancel,
    *,
    strict: bool = False,
) -> int:
    """Play ``role`` and return the exit status; the outcome is in the termination log.

    ``strict``: any failure has the status that it has for commands. CDI's controllers read the
    message instead, and want 0 for two failures.
    """
    source = env.get("IMPORTER_SOURCE", "")
    try:
        outcome = _play(role, env, paths, cancel)
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


def _play(role: str, env: Mapping[str, str], paths: contract.Paths, cancel: retry.Cancel) -> report.Report:
    if role != "importer":
        play: report.Report = importlib.import_module(f"importer.{ROLES[role]}").play(env, paths, cancel)
        return play
    wanted = contract.import_request(env, paths)
    with metrics.exposed(role, wanted.owner_uid, paths.metrics_port) as told:
        result = execute.run(wanted, progress.Several(progress.Lines(sys.stderr), told), cancel)
    return report.complete(
        blank=wanted.source == "none",
        preallocated=result.preallocated,
        labels=result.labels,
        vddk_info=result.vddk_info,
    )


#: The modules of the roles that are not an import.
ROLES = {"uploadserver": "upload", "cloner": "clone"}
