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


@dataclasses.dataclass(frozen=True)
class SentDisk:
    """What a client states to send: ``token``, a secret of this run of the client, and the disk's ``size``.

    Only the same run can resume: a change of the volume between two runs would not be noticed.
    """

    token: str = dataclasses.field(repr=False)
    size: int

    @property
    def identity(self) -> str:
        return f"run {hashlib.sha256(self.token.encode()).hexdigest()[:16]} size {self.size}"

    @classmethod
    def parse(cls, text: str) -> SentDisk | None:
        """Return the content that a header states; None if it states none."""
        found = _CONTENT.fullmatch(text)
        return cls(found[1], int(found[2])) if found else None


class CloneSource(upload.UploadSource):
    """A raw device, or with ``is_tar`` the files of a file system; no format is detected.

    ``ours``: in our own stream format, not in snappy framing. ``content``: the disk that the client states to
    send; it can be resumed. ``keep`` is called once with the part of it that is already on the target.
    """

    def __init__(
        self,
        body: upload.Body,
        cancel: base.Cancel,
        *,
        is_tar: bool,
        ours: bool,
        content: SentDisk | None = None,
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
        )

    @property
    def unwrap(self) -> Callable[[base.Reader], base.Reader] | None:
        return None if self._ours else snappy.SnappyReader

    @property
    def runs(self) -> Callable[[base.Reader, base.Buffers], Iterable[base.Run]] | None:
        if self._is_tar or not self._ours:
            return None
        return lambda reader, buffers: clone.Decoder(reader, buffers, kept=self._kept)

    @property
    def folder(self) -> Callable[[base.Reader, base.Buffers], clone.FolderDecoder] | None:
        return clone.FolderDecoder if self._ours and self._is_tar else None

    @property
    def keep(self) -> Callable[[int, int], None] | None:
        return None if self._content is None else self._keep_part

    def _keep_part(self, start: int, end: int) -> None:
        self._kept = start, end
        self._keep(self._kept)
