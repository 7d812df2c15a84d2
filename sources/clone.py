"""What another volume's clone source sends: snappy's frames, or a stream of our own (docs/clone.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Self

from cdi_worker.formats import clone
from cdi_worker.formats.compressed import snappy
from cdi_worker.sources import base, upload


class CloneSource(upload.UploadSource):
    """A raw device, or the tar of a file system: the request says which, nothing is looked at.

    ``ours``: sent by our own clone source, not in snappy's frames.
    """

    def __init__(self, body: upload.Body, *, is_tar: bool, ours: bool) -> None:
        # The length of the request is not the disk's.
        super().__init__(body, None)
        self.format = "tar" if is_tar else "raw"
        self._ours = ours

    def __enter__(self) -> Self:
        return self

    def unwrapped(self, served: base.Reader) -> base.Reader:
        return clone.Reader(served) if self._ours else snappy.Reader(served)

    def runs(self) -> Callable[[base.Reader, base.Buffers], Iterable[base.Run]] | None:
        return clone.Decoder if self._ours and self.format == "raw" else None
