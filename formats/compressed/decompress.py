"""Decompress gz, xz, zst and bz2 streams, with all members of a stream.

Input and output of one step are bounded, so the constants below bound the memory for any input. Bytes
after the last member are an error, except the padding that the format's own tool ignores silently.
"""

from __future__ import annotations

import bz2
import dataclasses
import lzma
import re
from collections.abc import Callable
from typing import Any, cast

from isal import igzip_lib

from cdi_worker import errors
from cdi_worker.formats import readers
from cdi_worker.formats.compressed import xz
from cdi_worker.formats.zstd import zstd

#: Bytes read at once, passed to the decompressor at once, and returned by it at once. _STEP is smaller than
#: _INPUT because the unused rest of a step is copied for each member: bgzip writes many small members.
_INPUT = 1 << 20
_STEP = 1 << 17
_OUTPUT = 1 << 20

#: Bytes of input, and members, in a row that may decompress to nothing: skippable frames, empty members,
#: padding. Tools write a few KiB of them; a stream can consist of nothing else, without end.
_FRUITLESS, _FRUITLESS_MEMBERS = 64 << 20, 64 << 10

#: zstd --ultra -22 needs a window of 128 MiB, xz -9 one of 64 MiB; larger ones (zstd --long=28) are refused.
_WINDOW_LOG = 27
_MEMORY = (1 << _WINDOW_LOG) + (8 << 20)


@dataclasses.dataclass(frozen=True)
class Kind:
    """How to read one compression format.

    ``magic``: start of every member. ``start``: make the decompressor of a member, with the interface of
    ``bz2.BZ2Decompressor``; it gets the input, to choose by its first bytes. ``padding``: zero bytes may
    follow a member in multiples of this (0: no padding). ``resumes``: another member may follow the padding.
    """

    name: str
    magic: re.Pattern[bytes]
    start: Callable[[Members], Any]
    error: type[Exception]
    padding: int = 0
    resumes: bool = False


KINDS = {
    kind.name: kind
    for kind in (
        # gzip(1) ignores zeros at the end (padding of tape blocks) and reports other bytes as garbage.
        Kind(
            name="gz",
            magic=re.compile(rb"\x1f\x8b\x08"),
            start=lambda _: igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP),
            error=cast("type[Exception]", igzip_lib.IsalError),
            padding=1,
        ),
        # Stream padding: xz-file-format.txt, section 2.2.
        Kind(
            name="xz",
            magic=re.compile(rb"\xfd7zXZ\x00"),
            start=lambda members: xz.start(members.peek, members.take, _MEMORY),
            error=lzma.LZMAError,
            padding=4,
            resumes=True,
        ),
        # Frames and skippable frames: RFC 8878, sections 3.1.1 and 3.1.2.
        Kind(
            name="zst",
            magic=re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),
            start=lambda _: zstd.ZstdDecompressor(
                options={zstd.DecompressionParameter.window_log_max: _WINDOW_LOG}
            ),
            error=zstd.ZstdError,
        ),
        Kind(
            name="bz2", magic=re.compile(rb"BZh[1-9]"), start=lambda _: bz2.BZ2Decompressor(), error=OSError
        ),
    )
}


def open(  # noqa: A001 - read as decompress.open
    kind: str, reader: readers.Reader, *, limit: int | None = None
) -> readers.Reader:
    """Return a reader that decompresses ``reader``; ``kind``: gz, xz, zst or bz2.

    ``limit``: more decompressed bytes than this raise ``errors.TooLarge``.

    The reader raises ``errors.Corrupt``, ``errors.Truncated``, ``errors.TrailingGarbage``, and
    ``errors.Unsupported`` for a window larger than 128 MiB.
    """
    plain = Members(KINDS[kind], reader)
    return plain if limit is None else readers.LimitedReader(plain, limit)


class Members(readers.Wrapper):
    """Decompress the members of a file one after the other, as one stream."""

    def __init__(self, kind: Kind, reader: readers.Reader) -> None:
        super().__init__(reader)
        self._kind = kind
        self._member: Any = None
        self._input = memoryview(bytearray(_INPUT))
        self._at = 0
        self._end = 0
        self._taken = 0
        self._fruitful = 0  # the value of ``_taken`` at the last output
        self._fruitless_members = 0

    def readinto(self, into: memoryview, /) -> int:
        limit = min(len(into), _OUTPUT)
        while True:
            if self._member is None:
                self._member = self._kind.start(self)
            elif self._member.eof:
                if self._at_end():
                    return 0
                self._member = self._kind.start(self)
                self._fruitless_members += 1
                self._check_fruitful()
            if plain := self._step(limit):
                into[: len(plain)] = plain
                self._fruitful, self._fruitless_members = self._taken, 0
                return len(plain)

    def close(self) -> None:
        getattr(self._member, "close", lambda: None)()
        super().close()

    def peek(self, count: int) -> memoryview:
        """Return the next bytes of the input, at least ``count`` if there are so many."""
        self._fill(count)
        return self._input[self._at : self._end]

    def take(self, into: memoryview) -> int:
        """Read 1 to ``len(into)`` bytes of the input. Raises ``errors.Truncated`` at the end."""
        data = self.peek(1)[: len(into)]
        if not data:
            raise self._truncated()
        into[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _step(self, limit: int) -> bytes | memoryview:
        """Decompress once, with new input if the member needs it; return at most ``limit`` bytes."""
        data = self._input[:0]
        if self._member.needs_input:
            # ISA-L misreads a gzip header with several fields when it is split: the first input of a member
            # must hold all of it. A header longer than _STEP is reported as corrupt.
            if not self._fill(_STEP):
                raise self._truncated()
            data = self._input[self._at : min(self._at + _STEP, self._end)]
            self._at += len(data)
        try:
            plain: bytes | memoryview = self._member.decompress(data, max_length=limit)
        except self._kind.error as err:
            # The libraries have no error code for an exceeded memory limit, only a message.
            if "memory" in str(err).lower():
                needs = f"the {self._kind.name} stream needs a window (dictionary) of more than"
                reason = f"{needs} {1 << _WINDOW_LOG >> 20} MiB; compress it with a smaller one"
                raise errors.Unsupported(reason=reason) from err
            reason = f"{err} (before byte {self._taken})"
            raise errors.Corrupt(format=self._kind.name, reason=reason) from err
        if self._member.eof:
            self._at -= len(self._member.unused_data)
        return plain

    def _truncated(self) -> errors.Truncated:
        return errors.Truncated(format=self._kind.name, reason=f"the stream ends at byte {self._taken}")

    def _fill(self, count: int) -> int:
        """Read until ``count`` bytes are buffered or the input ends; return the number of bytes buffered."""
        held = self._end - self._at
        if held < count:
            self._input[:held] = bytes(self._input[self._at : self._end])
            self._at, self._end = 0, held
        while self._end - self._at < count and (got := self._reader.readinto(self._input[self._end :])):
            self._end += got
            self._taken += got
        self._check_fruitful()
        return self._end - self._at

    def _check_fruitful(self) -> None:
        if self._taken - self._fruitful > _FRUITLESS or self._fruitless_members > _FRUITLESS_MEMBERS:
            reason = f"more than {_FRUITLESS >> 20} MiB or {_FRUITLESS_MEMBERS} members in a row are empty"
            raise errors.Refused(format=self._kind.name, rule="no content", reason=reason)

    def _at_end(self) -> bool:
        """Return whether the file ends here. Raise ``errors.TrailingGarbage`` if no member follows."""
        padding = 0
        while self._kind.padding and self._fill(1):
            held = bytes(self._input[self._at : self._end])
            zeros = len(held) - len(held.lstrip(b"\0"))
            self._at += zeros
            padding += zeros
            if zeros < len(held):
                break
        here = self._taken - (self._end - self._at)
        if padding and padding % self._kind.padding:
            raise errors.TrailingGarbage(format=self._kind.name, offset=here - padding)
        if not self._fill(1):
            return True
        more = self._kind.magic.match(self.peek(8))
        if not more or (padding and not self._kind.resumes):
            raise errors.TrailingGarbage(format=self._kind.name, offset=here)
        return False
