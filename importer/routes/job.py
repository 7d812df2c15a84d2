"""A running import: opens the readers, the target and the journal for its route."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final, TypeAlias

from cdi_worker import errors, units
from cdi_worker.formats import checksum, detect, readers
from cdi_worker.formats.compressed import layers
from cdi_worker.images import targets
from cdi_worker.images.engine import ahead, cancelling, fetch
from cdi_worker.images.targets import copy, journaled
from cdi_worker.importer import engine, plan, request, survey
from cdi_worker.importer import progress as progress_module
from cdi_worker.scratch import journal
from cdi_worker.sources import base

if TYPE_CHECKING:
    from cdi_worker.formats import clone
    from cdi_worker.images.targets import compare, group

log = logging.getLogger(__name__)

#: Bytes after the end of an image that are read in any case to verify a checksum: snapshots, unused clusters.
SHORTEST_LIMIT = 256 << 20
#: The first bytes of a transfer come in shorter pieces: a kill loses the pieces that are not complete, with a
#: slow server most of what has arrived in the first seconds.
EARLY: Final = 32 << 20
_EARLY_PIECE: Final = 256 << 10

#: Writes what is missing in the journal to a target, and counts the bytes.
Fill: TypeAlias = Callable[[journaled.Flushable, journal.Journal, progress_module.Progress], None]


@dataclasses.dataclass
class Job:
    """A running import.

    ``claim``: the target's. ``engine``: reads the source. ``limit``: bytes of the largest disk that fits;
    with ``thin``, of its data.
    ``accepted``: called once, when all bytes have been received, verified, and found to be safe and to fit.
    ``group``: makes the disk usable, together with others.

    Outcome, in bytes: ``read`` from the source, ``size`` of the disk, ``resumed`` from an earlier attempt,
    ``refetched`` because storage did not hold what that had written. ``layers``: the names of the files of a
    chain, and how many bytes of the disk come from each.
    ``changes``: what an update in place found.
    """

    wanted: request.Request
    claim: targets.Claim
    source: base.Source
    engine: engine.Engine
    content: plan.Content
    plan: plan.Plan
    limit: int
    thin: bool
    progress: progress_module.Progress
    reads: cancelling.Reads
    scope: cancelling.Cancel = cancelling.NEVER
    accepted: Callable[[], object] = lambda: None
    group: group.Group | None = None
    read: int = 0
    size: int = 0
    resumed: int = 0
    refetched: int = 0
    layers: tuple[tuple[str, int], ...] = ()
    changes: compare.Changes | None = None
    _is_accepted: bool = False
    _is_verified: bool = False
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

    def verify(self, reader: base.Reader) -> None:
        """Verify the checksum, if there is one, of all bytes as served, which ``reader`` returns."""
        if self.checksum:
            self._verify(checksum.HashingReader(reader, checksum.parse(self.checksum)))

    def _verify(self, hashing: checksum.HashingReader) -> None:
        self._drain(hashing)
        hashing.verify()
        self._is_verified = True

    def count(self, count: int) -> None:
        """Count bytes read from the source where progress counts other bytes. Thread-safe."""
        with self._counting:
            self.read += count
        self.progress.read(count)

    def fetcher(self, counted: progress_module.Progress | None = None) -> fetch.Fetcher:
        """Return a fetcher, which reads the source's ranges in parallel.

        ``counted`` advances by what it reads; None: the progress of the phase is counted in other bytes.
        """

        def arrived(count: int) -> None:
            self.count(count)
            if counted is not None:
                counted.advance(count)

        return self.engine.fetcher(self.source, self.scope, arrived)

    def open_target(self, size: int | None) -> targets.Target:
        """Open the target for a new disk of ``size`` bytes, None if unknown; nothing is resumed."""
        return targets.open(self.wanted.target, size, self.options)

    @contextlib.contextmanager
    def resumable(
        self, path: str, size: int, total: int, options: targets.Options
    ) -> Iterator[tuple[targets.Target, journal.Journal]]:
        """Open ``path`` for ``size`` bytes, and the journal of the ranges an earlier attempt wrote there.

        ``total``: bytes that the journal covers, of the source or of the disk. After a retryable failure
        both are kept for the next attempt, and for the stream that replaces ranges.
        """
        is_compared = options.mode == "refresh"
        slots = targets.journal_slots(path, size) if self.source.identity and not is_compared else None
        key = self._key() if slots is not None else ""
        interval = self.wanted.journal_interval
        noted = journal.Journal.open(slots, key, total, seconds=interval)
        if noted.covered:
            options = dataclasses.replace(options, mode="resume")
        with targets.open(path, size, options) as out:
            noted.store_in(out.readable)
            if not out.resumed:
                noted.forget()
            log.info("resume covered=%d of=%d identity=%r", noted.covered, total, self.source.identity)
            try:
                yield out, noted
            except errors.Error as err:
                if slots is not None and (err.retryable or self.outlives(err)):
                    # A failure to save must not hide the first one; then nothing is kept.
                    with contextlib.suppress(errors.TargetError):
                        noted.save(out.flush)
                        out.keep()
                        if isinstance(err, errors.Cancelled) and noted.covered:
                            raise errors.Interrupted(kept=_kept(noted)) from err
                raise
            if self.group is not None and out.is_detached and slots is not None:
                noted.save(out.flush)
                self.group.keep(out)

    def outlives(self, failure: errors.Error) -> bool:
        """Return whether the bytes written so far stay valid although ``failure`` ends the attempt.

        Ranges that are no longer served were valid. The stream that replaces them has the same bytes if the
        identity is strong.
        """
        if isinstance(failure, errors.NoRanges):
            return not (self.source.weak or isinstance(failure, errors.WrongRanges))
        return isinstance(failure, errors.Cancelled)

    def has_begun(self, path: str, size: int) -> bool:
        """Return whether ranges have written a part of this disk of ``size`` bytes that a stream may keep."""
        source = self.source
        is_kept = source.identity and not (source.weak or source.once or self.content.compressions)
        if not is_kept or not size or self.plan.compared or self.group is not None or path == targets.STDOUT:
            return False
        slots = targets.journal_slots(path, size)
        return slots is not None and journal.Journal.open(slots, self._key(), size).covered > 0

    @contextlib.contextmanager
    def continued(
        self, path: str, size: int, options: targets.Options, *, noting: bool = True
    ) -> Iterator[tuple[targets.Target, copy.Writable]]:
        """Open ``path``, of which ``has_begun`` is true, for a stream of the whole disk.

        What ranges have written is compared with the stream, and written only where it differs. ``noting``:
        note in the journal what is written.
        """
        # Imported when used: few imports need it (start-up time).
        from cdi_worker.images.targets import continued

        with self.resumable(path, size, size, options) as (out, noted):
            covered, figures = noted.covered, noted.counted
            noted.counting = lambda: figures
            into = continued.Saving(out, noted) if noting else out
            with continued.Continued(out, noted, into) as disk:
                yield out, disk
                self.refetched = disk.differed
                self.resumed = covered - disk.differed
            if self.refetched:
                log.warning("storage differs from the stream rewritten=%d", self.refetched)

    @contextlib.contextmanager
    def received(
        self, path: str, size: int, options: targets.Options
    ) -> Iterator[tuple[targets.Target, copy.Writable]]:
        """Open ``path`` for a stream whose sender asks first which part of the disk is there.

        That part is read back before, because the sender does not send it again.
        """
        # Imported when used: only a clone needs them (start-up time).
        from cdi_worker.images import readback
        from cdi_worker.images.targets import continued

        with self.resumable(path, size, size, options) as (out, noted):
            start = end = out.withheld
            if noted.covered:
                with readback.ReadBack(out, noted, self.scope) as reading:
                    self.refetched = reading.wait()
                end = next((first for first, _ in noted.missing(start, size)), size)
                # The rest is sent again, and its digests may change.
                noted.discard(end, size)
            self.resumed = end - start
            self.source.keep(start, end)
            yield out, continued.Saving(out, noted)

    def copy_whole(self, disk: copy.Writable, size: int) -> None:
        """Copy an ordered stream of ``size`` bytes. Raises ``SourceChanged`` for another length."""
        with self.plain(limit=size) as reader:
            found = copy.copy_ordered(reader, disk, limit=size, scope=self.scope)
        if found != size:
            raise errors.SourceChanged(url=self.source.name, what="size", before=size, now=found)

    def transfer(
        self, out: targets.Target, noted: journal.Journal, fill: Fill, total: int, *, phase: str = "transfer"
    ) -> None:
        """Fetch with ``fill`` what is missing, while what an earlier attempt wrote is read back.

        What differs is fetched again. If the identity of the source is weak, a sample is fetched again first,
        and nothing is resumed if that differs. ``total``: the most bytes that the ``phase`` may move.
        """
        if noted.covered and self.source.weak:
            self._compare_sample(out, noted, fill)
        self.resumed = noted.covered
        counted = progress_module.Continued(self.progress, *(noted.counted if self.resumed else (0, 0)))
        noted.counting = counted.figures
        counted.begin(phase, total, self.resumed, noted.total)
        if not noted.covered:
            fill(out, noted, counted)
            return
        # Imported when used: only a resumed import needs it (start-up time).
        from cdi_worker.images import readback

        with readback.ReadBack(out, noted, self.scope, lambda count: counted.skip(-count)) as reading:
            fill(out, noted, counted)
            self.refetched = reading.wait()
        self.resumed -= self.refetched
        if self.refetched:
            log.warning("storage differs from what the last attempt wrote refetched=%d", self.refetched)
            fill(out, noted, progress_module.Moved(counted))

    def filling(self, size: int) -> Fill:
        """Return a ``Fill`` that fetches the first ``size`` bytes of the source, in any order."""

        def fill(out: journaled.Flushable, noted: journal.Journal, counted: progress_module.Progress) -> None:
            self.fetch_into(journaled.Journaled(out, noted), [fetch.Range(0, size)], counted)

        return fill

    def fetch_into(
        self, disk: journaled.Journaled, ranges: Iterable[fetch.Range], counted: progress_module.Progress
    ) -> None:
        """Fetch the unfinished parts of ``ranges``, in any order, to the same offsets of ``disk``."""

        def place(offset: int, data: memoryview) -> None:
            copy.write(disk, offset, data)
            disk.checkpoint(len(data))

        fetcher = self.fetcher(counted)

        def parts() -> Iterator[fetch.Range]:
            begun = 0
            for part in ranges:
                missing = disk.missing(part.offset, part.offset + part.length)
                counted.keep(part.length - sum(end - start for start, end in missing))
                for start, end in missing:
                    for piece in _split(start, end, fetcher.step, max(0, EARLY - begun)):
                        begun += piece.length
                        yield piece

        fetcher.each(parts(), place)

    def _compare_sample(self, out: targets.Target, noted: journal.Journal, fill: Fill) -> None:
        """Compare a sample of the source with what an earlier attempt wrote; forget that if it differs."""
        # Imported when used: only a resumed import needs it (start-up time).
        from cdi_worker.images import readback

        with readback.Comparing(out, noted) as stored:
            try:
                with self.attempt():
                    fill(stored, noted.sample(), progress_module.NullProgress())
            except errors.SourceChanged as err:
                if not stored.differs:
                    raise
                log.warning("starting over: the source has changed since the last attempt reason=%s", err)
                noted.forget()

    @property
    def options(self) -> targets.Options:
        """Return the options of the target."""
        existing = self.wanted.existing
        return targets.Options(
            mode="refresh" if self.plan.compared else "new",
            begun=_begin_update,
            preallocate=self.wanted.preallocation,
            direct=self.wanted.direct,
            cancel=self.scope,
            claim=self.claim,
            existing="replace" if existing == "update" else existing,
            permissions=self.wanted.permissions,
        )

    def _key(self) -> str:
        """Return the journal's key: the bytes and the job.

        It contains all that selects the bytes, because servers give several objects the same identity: nginx
        makes an ETag of date and size. It contains the owner's UID, which no other user of the same device
        knows. A weak identity is completed by the first bytes, which are fetched in any case. Only a digest
        of the key is used (``journal.Journal``), and it is not stored.
        """
        # Imported when used: only an import with a journal needs it (start-up time).
        from cdi_worker.sources import selection

        wanted = self.wanted
        head = hashlib.sha256(self.source.head).hexdigest() if self.source.weak else ""
        parts = (
            wanted.source,
            *map(selection.digest, (wanted.location, *wanted.layers)),
            wanted.disk,
            self.source.name,
            self.source.identity,
            head,
            # Both write the bytes of a raw disk to their offsets.
            str(plan.Route.STREAM if self.plan.route is plan.Route.EXTENTS else self.plan.route),
            wanted.room.owner,
            wanted.target,
        )
        return repr(parts)

    def commit(self, opened: targets.Target, size: int) -> None:
        """Verify the source and make the completely written disk of ``size`` bytes usable."""
        survey.check_stated(self.source, size)
        if self.checksum and not self._is_verified:
            self._read_again()
        self.source.verify()
        self.accept()
        self.progress.phase("sync", None)
        self.size = max(size, self.plan.grow_to)
        self.progress.disk(self.size)
        self.settle(opened, self.plan.grow_to)
        self.publish(opened, self.plan.grow_to)

    def publish(self, opened: targets.Target, size: int = 0) -> None:
        """Make a complete disk usable, now or with the others of its group."""
        if self.group is None:
            opened.commit(size)
        else:
            self.group.add(opened, size)

    def settle(self, opened: targets.Target, size: int = 0) -> None:
        """Store which checkpoint the disk holds, and what an update has changed."""
        if self.plan.compared:
            opened.settle(size)
        if self.wanted.stage.current:
            self._note_checkpoint(opened)
        elif self.plan.compared and opened.has_begun:
            # Imported when used: only updates and the stages of a migration need it (start-up time).
            from cdi_worker.images.targets import checkpoint

            checkpoint.forget(opened.written_path)
        self.changes = opened.changes

    @property
    def checkpoints(self) -> tuple[frozenset[str], frozenset[str]]:
        """All names of the previous and the current checkpoint."""
        stage, names = self.wanted.stage, self.source.checkpoint_names
        return names(stage.previous), names(stage.current)

    def _note_checkpoint(self, opened: targets.Target) -> None:
        # Imported when used: only the stages of a migration need it (start-up time).
        from cdi_worker.images.targets import checkpoint

        if not (self.wanted.is_delta or self.wanted.stage.final):
            # A later stage may not know by how much the disk has grown.
            opened.zero_rest(self.size)
        # The bytes must not be lost after the checkpoint is stored.
        opened.flush()
        checkpoint.Checkpoint(self.checkpoints[1]).write(opened.written_path)

    @property
    def checksum(self) -> str:
        """The expected checksums of the bytes as served: the request's and the server's; may be empty."""
        return ",".join(filter(None, (self.wanted.checksum, self.source.checksum)))

    @property
    def may_read_twice(self) -> bool:
        """Whether the checksum may be verified by a second read, after the source was read at random.

        Only if the server itself states it: one that lies about its bytes can lie about their checksum.
        """
        is_own = bool(self.source.checksum) and self.wanted.checksum is None
        return is_own and self.engine.seeks(self.source) and not self.content.compressions

    @contextlib.contextmanager
    def served(self, advance: Callable[[int], None], *, whole: bool = True) -> Iterator[base.Reader]:
        """Yield a reader of the bytes as served; when the block ends without error, verify the checksum.

        ``whole``: read the rest then, also without a checksum.
        """
        with contextlib.closing(self._ordered(advance)) as reader:
            if not self.checksum:
                yield reader
                if whole:
                    self._drain(reader)
                return
            hashing = checksum.HashingReader(reader, checksum.parse(self.checksum))
            yield hashing
            self._verify(hashing)

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
        with self.served(self.arrived) as served:
            yield iter(decode(served, ahead.buffers))

    @contextlib.contextmanager
    def folder(self) -> Iterator[clone.Folder | None]:
        """Yield the decoder of a file system's disk and other files; when the block ends, compare the digest.

        None for a source that sends one tar archive.
        """
        decode = self.source.folder()
        if decode is None:
            yield None
            return
        with self.served(self.arrived) as served:
            folder = decode(served, ahead.buffers)
            yield folder
            folder.finish()

    def _read_again(self) -> None:
        """Verify the checksum of a source whose bytes were read out of order."""
        self.progress.phase("verify", self.source.transferred)
        with self.served(self.arrived):
            pass

    def _xz(self, packed: base.Reader) -> base.Reader:
        # Imported when used: only xz starts a program (start-up time).
        from cdi_worker.images.tools import xz

        return xz.Reader(packed, self.scope)

    def _ordered(self, advance: Callable[[int], None]) -> base.Reader:
        reader = self.source.ordered(self.scope, advance)
        is_packed = bool(self.content.compressions) or self.wanted.is_archive
        if self.engine.seeks(self.source) or self.source.folder() is not None or not is_packed:
            # Ranges are fetched by threads, and an uncompressed disk is read by one of the copy.
            return reader
        return ahead.Reader(reader, self.scope)

    def _check_same(self, head: bytes) -> None:
        """Raise ``SourceChanged`` if the stream does not begin with the bytes that were checked."""
        checked = self.content.head[: detect.HEAD]
        if not head.startswith(checked):
            before, now = (f"crc {zlib.crc32(data):08x}" for data in (checked, head[: len(checked)]))
            raise errors.SourceChanged(url=self.source.name, what="beginning", before=before, now=now)


def _begin_update(path: str) -> None:
    """Note that the disk is neither the old nor the new one: no delta may be applied to it."""
    # Imported when used: only updates and the stages of a migration need it (start-up time).
    from cdi_worker.images.targets import checkpoint

    checkpoint.Checkpoint(frozenset(), frozenset({"an update"})).write(path)


def _kept(noted: journal.Journal) -> str:
    done, total = units.format_size(noted.covered), units.format_size(noted.total)
    return f"{done} of {total} are kept"


def _split(start: int, end: int, step: int, early: int) -> Iterator[fetch.Range]:
    """Split a range into pieces of ``step`` bytes, the first ``early`` bytes into shorter ones."""
    if step <= fetch.PIECE:
        # One request for several pieces; otherwise each piece would be a request.
        middle = min(end, start + early)
        yield from fetch.split(start, middle, min(step, _EARLY_PIECE))
        start = middle
    yield from fetch.split(start, end, step)
