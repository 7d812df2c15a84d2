"""What an error says at a terminal: sizes for people, and options in place of a pod's variables.

In a pod, the same errors have the phrases that CDI's controllers look for (``cdi_worker.importer.report``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cdi_worker import errors, units

#: What erases the bar; empty without one.
erase = ""
#: The options of a remedy's settings (``remedy``).
_NAMES = {
    "ca_files": "--ca-file",
    "certificate": "--cert and --key",
    "command": "",
    "insecure": "--insecure",
    "patience": "--stall-timeout",
    "root": "sudo",
    "slowest": "--speed-limit",
    "thumbprint": "--thumbprint",
    "token": "--token-file",
    "user and password": "--user and --password-file",
}


def message(error: errors.Error) -> str:
    """Return the message of ``error`` for a person who can change the command line."""
    for kind, words in _REMEDIES.items():
        if isinstance(error, kind):
            return errors.one_line(words(error))
    text = error.worded(lambda found: found.words(_NAMES))
    for fault in getattr(error, "faults", ()):
        text = text.replace(fault, getattr(fault, "at_terminal", fault))
    return text


def as_fields(error: errors.Error) -> dict[str, object]:
    """Return the error for JSON, with the message of a terminal."""
    return {**error.as_fields(), "message": message(error)}


def _too_large(error: errors.Error) -> str:
    size, room = (_size(error.fields[name]) for name in ("virtual_size", "available"))
    if error.fields.get("is_limit"):
        return f"the disk needs {size}, --size allows {room}; give a larger --size, or leave it out"
    return f"the disk needs {size}, the target has room for {room}; free space or name a larger target"


def _no_space(error: errors.Error) -> str:
    return f"{error}; free space, or use a larger file system"


def _scratch_required(error: errors.Error) -> str:
    return f"scratch space required: {error.fields['reason']}; name a folder with --scratch DIRECTORY"


def _scratch_too_small(error: errors.Error) -> str:
    size, room = (_size(error.fields[name]) for name in ("size", "available"))
    return f"scratch space has {room}, the image needs {size}; name a larger folder with --scratch DIRECTORY"


def _checksum_mismatch(error: errors.Error) -> str:
    return f"{error}; check the checksum, or fetch the source again: what was written is not a usable disk"


def _interrupted(error: errors.Error) -> str:
    return f"interrupted: {error.fields['kept']}; the same command continues"


def _size(value: Any) -> str:
    if not isinstance(value, int):
        return f"{value} bytes"
    return units.format_exactly(value)


_REMEDIES: dict[type[errors.Error], Callable[[errors.Error], str]] = {
    errors.Interrupted: _interrupted,
    errors.ChecksumMismatch: _checksum_mismatch,
    errors.TooLarge: _too_large,
    errors.NoSpace: _no_space,
    errors.ScratchRequired: _scratch_required,
    errors.ScratchTooSmall: _scratch_too_small,
}
