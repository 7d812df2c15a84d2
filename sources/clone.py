"""The body of a clone: the snappy framing format, or our own stream of extents (docs/pods/clone.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Self

from cdi_worker.formats import clone
from cdi_worker.formats.compressed import snappy
from cdi_worker.sources import base, upload


class CloneSource(upload.UploadSource):
    """A raw device, or the files of a file system as ``is_tar`` states; no format is detected.

    ``ours``: in our own stream format, not in snappy framing.
    """

    thin = True

    def __init__(self, body: upload.Body, cancel: base.Cancel, *, is_tar: bool, ours: bool) -> None:
        # The length of the body says nothing about the size of the disk.
        super().__init__(body, None, cancel)
        self.format = "tar" if is_tar else "raw"
        self._ours = ours

    def __enter__(self) -> Self:
        return self

    def unwrapped(self, served: base.Reader) -> base.Reader:
        return snappy.Reader(served)

    def runs(self) -> Callable[[base.Reader, base.Buffers], Iterable[base.Run]] | None:
        return clone.Decoder if self._ours and self.format == "raw" else None

    def folder(self) -> Callable[[base.Reader, base.Buffers], clone.Folder] | None:
        return clone.Folder if self._ours and self.format == "tar" else None
