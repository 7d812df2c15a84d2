"""An open disk image: the facts that its source states, and its bytes.

A source serves raw reads. ``Image`` adds what all sources need: retries, parallel ranges that are compared
with each other, the bytes that were read before, and the fallback from ranges to one stream.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from cdi_worker import errors
from cdi_worker.formats import readers, remembered, views
from cdi_worker.images.engine import cancelling, fetch, seams
from cdi_worker.images.engine.pace import Pace

if TYPE_CHECKING:
    from cdi_worker.formats import clone, signature
    from cdi_worker.images.disks.base import Advance, Run
    from cdi_worker.images.extents import Extent

#: Yields reusable buffers of the given size in bytes.
Buffers: TypeAlias = Callable[[int], Iterator[memoryview]]


class Wire(NamedTuple):
    """What is transferred for an image where that is not its bytes: a package, or something compressed.

    ``size``: in bytes; None: unknown. ``ordered``: returns a reader of all bytes of the image that retries by
    itself, and reports what is transferred; None: ``stream`` is read.
    """

    size: int | None
    ordered: Callable[[cancelling.Cancel, Advance], readers.Reader] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Facts:
    """What a source states of its bytes when it is opened. The defaults: it states nothing.

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
    #: The demanded signatures, verified before any byte of the disk is read.
    signatures: tuple[signature.Signature, ...] = ()
    #: Why the source cannot be imported although it can be examined: a choice among several disks is missing.
    obstacle: errors.Error | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Provenance:
    """What a source knows of its image only when the disk is on storage.

    ``labels``: the ``kubevirt.io`` labels of the image. ``info``: the server's details for the termination
    message (``vddkInfo``). ``verified``: digests, ``ALGORITHM:HEX``, of the documents and blobs that hold the
    disk, by name; all of them were right.
    """

    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    info: Mapping[str, str] = dataclasses.field(default_factory=dict)
    verified: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Held(NamedTuple):
    """A disk of a source that holds several. ``names``: each chooses it, beside its number, from 1 on.

    ``file``: the name of a file for it. ``size``: of the disk in bytes, None: unknown. ``obstacle``: why it
    cannot be imported; empty: it can.
    ``make``: returns its ``sources.base.Source``, whose reads the given cancel ends. Its ``verify`` and
    ``finish`` are also those of the whole, unless it is ``together`` with others.
    """

    names: tuple[str, ...]
    file: str
    size: int | None
    make: Callable[[bool, cancelling.Cancel], Any]
    obstacle: str = ""


class Readable:
    """A source that is open: how its image can be read. The defaults: in order, as served.

    A property without a body is None: a way to read that the source does not have. A source that always has
    it may define a method. They do not change while the source is open.
    """

    #: The address without secrets, for messages before the source is open.
    name: str = ""
    #: Most bytes that one read of ``ranges`` returns. None: no limit.
    longest_read: int | None = None
    #: Bytes per second below which an ordered stream counts as silent; None: as the request says.
    min_speed: float | None = None
    #: The measured answers of the server, if the source knows them already.
    pace: Pace | None = None
    #: The files of a chain, the oldest first.
    files: tuple[Image, ...] = ()
    #: The disks of a source that holds several, and no bytes of its own.
    disks: tuple[Held, ...] = ()

    @property
    def ranges(self) -> readers.RandomReader | None:
        """Random access: by default, the source itself if it has ``read_range``."""
        return self if isinstance(self, readers.RandomReader) else None

    @property
    def extents(self) -> Callable[[], Iterator[Extent]] | None:
        """Yields the extents of the disk that ``ranges`` reads, in order."""

    @property
    def wire(self) -> Wire | None:
        """What is transferred, if it is not the bytes of the image."""

    @property
    def unwrap(self) -> Callable[[readers.Reader], readers.Reader] | None:
        """Removes the protocol's framing from what ``stream`` returns. Closing the result closes that."""

    @property
    def runs(self) -> Callable[[readers.Reader, Buffers], Iterable[Run]] | None:
        """Decodes ``stream`` into the runs of the disk, in order."""

    @property
    def folder(self) -> Callable[[readers.Reader, Buffers], clone.FolderDecoder] | None:
        """Decodes ``stream`` into disk and other files of a file system."""

    @property
    def keep(self) -> Callable[[int, int], None] | None:
        """Tells the sender, before ``runs``, from which offset to which the disk need not be sent."""

    def stream(self, offset: int = 0) -> readers.Reader:
        """Return a reader of the bytes as served, in order, from ``offset``.

        Raises ``errors.NoRanges`` if the source cannot start at ``offset``.
        """
        raise errors.SourceError(reason=f"{self.name}: cannot be read as an ordered stream")

    def first_sector(self) -> bytes:
        """Read the first sector again, from storage; empty if the source cannot be on the target or fails."""
        return b""

    def names(self, checkpoint: str) -> frozenset[str]:
        """Return all names of a checkpoint of the request."""
        return frozenset({checkpoint})

    def describe(self) -> Mapping[str, object]:
        """Return details of this kind of source for ``inspect``."""
        return {}

    def verify(self) -> None:
        """Verify digests at the end of the transfer. Called before the disk becomes usable."""

    def finish(self) -> Provenance:
        """Notify the server that the disk is on storage. Called after success only."""
        return Provenance()

    def close(self) -> None:
        """Release connections, tickets and sessions. Safe to call twice, and if ``open`` has failed."""


class Engine:
    """The options and the state that all images of one import share.

    ``retried`` is called with each failure that is retried. If the byte ranges of one image are wrong, all
    images are read in order from then on.
    """

    def __init__(
        self,
        options: fetch.FetchOptions | None = None,
        retried: Callable[[errors.Transient], None] = lambda _: None,
    ) -> None:
        self.options = options or fetch.FetchOptions()
        self.retried = retried
        #: Why ranges are no longer used; empty: they are.
        self.given_up = ""
        self.used = False

    def do_without_ranges(self, failure: errors.NoRanges) -> None:
        """Read in order from now on. Raises ``failure`` if ranges were not used."""
        if self.given_up or not self.used:
            raise failure
        self.given_up = str(failure.fields["reason"])


class Image:
    """The bytes of an open source, as served, and its facts.

    The ``cancel`` of a read is that of an attempt: a failure sets it, which ends the attempt's other reads.
    """

    def __init__(self, source: Readable, facts: Facts, engine: Engine) -> None:
        self.source = source
        self.facts = facts
        self.engine = engine
        #: The bytes that detection and checks have read by ranges, and the head. An import gets the same.
        self.known = remembered.Remembered(facts.head)
        self._files = tuple(each.anew() for each in source.files)
        self._seams: seams.Seams | None = None
        #: A stream that is already open, at its first byte: the result of the next ``ordered``.
        self._begun: tuple[readers.Peek, Arrivals] | None = None

    def anew(self) -> Image:
        """Return the same image, of which no bytes are known but its head."""
        return Image(self.source, self.facts, self.engine)

    @property
    def files(self) -> tuple[Image, ...]:
        """The files of a chain, the oldest first; this one only, if it is not a chain."""
        return self._files or (self,)

    @property
    def transferred(self) -> int | None:
        """Bytes that are transferred for the whole image; None: unknown."""
        wire = self.source.wire
        return self.facts.size if wire is None else wire.size

    @property
    def seeks(self) -> bool:
        """Whether it is read by ranges."""
        is_possible = self.source.ranges is not None and self.facts.size is not None
        return is_possible and not self.engine.given_up

    def fetcher(self, cancel: cancelling.Cancel, advance: Advance = lambda _: None) -> fetch.Fetcher:
        """Return a fetcher, which reads ranges in parallel. ``advance`` gets the bytes that arrive."""
        reader, facts, options = self.source.ranges, self.facts, self.engine.options
        if reader is None or not self.seeks:
            raise errors.NoRanges(url=facts.name, reason="not offered by the source")
        self.engine.used = True
        size = facts.size or 0
        if isinstance(reader, readers.RequestReader):
            # The ranges of a server are compared with each other.
            self._seams = self._seams or seams.Seams(
                reader,
                size,
                name=facts.name,
                head=facts.head,
                known=self.known,
                pace=self.source.pace or Pace(),
            )
            reader = self._seams
        # A source that limits the length of a read gets more connections.
        parts = max(1, options.chunk // (self.source.longest_read or options.chunk))
        return fetch.Fetcher(
            reader,
            size,
            dataclasses.replace(
                options,
                chunk=options.chunk // parts,
                connections=options.connections * parts,
                window=options.window * parts,
            ),
            name=facts.name,
            scope=cancel,
            known=self.known,
            advance=advance,
            retried=self.engine.retried,
        )

    def at_random(self, cancel: cancelling.Cancel) -> views.Read | None:
        """Return a function that reads ``(offset, length)``; None if the image is read in order."""
        return self.fetcher(cancel).read if self.seeks and self.facts.size else None

    def checked(self, cancel: cancelling.Cancel) -> views.Read | None:
        """Return ``at_random`` for checks: the import gets the same bytes, from memory."""
        read = self.at_random(cancel)
        return None if read is None else self.known.remembering(read)

    def head(self, length: int, cancel: cancelling.Cancel, read: views.Read | None) -> bytes:
        """Return the first ``length`` bytes, all of a shorter image. ``read``: see ``checked``.

        The bytes read from a stream are also the first of the next ``ordered``.
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
        wire = self.source.wire
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
        # Imported when used: it loads isal, which a source with ranges does not need.
        from cdi_worker.images.engine import resume

        min_speed = engine.options.min_speed if self.source.min_speed is None else self.source.min_speed
        return resume.Resuming(
            self._open_at,
            facts.size,
            name=facts.name,
            no_progress=engine.options.no_progress,
            min_speed=min_speed,
            cancel=cancel,
            delivered=facts.head[:start],
            advance=advance,
            retried=engine.retried,
        )

    def verify(self) -> None:
        """Verify digests at the end of the transfer. Called before the disk becomes usable."""
        self.source.verify()

    def finish(self) -> Provenance:
        """Notify the server that the disk is on storage; return what is known only then."""
        return self.source.finish()

    def _open_at(self, offset: int) -> readers.Reader:
        """Open the stream at an offset: only at 0 if the ranges were wrong."""
        failed = self.engine.given_up
        if offset and failed and self.source.ranges is not None:
            reason = f"cannot continue at an offset, since byte ranges failed: {failed}"
            raise errors.NoRanges(url=self.facts.name, reason=reason)
        return self.source.stream(offset)


class Arrivals:
    """Counts the bytes that arrive, also before there is a callback for them. Thread-safe."""

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


class _Once(readers.Wrapper):
    """Reader of a source that can be read only once; counts the bytes and verifies the declared size."""

    def __init__(self, reader: readers.Reader, facts: Facts, start: int, count: Advance) -> None:
        super().__init__(reader)
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
