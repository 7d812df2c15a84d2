"""One attempt of an import: everything that its route needs, and what it has counted."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from cdi_worker import errors
from cdi_worker.images import targets
from cdi_worker.images.engine import cancelling
from cdi_worker.importer.plan import Plan, Route
from cdi_worker.importer.progress import Progress
from cdi_worker.importer.request import Request
from cdi_worker.importer.survey import Survey
from cdi_worker.scratch import journal as journals
from cdi_worker.scratch import ranges
from cdi_worker.sources import base, selection
from cdi_worker.sources.trust import Demanded

if TYPE_CHECKING:
    from cdi_worker.images.sinks import compared, verified
    from cdi_worker.images.targets import group


class Counts:
    """What an attempt has counted so far, in bytes.

    ``read``: from the source. ``written``: of data, to the target. ``size``: of the disk. ``resumed``:
    written by an earlier attempt, holes too; ``kept``: moved by it. ``refetched``: written by it, but storage
    did not hold them. ``layers``: the names of the files of a chain, and how many bytes of the disk come from
    each. ``changes``: what an update in place found. ``comparison``: what a verification found. ``received``:
    the digests of what was delivered, to read it back. ``verified``: the checksum of the bytes as served was
    verified.
    """

    read: int = 0
    written: int = 0
    size: int = 0
    resumed: int = 0
    kept: int = 0
    refetched: int = 0
    layers: tuple[tuple[str, int], ...] = ()
    changes: compared.Changes | None = None
    comparison: verified.ComparingSink | None = None
    received: journals.Journal | None = None
    verified: bool = False
    accepted: bool = False

    def count_kept(self, covered: int, moved: int, refetched: int) -> None:
        """Count what is kept of an earlier attempt, by which ``covered`` bytes were written and ``moved``."""
        self.resumed += covered - refetched
        self.kept += max(0, moved - refetched)
        self.refetched += refetched


class Comparing(NamedTuple):
    """How a disk is compared. ``within``: these parts of it, None: all.

    ``again``: they are those that differed, which are read a second time.
    """

    within: ranges.Ranges | None = None
    again: bool = False


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Attempt:
    """One attempt, by one plan.

    ``demanded``: of the disk. ``claim``: the target's. ``image``: that of the disk, without a package around
    it. ``scope`` ends the reads of this attempt; a failure sets it. ``accepted``: called once, when all bytes
    have been received, verified, and found to be safe and to fit. ``group``: makes the disk usable, together
    with others. ``comparing``: how a disk is compared, if nothing is written.
    """

    request: Request
    demanded: Demanded
    claim: targets.Claim
    image: base.Image
    survey: Survey
    plan: Plan
    progress: Progress
    reads: cancelling.Reads
    scope: cancelling.Cancel = cancelling.NEVER
    accepted: Callable[[], object] = lambda: None
    group: group.Group | None = None
    comparing: Comparing | None = None
    counts: Counts = dataclasses.field(default_factory=Counts)
    _counting: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    @property
    def facts(self) -> base.Facts:
        """What the source states of the image."""
        return self.image.facts

    @property
    def checksums(self) -> str:
        """The expected checksums of the bytes as served: demanded, and stated by the server; may be empty."""
        return ",".join(filter(None, (self.demanded.checksum, self.facts.checksum)))

    @property
    def job(self) -> str:
        """The name of the job in scratch: its target, or of a comparison, which claims none, its own."""
        return self.request.target + (f".verify-{os.getpid()}" if self.comparing else "")

    def outlives(self, failure: errors.Error) -> bool:
        """Return whether the bytes written so far stay valid although ``failure`` ends the attempt.

        Ranges that are no longer served were valid. The stream that replaces them has the same bytes if the
        identity is strong. A source that has changed has another identity then.
        """
        if isinstance(failure, errors.NoRanges | errors.SourceChanged):
            return not (self.facts.weak or isinstance(failure, errors.WrongRanges))
        return failure.retryable or isinstance(failure, errors.Cancelled)

    @contextlib.contextmanager
    def scoped(self) -> Iterator[Attempt]:
        """Yield this attempt with a scope of its own: a failure in the block ends only its reads."""
        with self.reads.scope() as scope:
            yield dataclasses.replace(self, scope=scope)

    def journal(self, path: str, size: int) -> journals.Journal | None:
        """Return the journal of a disk of ``size`` bytes at ``path``, with what an earlier attempt has noted.

        None: nothing can be kept.

        Its key has all that selects the bytes, because servers give several objects the same identity: nginx
        makes an ETag of date and size, and a redirect may lead to another object. So the first bytes, which
        are fetched in any case, complete the identity; not those of a VMDK without a digest, which a protocol
        makes of a disk for each request. It contains the owner's UID, which no other user of the same device
        knows. Only a digest of the key is used, and it is not stored.
        """
        asked, source, route = self.request, self.facts, self.plan.route
        form = asked.form if path == asked.target else None
        slots = targets.journal_slots(path, size, form) if source.identity else None
        if slots is None:
            return None
        is_made_anew = source.format == "vmdk" and not source.digest
        key = (
            asked.source,
            *map(selection.digest, (asked.location, *asked.layers)),
            asked.disk,
            source.name,
            source.identity,
            hashlib.sha256(b"" if is_made_anew else source.head).hexdigest(),
            # Both write the bytes of a raw disk to their offsets.
            str(Route.STREAM if route is Route.EXTENTS else route),
            asked.room.owner,
            asked.target,
            asked.form,
        )
        return journals.Journal(slots, repr(key), size, seconds=asked.journal_interval)

    def continues(self, path: str) -> bool:
        """Return whether a later run continues over what a stream has written to a new disk at ``path``."""
        source = self.facts
        is_kept = source.identity and not (source.weak or source.once)
        return bool(is_kept) and not self.plan.compared and path != targets.STDOUT

    def accept(self) -> None:
        """Call ``accepted``, once: only processing is left, so an ``-async`` upload may be answered."""
        if not self.counts.accepted:
            self.counts.accepted = True
            self.accepted()

    def count(self, count: int) -> None:
        """Count bytes read from the source. Thread-safe."""
        with self._counting:
            self.counts.read += count
        self.progress.read(count)
