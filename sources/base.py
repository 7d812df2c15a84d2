"""The interface of every source: what it can offer, with nothing as the default."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import ClassVar, NamedTuple, Protocol, Self, TypeAlias

from cdi_worker import errors
from cdi_worker.formats import readers, remembered
from cdi_worker.images.engine import cancelling
from cdi_worker.sources import fields

Reader: TypeAlias = readers.Reader
RandomReader: TypeAlias = readers.RandomReader


#: A run of a disk: the length of a hole in bytes, or data.
Run: TypeAlias = "int | memoryview"
#: Returns buffers of a size in bytes, to be used in turn.
Buffers: TypeAlias = Callable[[int], Iterator[memoryview]]


#: Given to a source when it is made. Its waits, from the first contact on, register how they are ended.
Cancel: TypeAlias = cancelling.Cancel


@dataclasses.dataclass(frozen=True, slots=True)
class Extent:
    """A run of the virtual disk, in bytes. ``zero``: reads as zeros, whatever is stored."""

    offset: int
    length: int
    zero: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Access:
    """How to reach a server, and the secrets for it. ``repr`` shows none of them.

    ``session_token``: comes with temporary S3 keys. ``headers`` go to the origin of the request only,
    like the credentials. ``ca_files``: PEM files trusted in addition to the system's. ``patience``:
    seconds without a byte until a source that fetches by itself gives up.
    """

    user: str = dataclasses.field(default="", repr=False)
    password: str = dataclasses.field(default="", repr=False)
    session_token: str = dataclasses.field(default="", repr=False)
    headers: tuple[tuple[str, str], ...] = dataclasses.field(default=(), repr=False)
    ca_files: tuple[str, ...] = ()
    insecure: bool = False
    http_proxy: str = dataclasses.field(default="", repr=False)
    https_proxy: str = dataclasses.field(default="", repr=False)
    no_proxy: str = ""
    connections: int = 6
    patience: float = 180.0


#: What a stage continues from. Sources without stages refuse it: they would import the whole over a disk.
PREVIOUS = fields.Field(
    env="IMPORTER_PREVIOUS_CHECKPOINT", option="--previous-checkpoint", help="The stage before this one."
)


class Stage(NamedTuple):
    """A stage of a multi-stage import: the change from ``previous`` (empty: everything) to ``current``."""

    previous: str = ""
    current: str = ""
    final: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Location:
    """Where a disk is, and how to get there. A source with more to say derives a dataclass from it."""

    #: Whether disks come in stages (``sources.staged``).
    staged: ClassVar[bool] = False
    #: How the names of certificates end in the folder that a pod mounts.
    certificates: ClassVar[tuple[str, ...]] = ("",)

    endpoint: str
    access: Access = Access()

    @property
    def stage(self) -> Stage:
        """The stage of a multi-stage import; an empty one where there are no stages."""
        return Stage()

    def faults(self) -> Iterator[str]:
        """Yield what is wrong with the fields or missing, before anything is contacted."""
        if not self.endpoint:
            yield "no endpoint (IMPORTER_ENDPOINT) given"

    def reads(self, path: str) -> bool:
        """Tell whether the disk is the file ``path`` of this machine."""
        return False


class Engine(Protocol):
    """Reads sources, whatever breaks on the way."""

    def ordered(
        self,
        source: Source,
        cancel: Cancel,
        *,
        start: int = 0,
        advance: Callable[[int], None] = lambda _: None,
    ) -> Reader:
        """Return the bytes as served, in order, from ``start``, which is within ``source.head`` or its end.

        In parallel ranges if it has any. ``advance`` is called with the number of bytes as they arrive.
        """


class Plain:
    """Reads a source as it comes: for one that is opened outside of an import."""

    def ordered(
        self,
        source: Source,
        cancel: Cancel,
        *,
        start: int = 0,
        advance: Callable[[int], None] = lambda _: None,
    ) -> Reader:
        """See ``Engine``."""
        return source.stream(start)


class Source:
    """Where bytes come from.

    A source knows one protocol. It does not know the target, scratch or the plan. Opening it
    (``with``) makes the first contact and fills ``size``, ``identity`` and ``head``; what a source
    cannot do is the default here. One source serves one import.
    """

    #: For people: the address without secrets.
    name: str = ""
    #: Bytes as served, or None when the server does not tell.
    size: int | None = None
    #: Names these very bytes (ETag, digest, generation): equal identities, equal bytes. None: unknown.
    identity: str | None = None
    #: What the bytes are, a name of ``formats.detect``, where the protocol says so: then what a guest has
    #: written to its disk cannot make it look like something else. None: the first bytes tell.
    format: str | None = None
    #: Bytes that one read of ``ranges`` brings at most, however many are asked for. None: no such limit.
    longest_read: int | None = None
    #: Whether ``stream`` gives the bytes only once.
    once: bool = False
    #: Whether the disk is blank: there are no bytes to read, and the request gives the size.
    blank: bool = False
    #: Reads this source, and others that it consists of (layers of an image). Set before it is opened.
    engine: Engine = Plain()
    #: What was opened to look further than the head and begins anew: for the first call of ``ordered``.
    begun: Reader | None = None
    #: The first bytes, as many as the first contact brought (all of them if the source is that small).
    head: bytes = b""

    @cached_property
    def known(self) -> remembered.Remembered:
        """What was read of ``ranges`` already, the head first. For use after the first contact."""
        return remembered.Remembered(self.head)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of connections, tickets and sessions. Safe to call twice."""

    def stream(self, offset: int = 0) -> Reader:
        """Return the bytes as served, in order, from ``offset``.

        Raises ``errors.NoRanges`` for an offset the source cannot go to.
        """
        raise errors.SourceError(reason=f"{self.name}: has no ordered stream")

    def ordered(self, cancel: Cancel, advance: Callable[[int], None] = lambda _: None) -> Reader:
        """Return the bytes of ``stream``, read by ``engine``, in order. ``advance``: see ``Engine``."""
        if self.begun is not None:
            begun, self.begun = self.begun, None
            return readers.Watched(begun, lambda data: advance(len(data)))
        return self.engine.ordered(self, cancel, advance=advance)

    def unwrapped(self, served: Reader) -> Reader:
        """Remove the protocol's own framing from ``served``, a reader of what ``stream`` returns.

        Closing the result closes ``served``.
        """
        return served

    def runs(self) -> Callable[[Reader, Buffers], Iterable[Run]] | None:
        """Return a decoder of ``stream`` into the runs of the disk, in order. None: it has plain bytes."""
        return None

    def ranges(self) -> RandomReader | None:
        """Return a reader for random access, or None where the source is forward-only."""
        return None

    def extents(self) -> Iterator[Extent] | None:
        """Return the runs of the virtual disk that ``ranges`` reads, in order; None: unknown."""
        return None

    def verify(self) -> None:
        """Check what the source can only know at the end (digests). Called before the disk is usable."""

    def finish(self) -> None:
        """Tell the other end that the disk is on storage. Called once, after success only."""

    def labels(self) -> Mapping[str, str]:
        """Return ``kubevirt.io`` labels that the source carries."""
        return {}

    def info(self) -> Mapping[str, str]:
        """Return what the termination message tells of the other end (``vddkInfo``)."""
        return {}

    def describe(self) -> Mapping[str, object]:
        """Return what only this kind of source can tell of itself, for ``inspect``."""
        return {}
