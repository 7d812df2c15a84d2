"""The body of a clone: the snappy framing format, or our own stream of extents (docs/pods/clone.md)."""

from __future__ import annotations

import dataclasses
import functools
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

    thin = True

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
        self.format = "tar" if is_tar else "raw"
        self._ours = ours
        self._keep = keep
        self._kept = 0, 0
        if content is not None:
            self.identity, self.disk_size = content.identity, content.size

    def open(self, opening: base.Opening) -> None:
        """Do nothing: the sender states the format, and nothing is read before ``keep``."""

    def unwrapped(self, served: base.Reader) -> base.Reader:
        return snappy.Reader(served)

    def runs(self) -> Callable[[base.Reader, base.Buffers], Iterable[base.Run]] | None:
        decoder = functools.partial(clone.Decoder, kept=self._kept)
        return decoder if self._ours and self.format == "raw" else None

    def keep(self, start: int, end: int) -> None:
        """State that the target holds a part of the disk, before anything is read."""
        self._kept = start, end
        self._keep(self._kept)

    def folder(self) -> Callable[[base.Reader, base.Buffers], clone.Folder] | None:
        return clone.Folder if self._ours and self.format == "tar" else None
