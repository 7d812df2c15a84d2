"""One attempt of an import: everything that its route needs, and what it has counted."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from cdi_worker.images import targets
from cdi_worker.images.engine import cancelling
from cdi_worker.importer.plan import Plan
from cdi_worker.importer.progress import Progress
from cdi_worker.importer.request import Request
from cdi_worker.importer.survey import Survey
from cdi_worker.scratch import ranges
from cdi_worker.sources import base
from cdi_worker.sources.trust import Demanded

if TYPE_CHECKING:
    from cdi_worker.images.sinks import compared, journaled, verified
    from cdi_worker.images.targets import group


class Counts:
    """What an attempt has counted so far, in bytes.

    ``read``: from the source. ``size``: of the disk. ``resumed``: written by an earlier attempt, holes too;
    ``kept``: moved by it. ``refetched``: written by it, but storage did not hold them. ``layers``: the names
    of the files of a chain, and how many bytes of the disk come from each. ``changes``: what an update in
    place found. ``comparison``: what a verification found. ``receiving``: has the digests of what was
    delivered, to read it back. ``verified``: the checksum of the bytes as served was verified.
    """

    read: int = 0
    size: int = 0
    resumed: int = 0
    kept: int = 0
    refetched: int = 0
    layers: tuple[tuple[str, int], ...] = ()
    changes: compared.Changes | None = None
    comparison: verified.ComparingSink | None = None
    receiving: journaled.DigestSink | None = None
    verified: bool = False
    accepted: bool = False


class Comparing(NamedTuple):
    """How a disk is compared. ``within``: these parts of it, None: all.

    ``again``: they are those that differed, which are read a second time.
    """

    within: ranges.Ranges | None = None
    again: bool = False


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
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

    @contextlib.contextmanager
    def scoped(self) -> Iterator[Attempt]:
        """Yield this attempt with a scope of its own: a failure in the block ends only its reads."""
        with self.reads.scope() as scope:
            yield dataclasses.replace(self, scope=scope)

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
