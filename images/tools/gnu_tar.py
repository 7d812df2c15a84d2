"""Read a directory as a GNU tar archive, the format that CDI's clone target unpacks."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable, Set

from cdi_worker import errors
from cdi_worker.images.tools import process

#: Created by mkfs, and not part of a volume's content.
NOT_CONTENT = frozenset({"lost+found"})
_CHUNK = 1 << 20


def names(directory: str | os.PathLike[str], without: Set[str] = frozenset()) -> list[str]:
    """Return the names in ``directory`` that an archive contains. Raises ``errors.Unreachable``."""
    try:
        return sorted(set(os.listdir(directory)) - NOT_CONTENT - without)
    except OSError as err:
        raise errors.Unreachable(url=os.fspath(directory), reason=errors.words(err)) from err


class TarReader:
    """Read an archive of the ``names`` in ``directory``; ``sparse``: store holes as a sparse map.

    Names are relative to the directory, without a leading ``./``. Raises ``errors.ToolFailed``.
    """

    def __init__(self, directory: str | os.PathLike[str], names: Iterable[str], *, sparse: bool) -> None:
        with process.memory_file(b"".join(os.fsencode(name) + b"\0" for name in names)) as listed:
            argv = ["tar", "--create", "--format=gnu", f"--directory={pathlib.Path(directory).resolve()}"]
            argv += ["--null", "--verbatim-files-from", f"--files-from=/proc/self/fd/{listed}", "--file=-"]
            # The same order each time, so that a broken stream can be repeated.
            argv += ["--sort=name", *(["--sparse"] if sparse else [])]
            command = process.Command(tuple(argv), package="tar", pass_fds=(listed,))
            self._process = process.Process(command, stdout=process.PIPE)

    def readinto(self, into: memoryview, /) -> int:
        """Read 1 to ``len(into)`` bytes; return 0 only at the end of a complete archive."""
        count = self._process.readinto(into[:_CHUNK])
        if not count:
            self._process.finish()
        return count

    def close(self) -> None:
        self._process.stop()
