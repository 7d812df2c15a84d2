"""The outcome of a pod for the controllers: termination message and exit status (contract, Outcome)."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping

from cdi_worker import errors
from cdi_worker.formats import detect

log = logging.getLogger(__name__)

#: The kubelet cuts longer messages (Kubernetes, "Customizing the termination message").
LIMIT = 4096
#: Longest word, such as a URL, in a message that would be cut otherwise.
LONG = 500


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
    """Return the report of a successful import."""
    fields: dict[str, object] = {} if blank else {"scratchSpaceRequired": False}
    fields |= {"preallocationApplied": preallocated, "message": "Import Complete"}
    if vddk_info:
        fields["vddkInfo"] = dict(vddk_info)
    if labels:
        fields["labels"] = _fitting(labels, fields)
    return Report(_as_json(fields), 0)


def uploaded(*, clone: bool, preallocated: bool) -> Report:
    """Return the report of a successful upload."""
    message = "Clone Complete" if clone else "Upload Complete"
    return Report(_as_json({"preallocationApplied": preallocated, "message": message}), 0)


def deadline_passed() -> Report:
    """Return the report of an upload server that received no upload before its deadline."""
    fields = {"preallocationApplied": False, "deadlinePassed": True, "message": "Deadline Passed"}
    return Report(_as_json(fields), 0)


def cloned(*, preallocated: bool) -> Report:
    """Return the report of a successful clone source: plain text, unlike the others."""
    return Report("Clone Complete, Preallocation applied" if preallocated else "Clone Complete", 0)


def failure(error: errors.Error, source: str) -> Report:
    """Return the report of a failed import. ``source``: the value of ``IMPORTER_SOURCE``.

    Two failures have exit status 0, so that the kubelet does not restart the container: the controller starts
    a pod with scratch, or treats the checksum mismatch as final.
    """
    if isinstance(error, errors.ScratchRequired):
        fields = {"scratchSpaceRequired": True, "preallocationApplied": False, "message": "Import Complete"}
        return Report(_as_json(fields), 0)
    if isinstance(error, errors.ChecksumMismatch):
        return Report(_as_json({"message": f"Unable to process data: {error}"}), 0)
    if isinstance(error, errors.Unreachable):
        return Report(_one_line(f"Unable to connect to {source} data source: {error}"), 1)
    if isinstance(error, errors.SourceError) or _is_cut_short(error):
        return Report(_one_line(f"Unable to process data: failed to pull image: {error}"), 1)
    return Report(_one_line(f"Unable to process data: {error}"), 1)


def _is_cut_short(error: errors.Error) -> bool:
    """Return whether a compressed stream ended early: the transfer's fault for the controllers, as in CDI."""
    return isinstance(error, errors.Truncated) and error.fields["format"] in detect.COMPRESSIONS


def internal(error: Exception) -> Report:
    """Return the report of an unexpected exception."""
    return Report(_one_line(f"Unable to process data: internal error: {type(error).__name__}: {error}"), 1)


def write(report: Report, path: str) -> None:
    """Write the termination message to ``path``; a failure is only logged."""
    try:
        with open(path, "w", encoding="utf-8") as stream:
            stream.write(report.message)
    except OSError as err:
        log.warning("cannot write the termination message path=%r error=%s", path, err.strerror)


def _fitting(labels: Mapping[str, str], fields: Mapping[str, object]) -> dict[str, str]:
    """Return the labels that fit into the message: cutting it would make its JSON invalid."""
    kept: dict[str, str] = {}
    for name, value in labels.items():
        if len(_json({**fields, "labels": {**kept, name: value}}).encode()) <= LIMIT:
            kept[name] = value
    if len(kept) < len(labels):
        log.warning("labels do not fit into the termination message dropped=%d", len(labels) - len(kept))
    return kept


def _as_json(fields: Mapping[str, object]) -> str:
    """Return compact JSON of at most ``LIMIT`` bytes, with ``message`` cut if needed."""
    text = _json(fields)
    if len(text.encode()) <= LIMIT:
        return text
    room = LIMIT - len(_json({**fields, "message": ""}).encode())
    # One character takes at most six bytes, as a JSON escape (\u0000).
    return _json({**fields, "message": str(fields["message"])[: max(0, room // 6)]})


def _json(fields: Mapping[str, object]) -> str:
    return _text(json.dumps(fields, separators=(",", ":"), ensure_ascii=False))


def _one_line(text: str) -> str:
    words = errors.one_line(text).split()
    if len(" ".join(words).encode()) > LIMIT:
        # A long URL must not displace the reason after it.
        words = [word if len(word) <= LONG else f"{word[: LONG - 100]}…{word[-100:]}" for word in words]
    return " ".join(words).encode()[:LIMIT].decode("utf-8", "ignore")


def _text(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()
