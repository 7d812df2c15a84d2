"""The interface of all sources. Optional abilities have defaults in the base class."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeAlias

from cdi_worker import errors, masking
from cdi_worker.formats import readers
from cdi_worker.images import extents, image
from cdi_worker.images.engine import cancelling, pace
from cdi_worker.sources import fields

if TYPE_CHECKING:
    from cdi_worker.formats import clone, signature

Extent: TypeAlias = extents.Extent
Reader: TypeAlias = readers.Reader
RandomReader: TypeAlias = readers.RandomReader


#: A run of a disk: the length of a hole in bytes, or data.
Run: TypeAlias = "int | memoryview | clone.Kept"
#: Returns reusable buffers of the given size in bytes.
Buffers: TypeAlias = Callable[[int], Iterator[memoryview]]


#: Passed to each source. All waits of a source, from the first contact on, register a callback to abort them.
Cancel: TypeAlias = cancelling.Cancel


@dataclasses.dataclass(frozen=True, slots=True, weakref_slot=True)
class Access:
    """Credentials, certificates and proxies for a server. ``repr`` omits the secrets.

    ``session_token``: part of temporary S3 keys. ``headers``, like the credentials, are only sent to the
    origin of the request. ``ca_files``: PEM files trusted in addition to the system's. ``patience``: seconds
    without data after which a source that retries by itself fails. ``slowest``: bytes per second, on average
    over that time, that count as data; 0: each byte does.
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
    slowest: float = 1024.0

    @property
    def secret(self) -> bool:
        """Whether it holds what only the server of the address may see."""
        return bool(self.user or self.password or self.session_token or self.headers)

    def __post_init__(self) -> None:
        masking.hold(
            self,
            *masking.login(self.user, self.password),
            self.session_token,
            *masking.headers(self.headers),
            *masking.proxy(self.http_proxy),
            *masking.proxy(self.https_proxy),
        )


#: Sources without checkpoints refuse it: they would overwrite the disk with a full copy.
PREVIOUS = fields.Field(
    env="IMPORTER_PREVIOUS_CHECKPOINT",
    option="--previous-checkpoint",
    help="Checkpoint of the previous stage.",
)


class Stage(NamedTuple):
    """A stage of a multi-stage import: the changes from ``previous`` (empty: a full copy) to ``current``."""

    previous: str = ""
    current: str = ""
    final: bool = False


@dataclasses.dataclass(frozen=True, slots=True, weakref_slot=True)
class Location:
    """The address of a disk and the access to it. Sources with options of their own derive a dataclass.

    While it exists, its secrets are masked in all texts of this process (``masking``): the fields that
    ``repr`` omits, and those in addresses.
    """

    #: Whether the source supports multi-stage imports (``sources.staged``).
    staged: ClassVar[bool] = False
    #: Whether each stage is a file, all but the first a qcow2 file with what changed (``sources.chained``).
    of_files: ClassVar[bool] = False
    #: Variables that the command line reads for a field of the access, as this source's own tools do.
    variables: ClassVar[Mapping[str, str]] = {}
    #: Suffixes of the certificate files in the pod's certificate folder.
    certificates: ClassVar[tuple[str, ...]] = ("",)

    #: May contain a password or a signature.
    endpoint: str = dataclasses.field(repr=False)
    access: Access = Access()

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            is_secret = not each.repr and each.name != "endpoint"
            for text in _texts(getattr(self, each.name)):
                masking.hold(self, *([text] if is_secret else masking.address(text)))

    def __init_subclass__(cls) -> None:
        """Let a ``__post_init__`` of ``cls`` end with that of this class, whether it calls it or not."""
        own = cls.__dict__.get("__post_init__")
        if own is None or hasattr(own, "__wrapped__"):
            # A dataclass with slots is made twice, the second time with the first one's functions.
            return

        @functools.wraps(own)
        def both(self: Location) -> None:
            own(self)
            Location.__post_init__(self)

        cls.__post_init__ = both  # type: ignore[method-assign]  # wraps the method of a subclass

    @property
    def stage(self) -> Stage:
        """The stage of a multi-stage import; empty for a source without stages."""
        return Stage()

    @property
    def file_name(self) -> str:
        """The name of the disk's file, as a checksum file has it; empty: it is not a file."""
        return ""

    def faults(self) -> Iterator[str]:
        """Yield a message for each missing or invalid field, without contacting the server."""
        if not self.endpoint:
            yield "no endpoint (IMPORTER_ENDPOINT) given"

    def at_stage(self) -> Location:
        """Return the location of the file of this stage, if each stage is a file."""
        return self

    def reads(self, path: str) -> bool:
        """Return whether the disk is the local file ``path``."""
        return False


def _texts(value: object) -> Iterator[str]:
    """Yield the texts in the value of a field."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, bytes):
        yield value.decode("utf-8", "replace")
    elif isinstance(value, Mapping):
        yield from _texts(tuple(value.values()))
    elif isinstance(value, tuple | list | set | frozenset):
        for each in value:
            yield from _texts(each)


@dataclasses.dataclass(frozen=True, slots=True)
class Opening:
    """What a source needs to be opened.

    ``engine``: reads what the source reads itself, such as the layers of an image. ``judging``: returns the
    judge of an image's signatures (``sources.trust``); None: nothing is demanded.
    """

    engine: image.Engine = dataclasses.field(default_factory=image.Engine)
    judging: Callable[..., Any] | None = None


class Source:
    """One disk image, read over one protocol.

    A source does not know the target, scratch or the plan. ``open`` contacts the server and sets the facts,
    which nothing else sets. The defaults here are those of a source that supports nothing. It serves raw
    reads: ``images.image`` retries, compares and remembers them. One source serves one import.
    """

    #: The address without secrets, for logs and messages.
    name: str = ""
    #: Size in bytes as served; None if the server does not send it.
    size: int | None = None
    #: ETag, digest or generation. None: unknown, and an import is not resumed after a kill.
    identity: str | None = None
    #: Whether equal identities do not prove equal bytes (a date, a weak ETag): a resumed import then fetches
    #: a sample again, and starts over if it differs.
    weak: bool = False
    #: Size in bytes of the disk at the previous checkpoint of a delta, where the protocol knows it.
    previous_size: int | None = None
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
    #: Largest number of bytes that one read of ``ranges`` returns. None: no limit.
    longest_read: int | None = None
    #: Whether ``stream`` can be read only once.
    once: bool = False
    #: Whether it is a thin volume, which may be larger than a file system that has room for its data.
    thin: bool = False
    #: Whether the disk is blank: no bytes to read, the size comes from the request.
    blank: bool = False
    #: Why demanded signatures cannot be verified; empty: opening the source verifies them, or fails.
    unverifiable: str = (
        "only images in a registry have signatures that can be verified; for http, s3, gcs and files "
        "name a signed checksum file (--checksum-file, CDI_WORKER_CHECKSUM_FILE)"
    )
    #: Whether it is a container image that another program has pulled: policies for images concern it, too.
    pulled_elsewhere: bool = False
    #: The verified signatures.
    signatures: tuple[signature.Signature, ...] = ()
    #: Digests, ``ALGORITHM:HEX``, of the documents and blobs that the disk is in, by name. The transfer ends
    #: without error only if they are right.
    verified: Mapping[str, str] = types.MappingProxyType({})
    #: The bytes of the first response (the whole image if it is small).
    head: bytes = b""
    #: Why the source cannot be imported although it can be examined: a choice among several disks is missing.
    obstacle: errors.Error | None = None

    @property
    def files(self) -> tuple[Source, ...]:
        """The files of a chain, the oldest first; this one only, if it is not a chain."""
        return (self,)

    @property
    def transferred(self) -> int | None:
        """Size in bytes of what ``ordered`` counts; not ``size`` if the image is in a package."""
        return self.size

    @cached_property
    def pace(self) -> pace.Pace:
        """The times of the answers so far."""
        return pace.Pace()

    def open(self, opening: Opening) -> None:
        """Contact the server. Called again after a failure that may pass."""

    def __enter__(self) -> Self:
        self.open(Opening())
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release connections, tickets and sessions. Safe to call twice."""

    def watch(self) -> str:
        """Open the source and return its digest. Raises ``errors.SourceError`` if there is none."""
        with self:
            if not self.digest:
                reason = f"{self.name}: the server states no strong ETag, version or checksum of the disk"
                raise errors.SourceError(reason=f"{reason}; give a file with its checksum (--checksum-file)")
            return self.digest

    def stream(self, offset: int = 0) -> Reader:
        """Return a reader of the bytes as served, in order, from ``offset``.

        Raises ``errors.NoRanges`` if the source cannot start at ``offset``.
        """
        raise errors.SourceError(reason=f"{self.name}: cannot be read as an ordered stream")

    def ordered(self, cancel: Cancel, advance: Callable[[int], None]) -> Reader | None:
        """Return a reader of all bytes, if the source retries by itself. None: ``stream`` is read.

        ``advance`` is called with the number of bytes received, of ``transferred``.
        """
        return None

    def unwrapped(self, served: Reader) -> Reader:
        """Remove the protocol's framing from ``served``, the reader that ``stream`` returned.

        Closing the result closes ``served``.
        """
        return served

    def runs(self) -> Callable[[Reader, Buffers], Iterable[Run]] | None:
        """Return a decoder of ``stream`` into the runs of the disk, in order. None: plain bytes."""
        return None

    def folder(self) -> Callable[[Reader, Buffers], clone.Folder] | None:
        """Return a decoder of ``stream`` into disk and other files of a file system. None: plain bytes."""
        return None

    def keep(self, start: int, end: int) -> None:
        """State which part of the disk need not be read. Called before ``runs``."""

    def ranges(self) -> RandomReader | None:
        """Return a reader for random access, or None if the source can only be read in order."""
        return None

    def extents(self) -> Iterator[Extent] | None:
        """Return the extents of the virtual disk that ``ranges`` reads, in order. None: unknown."""
        return None

    def verify(self) -> None:
        """Verify digests at the end of the transfer. Called before the disk becomes usable."""

    def finish(self) -> None:
        """Notify the server that the disk is on storage. Called once, after success only."""

    def checkpoint_names(self, checkpoint: str) -> frozenset[str]:
        """Return all names of a checkpoint of the request. Called after the source is opened."""
        return frozenset({checkpoint})

    def labels(self) -> Mapping[str, str]:
        """Return the ``kubevirt.io`` labels of the image."""
        return {}

    def info(self) -> Mapping[str, str]:
        """Return the server's details for the termination message (``vddkInfo``)."""
        return {}

    def describe(self) -> Mapping[str, object]:
        """Return details of this kind of source for ``inspect``."""
        return {}


#: A source that is open, with what is known of its bytes.
Image: TypeAlias = image.Image[Source]
