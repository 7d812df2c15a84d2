"""The checkpoint of a disk between the stages of a migration, kept in an extended attribute of its file.

Block devices, and file systems without user attributes, keep none.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from typing import Final, NamedTuple, Self

from cdi_worker import errors
from cdi_worker.formats import smalljson
from cdi_worker.images import kernel
from cdi_worker.images.targets import file

log = logging.getLogger(__name__)

NAME: Final = "user.cdi-worker.checkpoint"
#: Begins a name of a checkpoint that belongs to one version of its files, which can be replaced.
VERSION: Final = "version sha256:"
_NONE: Final = frozenset({errno.ENODATA, errno.ENOENT, *kernel.REFUSALS})
#: No attributes (an NBD export is not a file), or none of this length.
_UNABLE: Final = frozenset({errno.E2BIG, errno.ERANGE, *_NONE})
#: Bytes of an attribute that every file system with attributes stores, if it has space (ext4: a block).
_SHORT: Final = 512


class Checkpoint(NamedTuple):
    """The state of a disk. A checkpoint may have several names.

    ``at``: the checkpoint that the disk holds. ``to``: the one that an unfinished delta leads to; empty if
    there is none.
    """

    at: frozenset[str]
    to: frozenset[str] = frozenset()

    def __str__(self) -> str:
        if not self.at:
            return "none: it is in the middle of an update, which must be run again"
        at, to = (" or ".join(sorted(names - _versions(names))) for names in (self.at, self.to))
        return at + (f", with a part of the delta to {to}" if to else "")

    @classmethod
    def read(cls, path: str) -> Self | None:
        """Return the checkpoint of a file, None if it has none. Raises ``errors.TargetError``."""
        try:
            found = smalljson.parse(os.getxattr(path, NAME, follow_symlinks=False))
            return cls(frozenset(map(str, found["at"])), frozenset(map(str, found["to"])))
        except OSError as err:
            if err.errno in _NONE:
                return None
            raise errors.target_error(path, err, "read the checkpoint") from err
        except (ValueError, KeyError, TypeError) as err:
            reason = f"its attribute {NAME} is damaged; start again with a first stage"
            raise errors.TargetError(path=path, reason=reason) from err

    def write(self, path: str) -> None:
        """Store the checkpoint with a file, or remove the old one where the file system cannot.

        Raises ``errors.TargetError`` if it can, but fails, or has no space to replace the old one: without
        any, each delta would be accepted.
        """
        text = json.dumps({"at": sorted(self.at), "to": sorted(self.to)})
        try:
            os.setxattr(path, NAME, text.encode(), follow_symlinks=False)
        except OSError as err:
            is_full = err.errno == errno.ENOSPC and len(text) <= _SHORT and self.read(path) is not None
            if is_full or err.errno not in {errno.ENOSPC, *_UNABLE}:
                raise errors.target_error(path, err, "store the checkpoint") from err
            log.info("checkpoint not stored path=%r error=%r", path, err.strerror)
            forget(path)

    def allows(self, previous: frozenset[str], current: frozenset[str]) -> bool:
        """Return whether the delta from ``previous`` to ``current`` may be applied.

        The same delta may be applied again after its end, and alone after an interruption: it writes the
        same bytes to the same places, unless its files were replaced (``is_of_others``).
        """
        if self.is_of_others(current):
            return False
        if self.to:
            return bool(self.at & previous and self.to & current)
        return bool(self.at & (previous | current))

    def is_of_others(self, current: frozenset[str]) -> bool:
        """Return whether the last delta led to the same checkpoint, but from other files.

        A checkpoint without a version is compared by its names.
        """
        applied = self.to or self.at
        return bool(applied & current) and not _versions(applied) <= current


def _versions(names: frozenset[str]) -> frozenset[str]:
    return frozenset(name for name in names if name.startswith(VERSION))


def of_disk(path: str) -> Checkpoint | None:
    """Return the checkpoint of the disk at ``path``, also after an interrupted update."""
    return Checkpoint.read(path if os.path.lexists(path) else file.changing(path))


def forget(path: str) -> None:
    """Remove the checkpoint of a file. Raises ``errors.TargetError``."""
    try:
        os.removexattr(path, NAME, follow_symlinks=False)
    except OSError as err:
        if err.errno not in _NONE:
            raise errors.target_error(path, err, "remove the checkpoint") from err
