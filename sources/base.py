"""The interface of all sources: where a disk is, how it is opened, and its raw reads."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias

from cdi_worker import errors, masking
from cdi_worker.formats import readers
from cdi_worker.images import extents, image
from cdi_worker.images.engine import cancelling
from cdi_worker.sources import fields

Extent: TypeAlias = extents.Extent
Reader: TypeAlias = readers.Reader
RandomReader: TypeAlias = readers.RandomReader
Facts: TypeAlias = image.Facts
Image: TypeAlias = image.Image
Wire: TypeAlias = image.Wire
Run: TypeAlias = image.Run
Buffers: TypeAlias = image.Buffers


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


#: Why most sources cannot verify signatures.
UNVERIFIABLE: Final = (
    "only images in a registry have signatures that can be verified; for http, s3, gcs and files "
    "name a signed checksum file (--checksum-file, CDI_WORKER_CHECKSUM_FILE) or map (--map, CDI_WORKER_MAP)"
)


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
    def unverifiable(self) -> str:
        """Why demanded signatures cannot be verified; empty: opening the source verifies them, or fails."""
        return UNVERIFIABLE

    @property
    def pulled_elsewhere(self) -> bool:
        """Whether another program has pulled it, a container image: policies for images concern it, too."""
        return False

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
            yield fields.Fault("no endpoint ({}) given", "IMPORTER_ENDPOINT", "SOURCE")

    def at_stage(self) -> Location:
        """Return the location of the file of this stage, if each stage is a file."""
        return self

    def reads(self, path: str) -> bool:
        """Return whether the disk is the local file or the NBD export ``path``."""
        return False


def is_web(url: str) -> bool:
    """Return whether ``url`` is an http or https URL with a host, and with a valid port if it has one."""
    with contextlib.suppress(ValueError):
        parts = urllib.parse.urlsplit(url)
        return parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
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
    judge of an image's signatures (``sources.trust``); None: nothing is demanded. ``whole``: all of the image
    will be read, so that what this needs may be prepared.
    """

    engine: image.Engine = dataclasses.field(default_factory=image.Engine)
    judging: Callable[..., Any] | None = None
    whole: bool = False


class Source:
    """One disk image, read over one protocol.

    A source does not know the target, scratch or the plan. It serves raw reads: ``images.image`` retries,
    compares and remembers them. One source serves one import.
    """

    #: The address without secrets, for messages before the source is open.
    name: str = ""

    def open(self, opening: Opening) -> Facts:
        """Contact the server; return what it states. Called again after a failure that may pass."""
        raise NotImplementedError

    def close(self) -> None:
        """Release connections, tickets and sessions. Safe to call twice."""

    def stream(self, offset: int = 0) -> Reader:
        """Return a reader of the bytes as served, in order, from ``offset``.

        Raises ``errors.NoRanges`` if the source cannot start at ``offset``.
        """
        raise errors.SourceError(reason=f"{self.name}: cannot be read as an ordered stream")

    def verify(self) -> None:
        """Verify digests at the end of the transfer. Called before the disk becomes usable."""

    def finish(self, facts: Facts) -> Facts:
        """Notify the server that the disk is on storage; return ``facts`` with those known only now.

        Called once, after success only.
        """
        return facts

    def digest(self) -> str:
        """Open the source, return its digest, which changes whenever the bytes change, and close it.

        For a source that is not open yet. Raises ``errors.SourceError`` if the server states none.
        """
        with opened(self) as found:
            if not found.facts.digest:
                reason = (
                    f"{found.facts.name}: the server states no strong ETag, version or checksum of the disk"
                )
                raise errors.SourceError(reason=f"{reason}; give a file with its checksum (--checksum-file)")
            return found.facts.digest


@contextlib.contextmanager
def opened(source: Source, opening: Opening | None = None) -> Iterator[Image]:
    """Open ``source``, without retries; close it after the block."""
    opening = opening or Opening()
    with contextlib.closing(source):
        yield Image(source, source.open(opening), opening.engine)
