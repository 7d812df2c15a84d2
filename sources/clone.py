"""The body of a clone: the snappy framing format, or our own stream of extents (docs/pods/clone.md)."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Iterable
from typing import Final

from cdi_worker.formats import clone
from cdi_worker.formats.compressed import snappy
from cdi_worker.sources import base, upload

#: A token of 128 bits or more, and a size in bytes that fits into 63 bits.
_CONTENT: Final = re.compile(r"([0-9a-f]{32,64}) ([1-9][0-9]{0,17})")


@dataclasses.dataclass(frozen=True, slots=True)
class Content:
    """What a client states to send: ``token``, which only this run of it knows, and the disk's ``size``.

    A volume may change between two runs, and nothing would show it.
    """

    token: str = dataclasses.field(repr=False)
    size: int

    @property
    def identity(self) -> str:
        return f"run {hashlib.sha256(self.token.encode()).hexdigest()[:16]} size {self.size}"

    @classmethod
    def parsed(cls, text: str) -> Content | None:
        """Return the content that a header states; None if it states none."""
        found = _CONTENT.fullmatch(text)
        return cls(found[1], int(found[2])) if found else None


class CloneSource(upload.UploadSource):
    """A raw device, or the files of a file system as ``is_tar`` states; no format is detected.

    ``ours``: in our own stream format, not in snappy framing. ``content``: what the client states to
    send, whose disk can then be resumed. ``keep`` is called once with the part of it that is on the target.
    """

    def __init__(
        self,
        body: upload.Body,
        cancel: base.Cancel,
        *,
        is_tar: bool,
        ours: bool,
        content: Content | None = None,
        keep: Callable[[tuple[int, int]], object] = lambda _: None,
    ) -> None:
        # The length of the body says nothing about the size of the disk.
        super().__init__(body, None, cancel)
        self._is_tar = is_tar
        self._ours = ours
        self._content = content
        self._keep = keep
        self._kept = 0, 0

    def open(self, opening: base.Opening) -> base.Facts:
        """Read nothing before ``keep``; the sender states the format."""
        content = self._content
        return base.Facts(
            name=self.name,
            identity=None if content is None else content.identity,
            format="tar" if self._is_tar else "raw",
            disk_size=None if content is None else content.size,
            once=True,
            thin=True,
            unwrap=None if self._ours else snappy.Reader,
            runs=self._runs if self._ours and not self._is_tar else None,
            folder=clone.Folder if self._ours and self._is_tar else None,
            keep=None if content is None else self._keep_part,
        )

    def _runs(self, reader: base.Reader, buffers: base.Buffers) -> Iterable[base.Run]:
        return clone.Decoder(reader, buffers, kept=self._kept)

    def _keep_part(self, start: int, end: int) -> None:
        self._kept = start, end
        self._keep(self._kept)
