"""The interface of all sources: where a disk is, how it is opened, and its raw reads."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import posixpath
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, TypeAlias

from cdi_worker import errors, masking, units
from cdi_worker.formats import readers
from cdi_worker.images import extents, image
from cdi_worker.images.engine import cancelling, retry
from cdi_worker.sources import fields

if TYPE_CHECKING:
    from cdi_worker.images.disks import base as disks

Extent: TypeAlias = extents.Extent
Reader: TypeAlias = readers.Reader
RandomReader: TypeAlias = readers.RandomReader
Facts: TypeAlias = image.Facts
Provenance: TypeAlias = image.Provenance
Image: TypeAlias = image.Image
Held: TypeAlias = image.Held
Wire: TypeAlias = image.Wire
Run: TypeAlias = "disks.Run"
Buffers: TypeAlias = image.Buffers


#: Passed to each source. All waits of a source, from the first contact on, register a callback to abort them.
Cancel: TypeAlias = cancelling.Cancel


#: Bytes of the first read: more than the header of a disk format, and the name of its backing file.
HEAD_SIZE: Final = 256 << 10

#: Sections of the help.
ACCESS, TRANSFER = "Credentials and TLS", "Transfer"
_option = functools.partial(fields.Field, section=ACCESS)
#: In place of a role: commands whose other credentials have other variables.
PROXIES = "proxies"
_proxy = functools.partial(fields.field, ambient=True, roles=(fields.IMPORTER, PROXIES))


def _login(option: str, variable: str, meaning: str, **more: Any) -> Any:
    """Return a field with a secret of the login."""
    return fields.field(
        option=option, env=variable, help=meaning, ambient=True, secret=True, section=ACCESS, **more
    )


def _limit(option: str, meaning: str, form: str, default: float, **more: Any) -> Any:
    """Return a field with a number that limits the transfer."""
    more = {"verbs": (*fields.READ, fields.POD), "parse": type(default), **more}
    return fields.field(default, option=option, help=meaning, form=form, section=TRANSFER, **more)


@dataclasses.dataclass(frozen=True)
class Access:
    """Credentials, certificates and proxies for a server. ``repr`` omits the secrets.

    ``session_token``: part of temporary S3 keys. ``headers``, like the credentials, are only sent to the
    origin of the request. ``ca_files``: PEM files trusted in addition to the system's. ``patience``: seconds
    without data after which a source that retries by itself fails. ``min_speed``: bytes per second, on
    average over that time, that count as data; 0: each byte does.
    """

    user: str = _login(
        "--user", "IMPORTER_ACCESS_KEY_ID", "User or access key.", parse=fields.secret, common=True
    )
    password: str = _login(
        "--password-file",
        "IMPORTER_SECRET_KEY",
        "Password or secret key.",
        parse=fields.secret,
        file=True,
        common=True,
    )
    session_token: str = _login(
        "--session-token-file",
        "IMPORTER_SESSION_TOKEN",
        "Token of temporary S3 keys.",
        parse=fields.token,
        file=True,
    )
    headers: tuple[tuple[str, str], ...] = fields.field(
        (),
        _option(
            option="--header",
            help="HTTP header 'Name: value'; may be repeated.",
            form="HEADER",
            parse=fields.header,
            secret=True,
            lines=True,
        ),
        _option(option="--header-dir", help="Folder of secret HTTP headers, one per file.", form="DIRECTORY"),
    )
    ca_files: tuple[str, ...] = fields.field(
        (),
        _option(
            option="--ca-file",
            common=True,
            help="PEM file with more CA certificates; may be repeated.",
            file=True,
            lines=True,
            verbs=(*fields.SOURCE, "upload", "doctor"),
        ),
        _option(
            option="--ca-dir",
            help="Folder of PEM files with CA certificates to trust.",
            form="DIRECTORY",
            verbs=(*fields.SOURCE, "upload", "doctor"),
        ),
    )
    insecure: bool = fields.field(
        default=False,
        option="--insecure",
        env="INSECURE_TLS",
        key="insecureSkipVerify",
        help="Do not verify TLS certificates.",
        verbs=(*fields.SOURCE, "upload"),
        section=ACCESS,
    )
    http_proxy: str = _proxy(
        env="http_proxy", more=("HTTP_PROXY",), secret=True, help="Proxy for `http` URLs; also in upper case."
    )
    https_proxy: str = _proxy(
        env="https_proxy",
        more=("HTTPS_PROXY",),
        secret=True,
        help="Proxy for `https` URLs; also in upper case.",
    )
    no_proxy: str = _proxy(
        env="no_proxy", more=("NO_PROXY",), help="Hosts and networks without a proxy; also in upper case."
    )
    connections: int = _limit(
        "--connections", "Maximum number of parallel connections.", "NUMBER", 6, least=1, most=64
    )
    patience: float = _limit(
        "--stall-timeout",
        "Fail after so long without data.",
        "SECONDS",
        180.0,
        least=1,
        verbs=(*fields.READ, fields.POD, "upload"),
    )
    min_speed: float = _limit(
        "--min-speed",
        "Give up below so many bytes per second, such as 10M, on average over --stall-timeout; 0: never.",
        "SIZE",
        retry.MIN_SPEED,
        parse=units.parse_quantity,
    )

    @property
    def secret(self) -> bool:
        """Whether it holds what only the server of the address may see."""
        return bool(self.user or self.password or self.session_token or self.headers)

    def __post_init__(self) -> None:
        masking.register(
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
    verbs=fields.READ,
)


class Stage(NamedTuple):
    """A stage of a multi-stage import: the changes from ``previous`` (empty: a full copy) to ``current``."""

    previous: str = ""
    current: str = ""
    final: bool = False


#: Why most sources cannot verify signatures.
UNVERIFIABLE: Final = (
    "only images in a registry have signatures that can be verified; for http, s3, gcs and files "
    "name a signed checksum file"
)
#: For a source that does not tell whether its disk has changed.
CHECKSUM_FILE: Final = errors.Remedy([("give a file with its checksum", "checksum_file")])


@dataclasses.dataclass(frozen=True)
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
                masking.register(self, *([text] if is_secret else masking.address(text)))

    def __init_subclass__(cls) -> None:
        """Let a ``__post_init__`` of ``cls`` end with that of this class, whether it calls it or not."""
        own = cls.__dict__.get("__post_init__")
        if own is None:
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


def file_name(endpoint: str) -> str:
    """Return the last part of a path, of the path of a URL, or of the key of an object, which is as it is."""
    if not endpoint.startswith(("http://", "https://", "file:")):
        return posixpath.basename(endpoint)
    try:
        path = urllib.parse.urlsplit(endpoint).path
    except ValueError:
        return ""
    return urllib.parse.unquote(posixpath.basename(path))


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


@dataclasses.dataclass(frozen=True)
class Opening:
    """What a source needs to be opened.

    ``engine``: for images that the source reads itself, such as the layers of a container image.
    ``signed_by``: the public keys of which one must have signed the disk (``sources.trust``); empty: it need
    not be signed. ``whole``: the whole image will be read, so that connections may be opened early.
    """

    engine: image.Engine = dataclasses.field(default_factory=image.Engine)
    signed_by: str = ""
    whole: bool = False
    owner: str = ""


class Source(image.Readable):
    """One disk image, read over one protocol.

    A source does not know the target, scratch or the plan. It serves raw reads: ``images.image`` retries,
    compares and remembers them. One source serves one import.
    """

    def open(self, opening: Opening) -> Facts:
        """Contact the server; return what it states. Called again after a failure that may pass."""
        raise NotImplementedError

    def image(self, opening: Opening) -> Image:
        """Open the source, and return its image."""
        return Image(self, self.open(opening), opening.engine)

    def digest(self) -> str:
        """Open the source, return its digest, which changes whenever the bytes change, and close it.

        For a source that is not open yet. Raises ``errors.SourceError`` if the server states none.
        """
        with open_image(self) as found:
            name, digest = found.facts.name, found.facts.digest
            if not digest:
                reason = f"{name}: the server states no strong ETag, version or checksum of the disk"
                raise errors.SourceError(reason=reason, remedy=CHECKSUM_FILE)
            return digest


@contextlib.contextmanager
def open_image(source: Source, opening: Opening | None = None) -> Iterator[Image]:
    """Open ``source``, without retries; close it after the block."""
    with contextlib.closing(source):
        yield source.image(opening or Opening())
