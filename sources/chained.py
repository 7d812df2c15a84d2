"""The files of a chain, from sources of the same kind."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from cdi_worker.sources import base


class Files(base.Source):
    """Several files, the oldest first. Each is read separately, by ranges."""

    def __init__(self, sources: Sequence[base.Source]) -> None:
        self.name = sources[0].name
        self._sources = tuple(sources)

    def open(self, opening: base.Opening) -> base.Facts:
        # Called again after a failure that may pass: what is open stays so.
        for source in self._sources[len(self.files) :]:
            self.files += (source.image(opening),)
        facts = [each.facts for each in self.files]
        has_identity = all(each.identity for each in facts)
        is_signed = all(each.signatures for each in facts)
        return base.Facts(
            name=" + ".join([facts[0].name, *(base.file_name(each.name) for each in facts[1:])]),
            size=sum(each.size or 0 for each in facts),
            head=facts[0].head,
            identity=_identity(facts) if has_identity else None,
            weak=any(each.weak for each in facts),
            signatures=tuple(one for each in facts for one in each.signatures) if is_signed else (),
        )

    def close(self) -> None:
        for source in self._sources:
            source.close()

    def verify(self) -> None:
        for source in self._sources:
            source.verify()

    def finish(self) -> base.Provenance:
        newest = [source.finish() for source in self._sources][-1]
        return base.Provenance(labels=newest.labels, info=newest.info)


def _identity(files: Sequence[base.Facts]) -> str:
    """Return the identity of a chain: the digest of the names and identities of its files.

    A weak identity is completed by the first bytes. A journal has the folders of the files from the request.
    """
    heads = (hashlib.sha256(each.head).hexdigest() if each.weak else "" for each in files)
    text = "\n".join(
        f"{base.file_name(each.name)} {each.identity} {head}" for each, head in zip(files, heads, strict=True)
    )
    # A local path need not be UTF-8.
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
