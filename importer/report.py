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
#: Characters of a value of ``vddkInfo``; as escapes in JSON each has six bytes.
INFO = 256
#: Where a DataVolume's user finds the settings of a remedy, by ``IMPORTER_SOURCE``. A kind of source that no
#: DataVolume has is set by variables. The certificates of a clone's pods are CDI's own.
_NAMES: Mapping[str, Mapping[str, str]] = {
    "http": {
        "ca_files": "spec.source.http.certConfigMap",
        "user and password": "spec.source.http.secretRef",
    },
    "s3": {
        "ca_files": "spec.source.s3.certConfigMap",
        "user and password": "spec.source.s3.secretRef",
    },
    "registry": {
        "user and password": "spec.source.registry.secretRef",
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
    "vsphere": {
        "thumbprint": "spec.source.vsphere.thumbprint",
        "ca_files": "spec.source.vsphere.certConfigMap",
        "insecure": "spec.source.vsphere.insecureSkipVerify",
    },
    "nbd": {"ca_files": "IMPORTER_CERT_DIR", "insecure": "INSECURE_TLS"},
    "": {"ca_files": "delete this pod: CDI makes it again with its current CA"},
}
#: Of every source: variables of the pod, a setting of the node, and what is done to the image elsewhere.
_ALL = {
    "checksum_file": "CDI_WORKER_CHECKSUM_FILE",
    "device": "device_ownership_from_security_context = true in the node's container runtime",
    "disk": "CDI_WORKER_DISK",
    "flatten": "",
    "repair": "",
    "volume": "fsGroup in its security context; NFS: chown on the server",
}


class Report(NamedTuple):
    """``message``: one line for the termination log. ``status``: the pod's exit status.

    ``unsaid``: the exit status if the message cannot be written and ``status`` alone would mislead.
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
        # A server may state anything, and a message that is cut is not JSON.
        fields["vddkInfo"] = {name: text[:INFO] for name, text in vddk_info.items()}
    if labels:
        kept: dict[str, str] = {}
        for name, value in labels.items():
            # Cutting the message would make its JSON invalid.
            if len(_json({**fields, "labels": {**kept, name: value}}).encode()) <= LIMIT:
                kept[name] = value
        if len(kept) < len(labels):
            log.warning("labels do not fit into the termination message dropped=%d", len(labels) - len(kept))
        fields["labels"] = kept
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
    # CDI connects to a registry only when it pulls. A compressed stream that cannot be decompressed to its
    # end is a failed transfer there.
    is_pull = isinstance(error, errors.Unreachable) and source == "registry"
    is_stream = isinstance(error, errors.Corrupt) and error.fields["format"] in detect.COMPRESSIONS
    phrase = errors.SourceError.phrase if is_pull or is_stream else error.phrase
    text = f"{phrase.format(source=source)}{message(error, source)}"
    if isinstance(error, errors.ScratchRequired):
        fields = {"scratchSpaceRequired": True, "preallocationApplied": False, "message": "Import Complete"}
        return Report(_as_json(fields), 0, unsaid=1)
    if isinstance(error, errors.ChecksumMismatch):
        return Report(_as_json({"message": text}), 0, unsaid=1)
    return Report(_one_line(text), 1)


def message(error: errors.Error, source: str) -> str:
    """Return the message, with the DataVolume's fields. ``source``: the value of ``IMPORTER_SOURCE``."""
    return error.message({**_ALL, **_NAMES.get(source, {})})


def internal(error: Exception) -> Report:
    """Return the report of an unexpected exception."""
    return Report(_one_line(f"Unable to process data: internal error: {type(error).__name__}: {error}"), 1)


def write(report: Report, path: str) -> int:
    """Write the termination message to ``path``, and return the exit status; a failure is logged.

    In a pod it is a mounted file, which can only be written in place: not through a link.
    """
    try:
        # Without O_NONBLOCK, opening a pipe without a reader would block.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with open(os.open(path, flags, 0o666), "w", encoding="utf-8") as stream:
            stream.write(report.message)
    except OSError as err:
        log.warning("cannot write the termination message path=%r error=%s", path, err.strerror)
        return report.status if report.unsaid is None else report.unsaid
    return report.status


def _as_json(fields: Mapping[str, object]) -> str:
    """Return compact JSON of at most ``LIMIT`` bytes, with ``message`` cut if needed."""
    text = _json(fields)
    if len(text.encode()) <= LIMIT:
        return text
    room = LIMIT - len(_json({**fields, "message": ""}).encode())
    # One character takes at most six bytes, as a JSON escape (\u0000).
    return _json({**fields, "message": masking.mask(str(fields["message"]))[: max(0, room // 6)]})


def _json(fields: Mapping[str, object]) -> str:
    text = json.dumps(masking.masked(fields), separators=(",", ":"), ensure_ascii=False)
    # Replaces lone surrogates.
    return text.encode("utf-8", "replace").decode()


def _one_line(text: str) -> str:
    words = errors.one_line(text).split()
    if len(" ".join(words).encode()) > LIMIT:
        # A long URL must not displace the reason after it.
        words = [word if len(word) <= LONG else f"{word[: LONG - 100]}…{word[-100:]}" for word in words]
    return " ".join(words).encode()[:LIMIT].decode("utf-8", "ignore")
