"""The bytes of an attempt's source in order, and decompressed."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from cdi_worker import errors
from cdi_worker.formats import checksum, detect, readers
from cdi_worker.formats.compressed import layers
from cdi_worker.images.disks import base as disks
from cdi_worker.images.engine import ahead, fetch
from cdi_worker.importer.attempt import Attempt
from cdi_worker.sources import base

if TYPE_CHECKING:
    from cdi_worker.formats import clone

#: Most bytes after the end of an image (snapshots, unused clusters) that are read to verify a checksum.
SHORTEST_LIMIT: Final = 256 << 20


def counted(attempt: Attempt, advance: disks.Advance) -> disks.Advance:
    """Return what counts bytes that arrive from the source, and passes them on to ``advance``."""

    def arrived(count: int) -> None:
        attempt.count(count)
        advance(count)

    return arrived


class ContinuedReader:
    """Read an image in order, by ranges: ``stored`` from the target, and the rest from the source."""

    def __init__(self, fetcher: fetch.Fetcher, stored: disks.Stored) -> None:
        self._fetcher = fetcher
        self._stored = stored
        self._at = 0
        #: What follows; opened when it is needed, so that no request waits until ``stored`` has been read.
        self._rest: fetch.OrderedStream | None = None

    def readinto(self, into: memoryview, /) -> int:
        start, end, read = self._stored
        if self._at >= end:
            self._rest = self._rest or self._fetcher.stream(end)
            return self._rest.readinto(into)
        if self._at < start:
            into = into[: start - self._at]
            self._fetcher.fill(self._at, into)
            count = len(into)
        else:
            data = read(self._at, min(len(into), end - self._at))
            count = len(data)
            into[:count] = data
        self._at += count
        return count

    def close(self) -> None:
        if self._rest is not None:
            self._rest.close()


@contextlib.contextmanager
def served(
    attempt: Attempt, advance: disks.Advance, *, whole: bool = True, stored: disks.Stored | None = None
) -> Iterator[base.Reader]:
    """Yield a reader of the bytes as served; when the block ends without error, verify the checksum.

    ``whole``: read the rest then, also without a checksum. ``stored``: see ``ContinuedReader``.
    """
    image, arrived = attempt.image, counted(attempt, advance)
    ordered: base.Reader
    if stored is None:
        ordered = image.ordered(attempt.scope, arrived)
    else:
        ordered = ContinuedReader(image.fetcher(attempt.scope, arrived), stored)
    is_packed = bool(attempt.survey.compressions) or attempt.request.is_archive
    # Ranges have threads of their own, and the copy reads an uncompressed disk in a thread.
    if is_packed and not image.seeks and image.source.folder is None:
        ordered = ahead.AheadReader(ordered, attempt.scope)
    with contextlib.closing(ordered) as reader:
        if not (expected := attempt.checksums):
            yield reader
            if whole:
                drain(attempt, reader)
            return
        hashing = checksum.HashingReader(reader, checksum.parse(expected))
        yield hashing
        _verify(attempt, hashing)


@contextlib.contextmanager
def plain(
    attempt: Attempt,
    advance: disks.Advance,
    *,
    limit: int | None = None,
    whole: bool = True,
    stored: disks.Stored | None = None,
) -> Iterator[base.Reader]:
    """Yield a reader of the decompressed bytes, at most ``limit``; when the block ends, read the rest.

    Without ``whole`` the rest is only read if it shows whether the bytes before it are right, as the end of a
    compressed stream does, that of a protocol and a checksum, or if the client of an upload must send it.
    """
    facts, unwrap = attempt.facts, attempt.image.source.unwrap
    is_packed = bool(attempt.survey.compressions)
    shows = attempt.demanded.checksum is not None or facts.once or is_packed or unwrap is not None
    whole = whole or shows
    with served(attempt, advance, whole=whole, stored=stored) as bytes_served:
        if facts.format is None:
            found, reader = layers.open(bytes_served, limit=limit)
            head = found.head
        else:
            peeked = readers.Peek(bytes_served, detect.HEAD)
            head, reader = peeked.head, unwrap(peeked) if unwrap else peeked
        with contextlib.closing(reader):
            checked = attempt.survey.head[: detect.HEAD]
            if not head.startswith(checked):
                before, now = (f"crc {zlib.crc32(data):08x}" for data in (checked, head[: len(checked)]))
                raise errors.SourceChanged(url=facts.name, what="beginning", before=before, now=now)
            yield reader
            if whole:
                # A protocol says where its bytes end.
                drain(attempt, reader, SHORTEST_LIMIT if unwrap else None)


@contextlib.contextmanager
def runs(attempt: Attempt, advance: disks.Advance) -> Iterator[Iterator[base.Run]]:
    """Yield the runs (data or zeros) of a stream that marks them. A run is valid until the next."""
    decode = attempt.image.source.runs
    if decode is None:
        raise errors.SourceError(reason=f"{attempt.facts.name}: the stream does not mark holes")
    with served(attempt, advance) as stream:
        yield iter(decode(stream, ahead.buffers))


@contextlib.contextmanager
def folder(attempt: Attempt) -> Iterator[clone.FolderDecoder | None]:
    """Yield the decoder of a file system's disk and other files; when the block ends, compare the digest.

    None for a source that sends one tar archive.
    """
    decode = attempt.image.source.folder
    if decode is None:
        yield None
        return
    with served(attempt, attempt.progress.advance) as stream:
        found = decode(stream, ahead.buffers)
        yield found
        found.finish()


def verify_again(attempt: Attempt) -> None:
    """Verify the checksum, if there is one, of a source whose bytes were read out of order."""
    if attempt.checksums and not attempt.counts.verified:
        attempt.progress.phase("verify", attempt.image.transferred)
        with served(attempt, attempt.progress.advance):
            pass


def drain(attempt: Attempt, reader: readers.Reader, most: int | None = None) -> None:
    """Read to the end and discard: readers check their data at the end.

    If its length is unknown, it may be endless: raises ``errors.Refused`` after more than ``most`` bytes, or
    what fits on the target.
    """
    is_bounded = attempt.facts.size is not None and not attempt.survey.compressions
    limit = max(attempt.survey.available if most is None else most, SHORTEST_LIMIT)
    rest = memoryview(bytearray(1 << 20))
    done = 0
    while count := reader.readinto(rest):
        attempt.scope.check()
        done += count
        if done > limit and not is_bounded:
            reason = f"more than {limit} bytes follow the end of the image"
            raise errors.Refused(format="stream", rule="endless", reason=reason)


def _verify(attempt: Attempt, hashing: checksum.HashingReader) -> None:
    drain(attempt, hashing)
    hashing.verify()
    attempt.counts.verified = True
