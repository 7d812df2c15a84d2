"""The outcome of a pod for the controllers: termination message and exit status (contract, Outcome)."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from typing import NamedTuple

from cdi_worker import errors, masking
from cdi_worker.formats import detect

log = logging.getLogger(__name__)

#: The kubelet cuts longer messages (Kubernetes, "Customizing the termination message").
LIMIT = 4096
#: Longest word, such as a URL, in a message that would be cut otherwise.
LONG = 500
#: Sources of which CDI opens nothing before it transfers: an image that is not reached is one not pulled.
PULLED = frozenset({"registry"})
#: Where a DataVolume's user finds the settings of a remedy (``remedy``), by ``IMPORTER_SOURCE``. A kind of
#: source that no DataVolume has is set by variables. The certificates of a clone's pods are CDI's own.
_NAMES: Mapping[str, Mapping[str, str]] = {
    "http": {"ca_files": "spec.source.http.certConfigMap"},
    "s3": {"ca_files": "spec.source.s3.certConfigMap"},
    "registry": {
        "ca_files": "spec.source.registry.certConfigMap",
        "insecure": "insecureRegistries in the configuration of CDI",
    },
    "imageio": {
        "ca_files": "spec.source.imageio.certConfigMap",
        "insecure": "spec.source.imageio.insecureSkipVerify",
    },
    "kubevirt": {
        "ca_files": "spec.source.kubevirt.certConfigMap",
        "insecure": "spec.source.kubevirt.insecureSkipVerify",
    },
    "vddk": {"thumbprint": "spec.source.vddk.thumbprint"},
    "nbd": {"ca_files": "IMPORTER_CERT_DIR", "insecure": "INSECURE_TLS"},
    "": {"ca_files": "delete this pod: CDI makes it again with its current CA"},
}


#: Of every source: a setting of the node.
_DEVICE = {"device": "device_ownership_from_security_context = true in the node's container runtime"}


class Report(NamedTuple):
    """``message``: one line for the termination log. ``status``: the pod's exit status.

    ``unsaid``: the exit status if the message cannot be written, where ``status`` alone would say otherwise.
    """

    message: str
    status: int
    unsaid: int | None = None


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


def verified(compared: int) -> Report:
    """Return the report of a disk that is that of its source."""
    return Report(_as_json({"message": "Verification Complete", "compared": compared}), 0)


def uploaded(*, clone: bool, preallocated: bool) -> Report:
    """Return the report of a successful upload."""
    message = "Clone Complete" if clone else "Upload Complete"
    return Report(_as_json({"preallocationApplied": preallocated, "message": message}), 0)


def deadline_passed() -> Report:
    """Return the report of an upload server that received no upload before its deadline."""
    fields = {"preallocationApplied": False, "deadlinePassed": True, "message": "Deadline Passed"}
    return Report(_as_json(fields), 0, unsaid=1)


def cloned(*, preallocated: bool) -> Report:
    """Return the report of a successful clone source: plain text, unlike the others."""
    return Report("Clone Complete, Preallocation applied" if preallocated else "Clone Complete", 0)


def failure(error: errors.Error, source: str) -> Report:
    """Return the report of a failed import. ``source``: the value of ``IMPORTER_SOURCE``.

    Two failures have exit status 0, so that the kubelet does not restart the container: the controller starts
    a pod with scratch, or treats the checksum mismatch as final.
    """
    text = words(error, source)
    if isinstance(error, errors.ScratchRequired):
        fields = {"scratchSpaceRequired": True, "preallocationApplied": False, "message": "Import Complete"}
        return Report(_as_json(fields), 0, unsaid=1)
    if isinstance(error, errors.ChecksumMismatch | errors.MapMismatch):
        return Report(_as_json({"message": f"Unable to process data: {text}"}), 0, unsaid=1)
    if isinstance(error, errors.Unreachable) and source not in PULLED:
        return Report(_one_line(f"Unable to connect to {source} data source: {text}"), 1)
    if _is_failed_pull(error):
        return Report(_one_line(f"Unable to process data: failed to pull image: {text}"), 1)
    return Report(_one_line(f"Unable to process data: {text}"), 1)


def words(error: errors.Error, source: str) -> str:
    """Return the message, with the DataVolume's fields. ``source``: the value of ``IMPORTER_SOURCE``."""
    names = {**_DEVICE, **_NAMES.get(source, {})}
    return error.worded(lambda found: found.words(names))


def _is_failed_pull(error: errors.Error) -> bool:
    """Return whether the controllers are to report ``ImagePullFailed``.

    As in CDI, a registry that has no image for the architecture has answered, and a compressed stream that
    cannot be decompressed to its end is a failed transfer.
    """
    if isinstance(error, errors.Corrupt):
        return error.fields["format"] in detect.COMPRESSIONS
    return isinstance(error, errors.SourceError) and not isinstance(error, errors.WrongPlatform)


def internal(error: Exception) -> Report:
    """Return the report of an unexpected exception."""
    return Report(_one_line(f"Unable to process data: internal error: {type(error).__name__}: {error}"), 1)


def write(report: Report, path: str) -> int:
    """Write the termination message to ``path``, and return the exit status; a failure is logged.

    In a pod it is a mounted file, which can only be written in place: not through a link.
    """
    try:
        with open(path, "w", encoding="utf-8", opener=_open_file) as stream:
            stream.write(report.message)
    except OSError as err:
        log.warning("cannot write the termination message path=%r error=%s", path, err.strerror)
        return report.status if report.unsaid is None else report.unsaid
    return report.status


def _open_file(path: str, flags: int) -> int:
    # Without O_NONBLOCK, a pipe is waited for that nobody reads.
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


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
    return _text(json.dumps(masking.masked(fields), separators=(",", ":"), ensure_ascii=False))


def _one_line(text: str) -> str:
    words = errors.one_line(text).split()
    if len(" ".join(words).encode()) > LIMIT:
        # A long URL must not displace the reason after it.
        words = [word if len(word) <= LONG else f"{word[: LONG - 100]}…{word[-100:]}" for word in words]
    return " ".join(words).encode()[:LIMIT].decode("utf-8", "ignore")


def _text(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()
