"""A running import: opens the readers, the target and the journal for its route."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from cdi_worker import engine, errors, plan, progress, request
from cdi_worker.formats import checksum, detect, readers
from cdi_worker.formats.compressed import layers
from cdi_worker.images import target
from cdi_worker.images.engine import ahead, cancelling, fetch
from cdi_worker.images.target import copy
from cdi_worker.scratch import journal
from cdi_worker.sources import base

log = logging.getLogger(__name__)

#: Bytes after the end of an image that are read in any case to verify a checksum: snapshots, unused clusters.
SHORTEST_LIMIT = 256 << 20


@dataclasses.dataclass
class Job:
    """A running import.

    ``claim``: the target's. ``engine``: reads the source. ``limit``: bytes of the largest disk that fits.
    ``accepted``: called once, when all bytes have been received, verified, and found to be safe and to fit.

    Outcome, in bytes: ``read`` from the source, ``size`` of the disk, ``resumed`` from an earlier attempt.
    """

    wanted: request.Request
    claim: target.Claim
    source: base.Source
    engine: engine.Engine
    content: plan.Content
    plan: plan.Plan
    limit: int
    progress: progress.Progress
    reads: cancelling.Reads
    scope: cancelling.Cancel = cancelling.NEVER
    accepted: Callable[[], object] = lambda: None
    read: int = 0
    size: int = 0
    resumed: int = 0
    _is_accepted: bool = False
    _counting: threading.Lock = dataclasses.field(default_factory=threading.Lock, repr=False)

    @contextlib.contextmanager
    def attempt(self) -> Iterator[cancelling.Cancel]:
        """Run the block with a new ``scope``: its failure ends the reads of this attempt only."""
        around = self.scope
        try:
            with self.reads.scope() as scope:
                self.scope = scope
                yield scope
        finally:
            self.scope = around

    def accept(self) -> None:
        """Call ``accepted``, once: only processing is left, so an ``-async`` upload may be answered."""
        if not self._is_accepted:
            self._is_accepted = True
            self.accepted()

    def arrived(self, count: int) -> None:
        """Count bytes read from the source that are also progress of the phase."""
        self.count(count)
        self.progress.advance(count)

    def unpacked(self, count: int) -> None:
        """Count bytes of an archive's files. Raises ``TargetLost`` if another run unpacks here now."""
        self.claim.guard()
        self.size += count

    def count(self, count: int) -> None:
        """Count bytes read from the source where progress counts other bytes. Thread-safe."""
        with self._counting:
            self.read += count
        self.progress.read(count)

    def fetcher(self, advance: Callable[[int], None]) -> fetch.Fetcher:
        """Return a fetcher, which reads the source's ranges in parallel."""
        return self.engine.fetcher(self.source, self.scope, advance)

    def open_target(self, size: int | None) -> target.Target:
        """Open the target for a new disk of ``size`` bytes, None if unknown; nothing is resumed."""
        return target.open(self.wanted.target, size, self.options)

    @contextlib.contextmanager
    def resumable(
        self, path: str, size: int, total: int, options: target.Options
    ) -> Iterator[tuple[target.Target, journal.Journal]]:
        """Open ``path`` for ``size`` bytes, and the journal of the ranges an earlier attempt wrote there.

        ``total``: bytes that the journal covers, of the source or of the disk. After a retryable failure
        both are kept for the next attempt.
        """
        slots = target.journal_slots(path, size) if self.source.identity else None
        interval = self.wanted.journal_interval
        noted = journal.Journal.open(slots, self._key(), total, seconds=interval)
        mode: Literal["new", "resume"] = "resume" if noted.covered else "new"
        with target.open(path, size, dataclasses.replace(options, mode=mode)) as out:
            if noted.covered and not out.resumed:
                noted = journal.Journal(slots, self._key(), total, seconds=interval)
            self.resumed = noted.covered
            log.info("resume covered=%d of=%d identity=%r", noted.covered, total, self.source.identity)
            try:
                yield out, noted
            except errors.Error as err:
                if slots is not None and (err.retryable or isinstance(err, errors.Cancelled)):
                    noted.save(out.flush)
                    out.keep()
                raise

    def fetch_into(self, out: target.Target, noted: journal.Journal, ranges: Iterable[fetch.Range]) -> None:
        """Fetch the parts of ``ranges`` not in the journal, in any order, to the same offsets of ``out``."""

        def place(offset: int, data: memoryview) -> None:
            copy.write(out, offset, data)
            noted.done(offset, offset + len(data))
            noted.checkpoint(out.flush)

        fetcher = self.fetcher(self.arrived)

        def parts() -> Iterator[fetch.Range]:
            for part in ranges:
                for start, end in noted.missing(part.offset, part.offset + part.length):
                    yield from fetch.split(start, end, fetcher.step)

        self.progress.advance(noted.covered)
        fetcher.each(parts(), place)

    @property
    def options(self) -> target.Options:
        """Return the options of the target."""
        return target.Options(
            preallocate=self.wanted.preallocation,
            direct=self.wanted.direct,
            cancel=self.scope,
            claim=self.claim,
            existing=self.wanted.existing,
            permissions=self.wanted.permissions,
        )

    def _key(self) -> str:
        """Return the journal's key: the bytes and the job.

        It contains the owner's UID, which no earlier user of the same device knows.
        """
        return "\n".join(
            (
                self.source.name,
                self.source.identity or "",
                self.plan.route,
                self.wanted.owner_uid,
                self.wanted.target,
            )
        )

    def commit(self, opened: target.Target, size: int) -> None:
        """Verify the source and make the completely written disk of ``size`` bytes usable."""
        self.source.verify()
        self.accept()
        self.progress.phase("sync", None)
        self.size = max(size, self.plan.grow_to)
        if self.wanted.stage.current:
            self._note_checkpoint(opened)
        opened.commit(self.plan.grow_to)

    @property
    def checkpoints(self) -> tuple[frozenset[str], frozenset[str]]:
        """All names of the previous and the current checkpoint."""
        stage, names = self.wanted.stage, self.source.checkpoint_names
        return names(stage.previous), names(stage.current)

    def _note_checkpoint(self, opened: target.Target) -> None:
        # Imported when used: only the stages of a migration need it (start-up time).
        from cdi_worker.images.target import checkpoint

        if not (self.wanted.is_delta or self.wanted.stage.final):
            # A later stage may not know by how much the disk has grown.
            opened.zero_rest()
        # The bytes must not be lost after the checkpoint is stored.
        opened.flush()
        checkpoint.Checkpoint(self.checkpoints[1]).write(opened.written_path)

    @contextlib.contextmanager
    def served(self, advance: Callable[[int], None], *, whole: bool = True) -> Iterator[base.Reader]:
        """Yield a reader of the bytes as served; when the block ends without error, verify the checksum.

        ``whole``: read the rest then, also without a checksum.
        """
        with contextlib.closing(self._ordered(advance)) as reader:
            if self.wanted.checksum is None:
                yield reader
                if whole:
                    self._drain(reader)
                return
            hashing = checksum.HashingReader(reader, checksum.parse(self.wanted.checksum))
            yield hashing
            self._drain(hashing)
            hashing.verify()

    def _drain(self, reader: base.Reader) -> None:
        """Read the rest. If its length is unknown, it may be endless."""
        is_bounded = self.source.size is not None and not self.content.compressions
        copy.drain(reader, self.scope, None if is_bounded else max(self.limit, SHORTEST_LIMIT))

    @contextlib.contextmanager
    def plain(self, limit: int | None = None, *, whole: bool = True) -> Iterator[base.Reader]:
        """Yield a reader of the decompressed bytes, at most ``limit``; when the block ends, read the rest.

        Without ``whole`` the rest is only read if it shows whether the bytes before it are right, as the end
        of a compressed stream does and a checksum, or if the client of an upload must send it.
        """
        whole = whole or self.wanted.checksum is not None or self.source.once
        whole = whole or bool(self.content.compressions)
        with self.served(self.arrived, whole=whole) as served:
            if self.source.format is None:
                content, reader = layers.open(served, limit=limit, tool=self._xz)
                head = content.head
            else:
                peeked = readers.Peek(served, detect.HEAD)
                head, reader = peeked.head, self.source.unwrapped(peeked)
            with contextlib.closing(reader):
                self._check_same(head)
                yield reader
                if whole:
                    self._drain(reader)

    @contextlib.contextmanager
    def runs(self) -> Iterator[Iterator[base.Run]]:
        """Yield the runs (data or zeros) of a stream that marks them. A run is valid until the next."""
        decode = self.source.runs()
        if decode is None:
            raise errors.SourceError(reason=f"{self.source.name}: the stream does not mark holes")
        with self.served(self.count) as served:
            yield iter(decode(served, ahead.buffers))

    def _xz(self, packed: base.Reader) -> base.Reader:
        # Imported when used: only xz starts a program (start-up time).
        from cdi_worker.images.tools import xz

        return xz.Reader(packed, self.scope)

    def _ordered(self, advance: Callable[[int], None]) -> base.Reader:
        reader = self.source.ordered(self.scope, advance)
        if self.engine.seeks(self.source) or not (self.content.compressions or self.wanted.is_archive):
            # Ranges are fetched by threads, and an uncompressed disk is read by one of the copy.
            return reader
        return ahead.Reader(reader, self.scope)

    def _check_same(self, head: bytes) -> None:
        """Raise ``SourceChanged`` if the stream does not begin with the bytes that were checked."""
        checked = self.content.head[: detect.HEAD]
        if not head.startswith(checked):
            before, now = (f"crc {zlib.crc32(data):08x}" for data in (checked, head[: len(checked)]))
            raise errors.SourceChanged(url=self.source.name, what="beginning", before=before, now=now)
