"""The files of a chain, from sources of the same kind."""

from __future__ import annotations

import dataclasses
import hashlib
import posixpath
import urllib.parse
from collections.abc import Sequence

from cdi_worker.sources import base


class Files(base.Source):
    """Several files, the oldest first. Each is read for itself, by ranges."""

    def __init__(self, files: Sequence[base.Source]) -> None:
        self.name = files[0].name
        self._files = tuple(files)
        self._images: list[base.Image] = []

    def open(self, opening: base.Opening) -> base.Facts:
        # Called again after a failure that may pass: what is open stays so.
        for file in self._files[len(self._images) :]:
            self._images.append(base.Image(file, file.open(opening), opening.engine))
        facts = [each.facts for each in self._images]
        has_identity = all(each.identity for each in facts)
        is_signed = all(each.signatures for each in facts)
        return base.Facts(
            name=" + ".join([facts[0].name, *map(base_name, facts[1:])]),
            size=sum(each.size or 0 for each in facts),
            head=facts[0].head,
            identity=_joined(facts) if has_identity else None,
            weak=any(each.weak for each in facts),
            signatures=tuple(one for each in facts for one in each.signatures) if is_signed else (),
            files=tuple(self._images),
        )

    def close(self) -> None:
        for file in self._files:
            file.close()

    def verify(self) -> None:
        for file in self._files:
            file.verify()

    def finish(self, facts: base.Facts) -> base.Facts:
        newest = [file.finish(each.facts) for file, each in zip(self._files, self._images, strict=True)][-1]
        return dataclasses.replace(facts, labels=newest.labels, info=newest.info)


def base_name(facts: base.Facts) -> str:
    """Return the last part of an address, as a backing file's name has it."""
    if "://" not in facts.name:
        return posixpath.basename(facts.name)
    return posixpath.basename(urllib.parse.unquote(urllib.parse.urlsplit(facts.name).path))


def _joined(facts: Sequence[base.Facts]) -> str:
    text = "\n".join(map(_identity, facts))
    # A local path may be no UTF-8.
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def _identity(facts: base.Facts) -> str:
    """Return what a journal must know of a file; a weak identity is completed by the first bytes.

    Where the file is does not matter: its address is known to the journal from the request.
    """
    head = hashlib.sha256(facts.head).hexdigest() if facts.weak else ""
    return f"{base_name(facts)} {facts.identity} {head}"
