"""Compressed bytes in, plain bytes out: gz, xz, zst and bz2, each with all its members.

Input and output of one step are bounded, so that memory is bounded by the constants below whatever
the input says. What follows the last member is an error, but for the padding that the format's own
tool passes over in silence.
"""

from __future__ import annotations

import bz2
import dataclasses
import functools
import lzma
import re
import sys
from collections.abc import Callable
from typing import Protocol, cast

from isal import igzip_lib

from cdi_worker import errors
from cdi_worker.formats import readers

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

#: Bytes asked of the reader at once, fed to the decompressor at once, and taken from it at once.
#: Feeding less than is read keeps files of many small members (bgzip) from copying it all per member.
_INPUT = 1 << 20
_STEP = 1 << 17
_OUTPUT = 1 << 20

#: xz -9 and zstd --ultra -22 need this much; what needs more (zstd --long=28) is refused.
_WINDOW_LOG = 27
_MEMORY = (1 << _WINDOW_LOG) + (8 << 20)

Tool = Callable[[readers.Reader], readers.Reader]


class _Decompressor(Protocol):
    """One member's decompressor, as the standard library shapes them."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: memoryview | bytes, /, max_length: int) -> bytes: ...


@dataclasses.dataclass(frozen=True, slots=True)
class _Kind:
    """How one format is read.

    ``magic`` begins every member. Zero bytes may follow a member in multiples of ``padding`` (0: none
    may), and another member them only if it ``resumes``.
    """

    name: str
    magic: re.Pattern[bytes]
    start: Callable[[], _Decompressor]
    error: type[Exception]
    padding: int = 0
    resumes: bool = False


_KINDS = {
    kind.name: kind
    for kind in (
        # gzip(1) passes zeros at the end (tape blocks) in silence, and calls all else garbage.
        _Kind(
            name="gz",
            magic=re.compile(rb"\x1f\x8b\x08"),
            start=functools.partial(igzip_lib.IgzipDecompressor, flag=igzip_lib.DECOMP_GZIP),
            error=cast("type[Exception]", igzip_lib.IsalError),
            padding=1,
        ),
        # Stream padding: xz-file-format.txt, section 2.2.
        _Kind(
            name="xz",
            magic=re.compile(rb"\xfd7zXZ\x00"),
            start=functools.partial(lzma.LZMADecompressor, format=lzma.FORMAT_XZ, memlimit=_MEMORY),
            error=lzma.LZMAError,
            padding=4,
            resumes=True,
        ),
        # Frames and skippable frames: RFC 8878, sections 3.1.1 and 3.1.2.
        _Kind(
            name="zst",
            magic=re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),
            start=functools.partial(
                zstd.ZstdDecompressor, options={zstd.DecompressionParameter.window_log_max: _WINDOW_LOG}
            ),
            error=zstd.ZstdError,
        ),
        _Kind(
            name="bz2",
            magic=re.compile(rb"BZh[1-9]"),
            start=bz2.BZ2Decompressor,
            error=OSError,
        ),
    )
}


def open(  # noqa: A001 - read as decompress.open
    kind: str, reader: readers.Reader, *, limit: int | None = None, tool: Tool | None = None
) -> readers.Reader:
    """Return a reader of what ``reader`` holds compressed as ``kind`` (gz, xz, zst, bz2).

    ``limit``: more plain bytes than this raise ``errors.TooLarge``. ``tool``: reads xz in several
    threads; taken when the stream has more than one block, and then answers for its end itself.

    The reader raises ``errors.Corrupt``, ``errors.Truncated``, ``errors.TrailingGarbage``, and
    ``errors.Unsupported`` for a window beyond 128 MiB.
    """
    if kind == "xz" and tool is not None:
        reader = head = readers.Peek(reader, 64)
        plain = tool(head) if is_multi_block(head.head) else Members(_KINDS[kind], head)
    else:
        plain = Members(_KINDS[kind], reader)
    return plain if limit is None else readers.Limited(plain, limit)


class Members:
    """Reads the members of a compressed file one after the other as one stream."""

    def __init__(self, kind: _Kind, reader: readers.Reader) -> None:
        self._kind = kind
        self._reader = reader
        self._member = kind.start()
        self._input = memoryview(bytearray(_INPUT))
        self._at = 0
        self._end = 0
        self._taken = 0

    def readinto(self, into: memoryview, /) -> int:
        limit = min(len(into), _OUTPUT)
        while True:
            if self._member.eof:
                if self._at_end():
                    return 0
                self._member = self._kind.start()
            if plain := self._step(limit):
                into[: len(plain)] = plain
                return len(plain)

    def close(self) -> None:
        self._reader.close()

    def _step(self, limit: int) -> bytes:
        """Feed the member once, if it wants; return what came out, at most ``limit`` bytes."""
        data = self._feed() if self._member.needs_input else self._input[:0]
        try:
            plain = self._member.decompress(data, max_length=limit)
        except self._kind.error as err:
            raise self._translate(err) from err
        if self._member.eof:
            self._at -= len(self._member.unused_data)
        return plain

    def _feed(self) -> memoryview:
        # ISA-L misreads a gzip header with several fields that comes in pieces: a member's first feed holds
        # it whole. A header beyond _STEP ends as corrupt.
        if not self._fill(_STEP):
            raise errors.Truncated(format=self._kind.name, reason=f"ends at byte {self._taken}")
        start = self._at
        self._at = min(start + _STEP, self._end)
        return self._input[start : self._at]

    def _fill(self, count: int) -> int:
        """Have ``count`` bytes of input at hand, or as many as there are; return their number."""
        held = self._end - self._at
        if held < count:
            self._input[:held] = bytes(self._input[self._at : self._end])
            self._at, self._end = 0, held
        while self._end - self._at < count and (got := self._reader.readinto(self._input[self._end :])):
            self._end += got
            self._taken += got
        return self._end - self._at

    def _at_end(self) -> bool:
        """Tell whether the file ends here; what follows instead must be another member."""
        padding = self._skip_zeros() if self._kind.padding else 0
        here = self._taken - (self._end - self._at)
        if padding and padding % self._kind.padding:
            raise errors.TrailingGarbage(format=self._kind.name, offset=here - padding)
        if not self._fill(1):
            return True
        self._fill(8)
        more = self._kind.magic.match(self._input[self._at : self._end])
        if not more or (padding and not self._kind.resumes):
            raise errors.TrailingGarbage(format=self._kind.name, offset=here)
        return False

    def _skip_zeros(self) -> int:
        skipped = 0
        while self._fill(1):
            held = bytes(self._input[self._at : self._end])
            zeros = len(held) - len(held.lstrip(b"\0"))
            self._at += zeros
            skipped += zeros
            if zeros < len(held):
                break
        return skipped

    def _translate(self, err: Exception) -> errors.Error:
        # The libraries tell an exceeded memory limit by their words alone.
        if "memory" in str(err).lower():
            reason = f"the {self._kind.name} stream needs a window of more than {1 << _WINDOW_LOG} bytes"
            return errors.Unsupported(reason=reason)
        return errors.Corrupt(format=self._kind.name, reason=f"{err} (before byte {self._taken})")


_MAGIC = b"\xfd7zXZ\x00"
_BLOCK_FLAGS = 12 + 1  # after the stream header and the size of the block's own
_HAS_COMPRESSED_SIZE = 0x40


def is_multi_block(head: bytes) -> bool:
    """Tell whether threads can share the stream that ``head``, its first 64 bytes or all, begins.

    Only the threaded encoder writes sizes into block headers, and only with them a decoder finds the
    next block early.
    """
    if not head.startswith(_MAGIC) or len(head) <= _BLOCK_FLAGS:
        return False
    # A size of 0 is no block but the index, of a stream without blocks.
    return head[_BLOCK_FLAGS - 1] != 0 and bool(head[_BLOCK_FLAGS] & _HAS_COMPRESSED_SIZE)
