"""Read a directory as a GNU tar archive, the format that CDI's clone target unpacks."""

from __future__ import annotations

import os
import pathlib
import threading
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
        self._names = [os.fsencode(name) for name in names]
        argv = ["tar", "--create", "--format=gnu", f"--directory={pathlib.Path(directory).resolve()}"]
        argv += ["--null", "--verbatim-files-from", "--files-from=-", "--file=-"]
        # The same order each time, so that a broken stream can be repeated.
        argv += ["--sort=name", *(["--sparse"] if sparse else [])]
        command = process.Command(tuple(argv), package="tar")
        self._process = process.Process(command, stdin=process.PIPE, stdout=process.PIPE)
        self._feeder = threading.Thread(target=self._feed, name="tar-names", daemon=True)
        self._feeder.start()

    def readinto(self, into: memoryview, /) -> int:
        """Read 1 to ``len(into)`` bytes; return 0 only at the end of a complete archive."""
        count = 0
        while count < min(len(into), _CHUNK) and (more := os.readv(self._process.stdout, [into[count:]])):
            count += more
        if not count:
            self._feeder.join()
            self._process.finish()
        return count

    def close(self) -> None:
        self._process.end()
        self._feeder.join()
        self._process.stop()

    def _feed(self) -> None:
        try:
            left = memoryview(b"".join(name + b"\0" for name in self._names))
            while left:
                left = left[os.write(self._process.stdin, left) :]
        except BrokenPipeError:
            # tar has exited: ``readinto`` reports its exit status.
            pass
        finally:
            self._process.close_stdin()
