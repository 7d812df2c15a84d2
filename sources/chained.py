"""The files of a chain as one source, from sources of the same kind."""

from __future__ import annotations

import hashlib
import posixpath
import urllib.parse
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Final, Self

from cdi_worker.formats import remembered
from cdi_worker.sources import base

#: Bytes between two files: more than the fetch engine reads over to save a request.
_BETWEEN: Final = 1 << 20


class Files(base.Source):
    """Several files, the oldest first, whose bytes follow each other. They are read by ranges only."""

    def __init__(self, files: Sequence[base.Source]) -> None:
        self._files = files
        self._opened = 0
        self.unverifiable = next((file.unverifiable for file in files if file.unverifiable), "")

    def __enter__(self) -> Self:
        # Called again after a failure that may pass: what is open stays so.
        for file in self._files[self._opened :]:
            file.engine, file.judging = self.engine, self.judging
            file.__enter__()
            self._opened += 1
        offset, parts = 0, {}
        for file in self._files:
            parts[offset] = file
            offset += (file.size or 0) + _BETWEEN
        self.parts = parts
        self.name = " + ".join([self._files[0].name, *map(base_name, self._files[1:])])
        self.size = offset
        self.head = self._files[0].head
        if all(file.signatures for file in self._files):
            self.signatures = tuple(each for file in self._files for each in file.signatures)
        self.weak = any(file.weak for file in self._files)
        if all(file.identity for file in self._files):
            self.identity = hashlib.sha256("\n".join(map(_identity, self._files)).encode()).hexdigest()
        limits = [file.longest_read for file in self._files if file.longest_read]
        self.longest_read = min(limits, default=None)
        return self

    def close(self) -> None:
        for file in self._files:
            file.close()

    @cached_property
    def known(self) -> remembered.Remembered:
        """The bytes that the checks of all files have read."""
        return remembered.Remembered.joined({offset: file.known for offset, file in self.parts.items()})

    def ranges(self) -> base.RandomReader | None:
        """Return the first file's, as a sign: the engine reads the parts."""
        found = [file.ranges() for file in self._files]
        return found[0] if all(file.size for file in self._files) and None not in found else None

    def verify(self) -> None:
        for file in self._files:
            file.verify()

    def finish(self) -> None:
        for file in self._files:
            file.finish()

    def labels(self) -> Mapping[str, str]:
        return self._files[-1].labels()

    def info(self) -> Mapping[str, str]:
        return self._files[-1].info()


def base_name(file: base.Source) -> str:
    """Return the last part of an address, as a backing file's name has it."""
    if "://" not in file.name:
        return posixpath.basename(file.name)
    return posixpath.basename(urllib.parse.unquote(urllib.parse.urlsplit(file.name).path))


def _identity(file: base.Source) -> str:
    """Return what a journal must know of a file; a weak identity is completed by the first bytes."""
    head = hashlib.sha256(file.head).hexdigest() if file.weak else ""
    return f"{file.name} {file.identity} {head}"
