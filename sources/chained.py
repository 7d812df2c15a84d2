"""The files of a chain, from sources of the same kind."""

from __future__ import annotations

import hashlib
import posixpath
import urllib.parse
from collections.abc import Mapping, Sequence

from cdi_worker.sources import base


class Files(base.Source):
    """Several files, the oldest first. Each is read for itself, by ranges."""

    def __init__(self, files: Sequence[base.Source]) -> None:
        self._files = tuple(files)
        self._opened = 0
        self.unverifiable = next((file.unverifiable for file in files if file.unverifiable), "")

    @property
    def files(self) -> tuple[base.Source, ...]:
        return self._files

    def open(self, opening: base.Opening) -> None:
        # Called again after a failure that may pass: what is open stays so.
        for file in self._files[self._opened :]:
            file.open(opening)
            self._opened += 1
        self.name = " + ".join([self._files[0].name, *map(base_name, self._files[1:])])
        self.size = sum(file.size or 0 for file in self._files)
        self.head = self._files[0].head
        if all(file.signatures for file in self._files):
            self.signatures = tuple(each for file in self._files for each in file.signatures)
        self.weak = any(file.weak for file in self._files)
        if all(file.identity for file in self._files):
            self.identity = hashlib.sha256("\n".join(map(_identity, self._files)).encode()).hexdigest()

    def close(self) -> None:
        for file in self._files:
            file.close()

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
