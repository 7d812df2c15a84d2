"""An open disk image, and the engine that reads all images of one import.

A source serves raw reads and states facts. What every source needs is here: retries, parallel ranges that are
compared with each other, the bytes that are known already, and the way back from ranges to one stream.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from cdi_worker import errors, lazy
from cdi_worker.formats import readers, remembered, views
from cdi_worker.images.engine import cancelling, fetch, seams
from cdi_worker.images.engine.pace import Pace

if TYPE_CHECKING:
    from cdi_worker.formats import clone, signature
    from cdi_worker.images.extents import Extent

#: Sources with ranges do not need it (start-up time).
_RESUMING = "cdi_worker.images.engine.resume:Resuming"

#: A run of a disk: the length of a hole in bytes, or data.
Run: TypeAlias = "int | memoryview | clone.Kept"
#: Returns reusable buffers of the given size in bytes.
Buffers: TypeAlias = Callable[[int], Iterator[memoryview]]
#: Is called with numbers of bytes that have arrived.
Advance: TypeAlias = Callable[[int], None]


class Served(Protocol):
    """The raw reads of a source that is open; see ``sources.base.Source``."""

    def stream(self, offset: int = 0, /) -> readers.Reader: ...
    def verify(self) -> None: ...
    def finish(self, facts: Facts, /) -> Facts: ...


class Wire(NamedTuple):
    """What is transferred for an image where that is not its bytes: a package, or something compressed.

    ``size``: in bytes; None: unknown. ``ordered``: returns a reader of all bytes of the image that retries by
    itself, and reports what is transferred; None: ``stream`` is read.
    """

    size: int | None
    ordered: Callable[[cancelling.Cancel, Advance], readers.Reader] | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Facts:
    """What a source states of an image when it is open. The defaults: it states and supports nothing.

    ``name``: the address without secrets, for logs and messages.
    """

    name: str
    #: Size in bytes as served; None if the server does not send it.
    size: int | None = None
    #: The bytes of the first response (the whole image if it is small).
    head: bytes = dataclasses.field(default=b"", repr=False)
    #: ETag, digest or generation. None: unknown, and an import is not resumed after a kill.
    identity: str | None = None
    #: Whether equal identities do not prove equal bytes (a date, a weak ETag): a resumed import then fetches
    #: a sample again, and starts over if it differs.
    weak: bool = False
    #: ``ALGORITHM:HEX`` of the bytes as served, as stated by the server; empty: unknown.
    checksum: str = ""
    #: ``KIND:VALUE`` without blanks, for callers that watch the source; it changes whenever the bytes change;
    #: empty: unknown.
    digest: str = ""
    #: Format as stated by the protocol (a name of ``formats.detect``); a guest cannot forge it by writing
    #: to its disk. None: detected from the first bytes.
    format: str | None = None
    #: Size in bytes of the disk, if the protocol states it apart from the bytes, which must agree.
    disk_size: int | None = None
    #: Size in bytes of the disk at the previous checkpoint of a delta, where the protocol knows it.
    previous_size: int | None = None
    #: Whether ``stream`` can be read only once.
    once: bool = False
    #: Whether it is a thin volume, which may be larger than a file system that has room for its data.
    thin: bool = False
    #: Whether the disk is blank: no bytes to read, the size comes from the request.
    blank: bool = False
    #: The verified signatures.
    signatures: tuple[signature.Signature, ...] = ()
    #: Digests, ``ALGORITHM:HEX``, of the documents and blobs that the disk is in, by name. The transfer ends
    #: without error only if they are right.
    verified: Mapping[str, str] = dataclasses.field(default_factory=dict)
    #: Why the source cannot be imported although it can be examined: a choice among several disks is missing.
    obstacle: errors.Error | None = None
    #: All names of checkpoints that have several, by the one that the request has for it.
    checkpoints: Mapping[str, frozenset[str]] = dataclasses.field(default_factory=dict)
    #: The ``kubevirt.io`` labels of the image.
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    #: The server's details for the termination message (``vddkInfo``).
    info: Mapping[str, str] = dataclasses.field(default_factory=dict)
    #: Details of this kind of source for ``inspect``.
    description: Mapping[str, object] = dataclasses.field(default_factory=dict)

    # -- how it can be read; None: it cannot

    #: Random access. None: the source can only be read in order.
    ranges: readers.RandomReader | None = None
    #: Largest number of bytes that one read of ``ranges`` returns. None: no limit.
    longest_read: int | None = None
    #: The measured answers of the server.
    pace: Pace = dataclasses.field(default_factory=Pace)
    #: Returns the extents of the virtual disk that ``ranges`` reads, in order.
    extents: Callable[[], Iterator[Extent]] | None = None
    #: None: the bytes of the image are what is transferred.
    wire: Wire | None = None
    #: Removes the protocol's framing from what ``stream`` returns. Closing the result closes that.
    unwrap: Callable[[readers.Reader], readers.Reader] | None = None
    #: Decodes ``stream`` into the runs of the disk, in order.
    runs: Callable[[readers.Reader, Buffers], Iterable[Run]] | None = None
    #: Decodes ``stream`` into disk and other files of a file system.
    folder: Callable[[readers.Reader, Buffers], clone.Folder] | None = None
    #: Called before ``runs`` with the part of the disk, from one offset to another, that need not be sent.
    keep: Callable[[int, int], None] | None = None
    #: The files of a chain, the oldest first.
    files: tuple[Image, ...] = ()

    @property
    def transferred(self) -> int | None:
        """Bytes that are transferred for the whole image; None: unknown."""
        return self.size if self.wire is None else self.wire.size

    def names(self, checkpoint: str) -> frozenset[str]:
        """Return all names of a checkpoint of the request."""
        return self.checkpoints.get(checkpoint, frozenset({checkpoint}))


class Engine:
    """Reads the images of one import. ``retried`` is called with each failure that is retried.

    They share the fate of byte ranges: if those of one are wrong, all are read in order from then on.
    """

    def __init__(
        self,
        options: fetch.Options | None = None,
        retried: Callable[[errors.Transient], None] = lambda _: None,
    ) -> None:
        self.options = options or fetch.Options()
        self.retried = retried
        #: Why ranges are not used any more; empty: they are.
        self.given_up = ""
        self.used = False
        #: Whether the first bytes were wrong, and have been fetched again.
        self.renewed = False

    def do_without_ranges(self, failure: errors.NoRanges) -> None:
        """Read in order from now on. Raises ``failure`` if ranges were not used."""
        if self.given_up or not self.used:
            raise failure
        self.given_up = str(failure.fields["reason"])


class Image:
    """The bytes of a source that is open, as served, and its facts.

    The ``cancel`` of a read is that of an attempt: a failure sets it, which ends the other reads of it.
    """

    def __init__(self, source: Served, facts: Facts, engine: Engine) -> None:
        self.source = source
        self.facts = facts
        self.engine = engine
        #: The bytes of ranges that detection and checks have read, from the head on. An import gets the same.
        self.known = remembered.Remembered(facts.head)
        self._seams: seams.Seams | None = None
        #: A stream that is open already, from its first byte: the result of the next ``ordered``.
        self._begun: tuple[readers.Peek, Arrivals] | None = None

    def anew(self) -> Image:
        """Return the same image, with nothing known of it but its head."""
        files = tuple(file.anew() for file in self.facts.files)
        return Image(self.source, dataclasses.replace(self.facts, files=files), self.engine)

    def renewed(self, cancel: cancelling.Cancel) -> Image:
        """Return the same image with first bytes that are fetched again."""
        without, length = dataclasses.replace(self.facts, head=b""), len(self.facts.head)
        image = Image(self.source, without, self.engine)
        if (read := image.at_random(cancel)) is not None:
            head = read(0, length)
        else:
            with contextlib.closing(image.ordered(cancel)) as reader:
                head = readers.Peek(reader, length).head
        return Image(self.source, dataclasses.replace(self.facts, head=head), self.engine)

    @property
    def files(self) -> tuple[Image, ...]:
        """The files of a chain, the oldest first; this one only, if it is not a chain."""
        return self.facts.files or (self,)

    @property
    def seeks(self) -> bool:
        """Whether it is read by ranges."""
        return not self.engine.given_up and self.facts.ranges is not None and self.facts.size is not None

    def fetcher(
        self, cancel: cancelling.Cancel, advance: Advance = lambda _: None, *, verified: bool = False
    ) -> fetch.Fetcher:
        """Return a fetcher, which reads ranges in parallel. ``advance`` gets the bytes that arrive.

        ``verified``: the caller has checksums of all that it reads, and fetches again what is wrong.
        """
        if not self.seeks:
            raise errors.NoRanges(url=self.facts.name, reason="not offered by the source")
        self.engine.used = True
        reader = self._reader()
        if self._seams is not None:
            self._seams.compares = not verified
        return fetch.Fetcher(
            reader,
            self.facts.size or 0,
            self._tuned(),
            name=self.facts.name,
            scope=cancel,
            known=self.known,
            advance=advance,
            retried=self.engine.retried,
        )

    def at_random(self, cancel: cancelling.Cancel) -> views.Read | None:
        """Return a function that reads ``(offset, length)``; None if the image is read in order."""
        return self.fetcher(cancel).read if self.seeks and self.facts.size else None

    def checked(self, cancel: cancelling.Cancel) -> views.Read | None:
        """Return ``at_random`` for checks: what it reads is what the import gets, too."""
        read = self.at_random(cancel)
        return None if read is None else self.known.remembering(read)

    def head(self, length: int, cancel: cancelling.Cancel, read: views.Read | None) -> bytes:
        """Return the first ``length`` bytes, all of a shorter image. ``read``: see ``checked``.

        What is read of a stream is the beginning of the next ``ordered``.
        """
        head = self.facts.head
        if read is not None:
            return head + read(len(head), max(0, min(length, self.facts.size or 0) - len(head)))
        if self._begun is None:
            arrivals = Arrivals()
            self._begun = readers.Peek(self.ordered(cancel, arrivals.add), length), arrivals
        else:
            self._begun[0].extend(length)
        return self._begun[0].head

    def ordered(self, cancel: cancelling.Cancel, advance: Advance = lambda _: None) -> readers.Reader:
        """Return a reader of all bytes, in order. ``advance`` gets the bytes received."""
        if self._begun is not None:
            (begun, arrivals), self._begun = self._begun, None
            arrivals.report(advance)
            return begun
        wire = self.facts.wire
        if wire is not None and wire.ordered is not None:
            return wire.ordered(cancel, advance)
        return self.rest(cancel, 0, advance)

    def rest(
        self, cancel: cancelling.Cancel, start: int, advance: Advance = lambda _: None
    ) -> readers.Reader:
        """Return a reader of the bytes that the source streams, from ``start``, at most the end of its head.

        Ranges are fetched in parallel if the source supports them.
        """
        facts, engine = self.facts, self.engine
        if self.seeks:
            return self.fetcher(cancel, advance).stream(start)
        if facts.once:
            return _Once(self.source.stream(start), facts, start, advance)
        resuming = lazy.load(_RESUMING)
        reader: readers.Reader = resuming(
            self._open_at,
            facts.size,
            name=facts.name,
            no_progress=engine.options.no_progress,
            slowest=engine.options.slowest,
            cancel=cancel,
            delivered=facts.head[:start],
            advance=advance,
            retried=engine.retried,
        )
        return reader

    def verify(self) -> None:
        """Verify digests at the end of the transfer. Called before the disk becomes usable."""
        self.source.verify()

    def finish(self) -> Facts:
        """Notify the server that the disk is on storage; return what is known at the end."""
        return self.source.finish(self.facts)

    def _open_at(self, offset: int) -> readers.Reader:
        """Open the stream at an offset: only at 0 if the ranges were not right."""
        failed = self.engine.given_up
        if offset and failed and self.facts.ranges is not None:
            reason = f"cannot continue at an offset, since byte ranges failed: {failed}"
            raise errors.NoRanges(url=self.facts.name, reason=reason)
        return self.source.stream(offset)

    def _reader(self) -> readers.RandomReader:
        """Return a reader that compares the ranges of a server with each other."""
        ranges = self.facts.ranges
        if ranges is None:
            raise errors.NoRanges(url=self.facts.name, reason="not offered by the source")
        if not isinstance(ranges, readers.Continuing):
            return ranges
        if self._seams is None:
            self._seams = seams.Seams(
                ranges,
                self.facts.size or 0,
                name=self.facts.name,
                head=self.facts.head,
                known=self.known,
                pace=self.facts.pace,
            )
        return self._seams

    def _tuned(self) -> fetch.Options:
        """Return the fetch options; a source that limits the length of a read gets more connections."""
        asked = self.engine.options
        parts = max(1, asked.chunk // (self.facts.longest_read or asked.chunk))
        return dataclasses.replace(
            asked,
            chunk=asked.chunk // parts,
            connections=asked.connections * parts,
            window=asked.window * parts,
        )


class Arrivals:
    """Counts the bytes that arrive, also before it is known who wants to know. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._before = 0
        self._advance: Advance | None = None

    def add(self, count: int) -> None:
        """Count bytes that have arrived."""
        with self._lock:
            advance = self._advance
            if advance is None:
                self._before += count
        if advance is not None:
            advance(count)

    def report(self, advance: Advance) -> None:
        """Call ``advance`` with the bytes so far, and from now on with those that arrive."""
        with self._lock:
            before, self._before, self._advance = self._before, 0, advance
        advance(before)


class _Once:
    """Reader of a source that can be read only once; counts the bytes and verifies the declared size."""

    def __init__(self, reader: readers.Reader, facts: Facts, start: int, count: Advance) -> None:
        self._reader = reader
        self._facts = facts
        self._count = count
        self._at = start

    def readinto(self, into: memoryview, /) -> int:
        count = self._reader.readinto(into)
        self._at += count
        self._count(count)
        size, name = self._facts.size, self._facts.name
        if size is not None and self._at > size:
            raise errors.SourceChanged(url=name, what="size", before=size, now=f"more than {size}")
        if not count and len(into) and self._at < (size or 0):
            reason = f"ended at byte {self._at} of {size}"
            raise errors.TransferFailed(url=name, offset=self._at, reason=reason)
        return count

    def close(self) -> None:
        self._reader.close()
