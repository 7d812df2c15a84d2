"""The outcome as the controllers read it: the termination message and the exit status of a pod."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping

from cdi_worker import errors

log = logging.getLogger(__name__)

#: The kubelet cuts longer messages (Kubernetes, "Customizing the termination message").
LIMIT = 4096


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """``message``: one line for the termination log. ``status``: the pod's exit status."""

    message: str
    status: int


def complete(
    *,
    blank: bool,
    preallocated: bool,
    labels: Mapping[str, str] | None = None,
    vddk_info: Mapping[str, str] | None = None,
) -> Report:
    """Return the report of an import that is whole and on storage."""
    said: dict[str, object] = {} if blank else {"scratchSpaceRequired": False}
    said |= {"preallocationApplied": preallocated, "message": "Import Complete"}
    if vddk_info:
        said["vddkInfo"] = dict(vddk_info)
    if labels:
        said["labels"] = _fitting(labels, said)
    return Report(_as_json(said), 0)


def uploaded(*, clone: bool, preallocated: bool) -> Report:
    """Return the report of an upload server that has a whole disk on storage."""
    message = "Clone Complete" if clone else "Upload Complete"
    return Report(_as_json({"preallocationApplied": preallocated, "message": message}), 0)


def deadline_passed() -> Report:
    """Return the report of an upload server that nobody has uploaded to."""
    said = {"preallocationApplied": False, "deadlinePassed": True, "message": "Deadline Passed"}
    return Report(_as_json(said), 0)


def cloned(*, preallocated: bool) -> Report:
    """Return the report of a clone source: plain text, unlike all others."""
    return Report("Clone Complete, Preallocation applied" if preallocated else "Clone Complete", 0)


def failure(error: errors.Error, source: str) -> Report:
    """Return the report of a failed import from ``source``, a name of the contract.

    Two failures end well for the kubelet: the controller starts the pod again with scratch, or
    takes the mismatch as final.
    """
    if isinstance(error, errors.ScratchRequired):
        said = {"scratchSpaceRequired": True, "preallocationApplied": False, "message": "Import Complete"}
        return Report(_as_json(said), 0)
    if isinstance(error, errors.ChecksumMismatch):
        return Report(_as_json({"message": f"Unable to process data: {error}"}), 0)
    if isinstance(error, errors.Unreachable):
        return Report(_one_line(f"Unable to connect to {source} data source: {error}"), 1)
    if isinstance(error, errors.SourceError):
        return Report(_one_line(f"Unable to process data: failed to pull image: {error}"), 1)
    return Report(_one_line(f"Unable to process data: {error}"), 1)


def internal(error: Exception) -> Report:
    """Return the report of a defect of this program."""
    return Report(_one_line(f"Unable to process data: internal error: {type(error).__name__}: {error}"), 1)


def write(report: Report, path: str) -> None:
    """Leave the message where the kubelet looks for it. Failing to do so does not fail the import."""
    try:
        with open(path, "w", encoding="utf-8") as stream:
            stream.write(report.message)
    except OSError as err:
        log.warning("cannot write the termination message path=%r error=%s", path, err.strerror)


def _fitting(labels: Mapping[str, str], said: Mapping[str, object]) -> dict[str, str]:
    """Return the labels that the message has room for: a cut one would be no JSON."""
    kept: dict[str, str] = {}
    for name, value in labels.items():
        if len(_json({**said, "labels": {**kept, name: value}}).encode()) <= LIMIT:
            kept[name] = value
    if len(kept) < len(labels):
        log.warning("labels without room in the termination message count=%d", len(labels) - len(kept))
    return kept


def _as_json(said: Mapping[str, object]) -> str:
    """Return compact JSON; the message is cut, never the structure."""
    text = _json(said)
    if len(text.encode()) <= LIMIT:
        return text
    room = LIMIT - len(_json({**said, "message": ""}).encode())
    # A character takes six bytes at most: as an escape of JSON.
    return _json({**said, "message": str(said["message"])[: max(0, room // 6)]})


def _json(said: Mapping[str, object]) -> str:
    return _text(json.dumps(said, separators=(",", ":"), ensure_ascii=False))


def _one_line(text: str) -> str:
    line = " ".join(errors.one_line(text).split())
    return line.encode()[:LIMIT].decode("utf-8", "ignore")


def _text(words: str) -> str:
    """Return words of others without halves of characters, which JSON can hold and UTF-8 cannot."""
    return words.encode("utf-8", "replace").decode()
