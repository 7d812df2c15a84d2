"""An import request: made by hand for the library, and by ``make`` for everything else."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeAlias, get_args

from cdi_worker import errors, sources, units
from cdi_worker.formats import checksum
from cdi_worker.images import targets
from cdi_worker.images.engine import fetch
from cdi_worker.images.targets import file_format
from cdi_worker.importer import contract
from cdi_worker.sources import base, fields, trust

if TYPE_CHECKING:
    from fractions import Fraction


CONTENT_TYPES = ("kubevirt", "archive")
#: The content type of a file system's clone: a tar archive, unpacked into a directory; on a device, only its
#: disk is written.
CLONE = "filesystem-clone"

#: What becomes of a disk that exists: see ``Request``.
Existing: TypeAlias = Literal["refuse", "replace", "remove", "update"]

#: Names that a raw disk does not get unasked: tools that go by the name would misread it.
_OTHERS = (".qcow2", ".vmdk", ".vdi", ".vhd", ".vhdx", ".ova", ".gz", ".xz", ".zst", ".bz2")
_ORDER = "SOURCE comes first, then TARGET"
#: What a program writes in place of an address.
_EXAMPLE = "Request(location=cdi_worker.Location(URL), target=…)"

#: Sections of the help.
SOURCE, SIGNATURE, DISK, WRITING, OUTPUT = "Source", "Signature", "Disk", "Writing", "Output"
_source = functools.partial(fields.field, section=SOURCE, verbs=fields.READ)
_writing = functools.partial(fields.field, section=WRITING, verbs=("import", "blank"))
_room_size = functools.partial(fields.Field, parse=units.parse_quantity, part="size")
_existing = functools.partial(fields.Field, section=WRITING, verbs=("import", "blank"))
_demand = functools.partial(fields.Field, section=SIGNATURE, verbs=(*fields.READ, fields.POD))
_read_back = functools.partial(
    fields.Field,
    help="Read the disk back, compare it, and print its SHA-256.",
    flag=True,
    section=OUTPUT,
)

#: Seconds to retry until the source has answered once.
CONNECT_PATIENCE = 20.0
#: Seconds of work that a kill may lose. Each save waits for the storage, so it must not be too short.
JOURNAL_INTERVAL = 10.0


class Room(NamedTuple):
    """The space for a disk, as a cluster has made it. Sizes in bytes.

    ``size``: of the volume; the disk is the largest that fits. ``limit``: the largest disk for a file system,
    however much is free. ``overhead``: the fraction of a file system to leave free. ``mount``: the mount
    point of a file system that contains nothing but this import's target, else None. ``owner``: whose volume
    it is; what was written for another owner is not resumed.
    """

    size: int | None = None
    limit: int | None = None
    overhead: Fraction | int = 0
    mount: str | None = None
    owner: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One import. Sizes in bytes, times in seconds.

    ``source``: the name of a kind of source; empty: that of the address. ``layers``: qcow2 files of the same
    kind of source, each with what changed since the one before it, the first since the one at ``location``.
    ``target``: a block device, the file to create, the URL of an NBD export, or for an archive the directory
    to unpack into; ``-`` is standard output; empty only to ``inspect``.
    ``image_size``: the disk has at least this size, or the import fails; None for the image's own. ``room``:
    the space that a cluster has made for it. ``direct``: bypass the page cache.
    ``checksum``: ``ALGORITHM:HEX`` of the bytes as served. ``demand``: the signatures that they must have.
    ``disk``: of an OVA, by file name, disk id or number; of a machine, by label, path, key or number; of an
    OCI archive, by name or title.

    ``existing``: what becomes of a disk that exists already: ``refuse`` to write, ``replace`` it when the new
    one is complete, ``remove`` it first, where the volume has no space for both, or ``update`` it in place:
    compare all of it and write what differs. ``wait``: seconds to wait for another run that writes to the
    target, at least one. ``permissions`` of the disk's file; None: by the umask. ``read_back``: read the
    finished disk once, for its SHA-256. ``to``: the location of a target that is an NBD export, for TLS;
    None: that of its address alone. ``format``: of the target's file, ``raw`` or ``qcow2[,OPTION=VALUE…]``;
    empty: raw.
    """

    source: str = ""
    location: base.Location
    content_type: str = _source(
        "kubevirt",
        option="--content-type",
        env="IMPORTER_CONTENTTYPE",
        help="kubevirt: a disk; archive: a tar archive, which is unpacked into a folder.",
        choices=CONTENT_TYPES,
    )
    layers: tuple[base.Location, ...] = _source(
        (),
        option="--layer",
        help="qcow2 file with what changed since the source, or the layer before; repeated, oldest first.",
        form="URL",
        lines=True,
        verbs=(*fields.READ, fields.POD),
    )
    checksum: str | None = _source(
        None,
        option="--checksum",
        common=True,
        env="IMPORTER_CHECKSUM",
        key="checksum",
        help="Checksum ALGORITHM:HEX of the bytes as served (md5, sha1, sha256, sha512).",
    )
    disk: str = _source(
        option="--disk",
        common=True,
        env="CDI_WORKER_DISK",
        help="Which disk of an OVA or a machine (name, id, number) or OCI archive [default: the only one].",
    )
    target: str = ""
    room: Room = fields.field(
        Room(),
        _room_size(
            env="IMPORTER_IMAGE_SIZE",
            help="Requested size as a quantity: `10Gi`, `500M`, `1e9`; otherwise the size of the image.",
        ),
        _room_size(
            env="UPLOAD_IMAGE_SIZE",
            help="Requested size, as `IMPORTER_IMAGE_SIZE`.",
            roles=(fields.UPLOAD_SERVER,),
        ),
        fields.Field(
            option="--overhead",
            env="FILESYSTEM_OVERHEAD",
            roles=(fields.IMPORTER, fields.UPLOAD_SERVER),
            help="Fraction of the file system to leave free, such as 0.06.",
            form="FRACTION",
            parse=contract.parse_overhead,
            part="overhead",
            verbs=("import", "inspect"),
            section=DISK,
        ),
        fields.Field(
            env="OWNER_UID",
            help="Label of the metrics; a resumed import must have the same one.",
            part="owner",
        ),
    )
    image_size: int | None = fields.field(
        None,
        option="--size",
        common=True,
        help="Size of the disk, such as 10Gi: the image is grown.",
        form="SIZE",
        parse=units.parse_quantity,
        verbs=("import",),
        section=DISK,
    )
    scratch: str | None = _writing(
        None,
        option="--scratch",
        help="Folder for images that cannot be streamed.",
        folder=True,
        verbs=("import", "verify"),
    )
    preallocation: bool = _writing(
        default=False,
        option="--preallocate",
        env="PREALLOCATION",
        strict=True,
        roles=(fields.IMPORTER, fields.UPLOAD_SERVER),
        help="Allocate storage for every byte of the disk.",
    )
    direct: bool = _writing(
        default=False,
        option="--direct",
        env="CACHE_MODE",
        on="TRYNONE",
        help="Bypass the page cache (O_DIRECT).",
        verbs=("import", "blank", fields.POD),
    )
    existing: Existing = fields.field(
        "refuse",
        _existing(
            option="--force",
            common=True,
            sets="replace",
            help="Replace an existing file, or what a device holds.",
        ),
        _existing(
            option="--update",
            common=True,
            sets="update",
            help="Change an existing disk in place: compare all of it, and write only what differs.",
            verbs=("import", fields.POD),
        ),
        _existing(
            option="--verify",
            sets=contract.COMPARE,
            help="Compare the disk on the volume with the source, instead of importing it.",
            verbs=(fields.POD,),
        ),
    )
    wait: float = _writing(
        0.0,
        option="--wait",
        help="Wait so long for another run that writes to TARGET.",
        form="SECONDS",
        parse=float,
        least=0,
    )
    format: str = _writing(
        option="--format",
        common=True,
        short="-O",
        help="Format of the file: raw, or qcow2[,cluster_size=…,preallocation=…].",
        form="FORMAT",
        verbs=("import", "blank", "verify"),
    )
    read_back: bool = fields.field(
        False,
        _read_back(option="--verify", common=True, verbs=("import",)),
        _read_back(option="--read-back", verbs=(fields.POD,)),
    )
    demand: trust.Demand = fields.field(
        trust.NOTHING,
        _demand(
            option="--checksum-file",
            common=True,
            help="URL or path of a file with the checksum (SHA256SUMS).",
            form="URL",
            part="checksum_file",
        ),
        _demand(
            option="--signed-by",
            help="Public keys, in a file or a folder: import only what one of them has signed. "
            "PEM for images in a registry; OpenPGP for --checksum-file.",
            form="FILE",
            part="signed_by",
        ),
    )
    connect_patience: float = CONNECT_PATIENCE
    journal_interval: float = JOURNAL_INTERVAL
    fetch: fetch.FetchOptions = dataclasses.field(default_factory=fetch.FetchOptions)
    permissions: int | None = None
    to: base.Location | None = None

    #: Whether the disk at ``target`` is compared with the source, and not written.
    compares: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_type(self.location, "Location(URL)")
        if not self.source:
            object.__setattr__(self, "source", sources.of(self.location.endpoint).name)

    @property
    def form(self) -> file_format.Qcow2Format | None:
        """The qcow2 file to write; None: a raw disk. Raises ``errors.RequestError``."""
        return file_format.parse(self.format) if self.format and not self.compares else None

    @property
    def is_qcow2(self) -> bool:
        """Whether the finished disk at ``target``, which is only read, is in a qcow2 file."""
        name = self.format.partition(",")[0]
        return name == "qcow2" or (not name and self.target.lower().endswith(".qcow2"))

    @property
    def in_pod(self) -> bool:
        """Whether the target is on a volume of a pod, which has nothing else."""
        return self.existing == "remove" or self.room.mount is not None

    @property
    def is_archive(self) -> bool:
        """Whether the bytes must be a tar archive."""
        return self.content_type in {"archive", CLONE}

    @property
    def size(self) -> int | None:
        """The requested size, of the disk or of its volume."""
        return self.room.size if self.image_size is None else self.image_size

    @property
    def disk_size(self) -> int | None:
        """``size`` in whole sectors, which every disk has."""
        return None if self.size is None else units.whole_sectors(self.size)

    @property
    def is_exact(self) -> bool:
        """Whether ``disk_size`` is that of the disk; else the disk is the largest that fits."""
        return self.image_size is not None

    @property
    def preallocates(self) -> bool:
        """Whether storage is allocated for every byte. Files of an archive are as sparse as in the archive.

        A clone is preallocated too: its source then sends an archive without holes.
        """
        return self.preallocation and self.content_type != "archive"

    @property
    def stage(self) -> base.Stage:
        """The stage of a multi-stage import."""
        return self.location.stage

    @property
    def is_delta(self) -> bool:
        """Whether this stage applies changes to the disk of an earlier stage."""
        return bool(self.stage.previous)


class Comparison(Request):
    """The request to compare the disk at ``target``, as ``verify`` does."""

    __slots__ = ()
    compares = True


def make(source: str, location: base.Location, target: str, settings: Mapping[str, Any]) -> Request:
    """Return the request to import the disk at ``location`` to ``target``, which ``execute`` checks.

    ``settings``: what an administrator or a command line has set, by field of the request. ``layers`` are
    addresses, read with the access of ``location``, which also sets the limits of the fetch engine.
    """
    access = location.access
    layers = tuple(dataclasses.replace(location, endpoint=each) for each in settings.get("layers", ()))
    made, values = Request, {**settings, "layers": layers}
    if values.get("existing") == contract.COMPARE:
        made, values["existing"] = Comparison, "replace"
    return made(
        source=source,
        location=location,
        target=target,
        connect_patience=min(CONNECT_PATIENCE, access.patience),
        fetch=fetch.FetchOptions(
            connections=access.connections, no_progress=access.patience, min_speed=access.min_speed
        ),
        **values,
    )


def resolved(made: Request) -> Request:
    """Check a request to write a disk, and return it with the file that a link to its target leads to.

    Raises ``errors.RequestError`` that lists all faults.
    """
    check(made)
    if made.in_pod:
        # On a volume, an earlier pod may have created a link that leads to other mounts.
        return made
    return dataclasses.replace(made, target=targets.follow_link(made.target))


def comparing(made: Request) -> Request:
    """Return the request to compare the disk at its target, and check it."""
    _check_type(made, _EXAMPLE)
    values = {each.name: getattr(made, each.name) for each in dataclasses.fields(made)}
    made = Comparison(**{**values, "existing": "replace"})
    check(made)
    return made


def for_disks(made: Request, names: Sequence[str]) -> list[Request]:
    """Return the request for each of several disks, to a file of that name in the folder ``target``.

    Raises ``errors.RequestError``.
    """
    paths = [targets.follow_link(pathlib.Path(made.target, name)) for name in names]
    files = [os.path.realpath(path) for path in paths]
    for path, file in zip(paths, files, strict=True):
        if files.count(file) > 1:
            remedy = errors.Remedy([("choose each", "disk")])
            raise errors.RequestError(f"two disks would be {path}", remedy=remedy)
    requests = [dataclasses.replace(made, target=path, disk="") for path in paths]
    for each in requests:
        # The package may have the name of one of its disks, or one that its run removes.
        check(each)
    return requests


def for_upload(made: Request, content_type: str, checksum_text: str | None, owner: str) -> Request:
    """Return the request for one upload to a server, whose request is ``made``. ``owner``: see ``Room``.

    An archive goes to the folder of the disk. Raises ``errors.RequestError``.
    """
    if checksum_text is not None:
        checksum.parse(checksum_text)
    on_device = targets.is_block(made.target)
    if content_type == "archive" and on_device:
        raise errors.RequestError("an archive needs a volume with a file system, not a block device")
    in_folder = content_type != "kubevirt" and not on_device
    return dataclasses.replace(
        made,
        content_type=content_type,
        checksum=checksum_text,
        target=str(pathlib.Path(made.target).parent) if in_folder else made.target,
        room=made.room._replace(owner=owner),
    )


def disk_path(target: str, settings: Mapping[str, Any]) -> str:
    """Return the path of the disk: a target that is a folder contains it, unless it is for an archive."""
    if target and settings.get("content_type") != "archive" and targets.is_folder(target):
        return str(pathlib.Path(target, "disk.img"))
    return target


def check(made: Request, faults: list[str] | None = None, *, needs_target: bool = True) -> None:
    """Raise ``RequestError`` that lists all faults of an invalid request."""
    _check_type(made, _EXAMPLE)
    faults = [*(faults or []), *_target_faults(made, needs_target)]
    if made.content_type not in CONTENT_TYPES:
        hint = errors.supported(made.content_type, CONTENT_TYPES)
        faults.append(f"unknown content type {made.content_type!r}; {hint}")
    if made.existing not in get_args(Existing):
        hint = errors.supported(made.existing, get_args(Existing))
        faults.append(f"unknown value of existing {made.existing!r}; {hint}")
    if made.image_size is not None and made.image_size < 1:
        faults.append(f"a disk of {made.image_size} bytes; give its size, or leave it out")
    faults += made.demand.faults()
    if made.demand.checksum_file and made.checksum is not None:
        faults.append("a checksum and a checksum file exclude each other")
    try:
        faults += _source_faults(made)
        if made.checksum is not None:
            checksum.parse(made.checksum)
    except errors.RequestError as err:
        faults += err.faults
    if faults:
        raise errors.RequestError(*faults)


def of(address: str) -> Request:
    """Return the request for a URL or path without a target."""
    return Request(location=base.Location(address))


def _check_type(given: object, wanted: str) -> None:
    """Raise ``RequestError`` for an address in place of a request or of its location."""
    if not isinstance(given, Request | base.Location):
        raise errors.RequestError(f"expected cdi_worker.{wanted}, not {type(given).__name__}")


def _target_faults(made: Request, needs_target: bool) -> Iterator[str]:
    is_stream, is_export = made.target == targets.STDOUT, targets.is_export(made.target)
    is_block, is_stage = targets.is_block(made.target), bool(made.stage.current or made.is_delta)
    if needs_target and not made.target:
        yield "no target given: name a file, a directory or a device"
    if made.is_archive and is_block:
        yield "an archive needs a volume with a file system, not a block device"
    if made.is_archive and is_stream:
        yield "an archive cannot be written to standard output; name a folder"
    if made.stage.current and is_stream:
        yield "a stage with checkpoints cannot be written to standard output; name a file or a device"
    form = None
    try:
        form = file_format.parse(made.format)
    except errors.RequestError as err:
        yield from err.faults
    scheme, separator, _ = made.target.partition("://")
    swapped = _swapped(made) if made.existing == "refuse" and not is_stage else ""
    if separator and not is_export and not targets.is_folder(f"{scheme}:"):
        where = "a file, a directory, a device, or an NBD export (nbd://…)"
        yield f"{scheme}:// is not a target; name {where}; {_ORDER}"
    elif swapped:
        yield f"{swapped}; {_ORDER}"
    elif not (made.compares or made.format or is_block or is_export or made.is_archive):
        name = made.target.lower()
        if name.endswith(_OTHERS):
            way = "write a qcow2 file with --format qcow2" if name.endswith(".qcow2") else "name it disk.img"
            yield f"{made.target}: a raw disk would get this name; {way}, or keep it with --format raw"
    if not made.compares and form is not None:
        if is_stream or is_export or is_block:
            where = f"{made.target}: --format qcow2 writes a file"
            yield f"{where}; a device, an export and a pipe get a raw disk"
        if made.is_archive or is_stage:
            yield "--format qcow2 is for a whole disk: not for an archive, nor for a stage with checkpoints"
        if made.existing == "update":
            yield "a qcow2 file cannot be updated in place; replace it"
        if made.preallocation:
            yield "a qcow2 file is preallocated by its format: qcow2,preallocation=falloc"
    if is_export:
        if made.is_archive:
            yield "an archive cannot be written to an NBD export; name a folder"
        if is_stage:
            yield "a stage with checkpoints cannot be written to an NBD export; name a file or a device"
        yield from sources.find("nbd").accept(made.to or base.Location(made.target)).faults()
    if made.existing == "update" and (made.is_archive or is_stream):
        yield "only a disk on a file or a device can be updated in place"
    if made.compares and (made.is_archive or is_stream):
        yield "only a disk in a file or on a device can be verified, not an archive or a stream"


def _swapped(made: Request) -> str:
    """Return what suggests that a local source and its target are swapped; empty: nothing."""
    path, target = made.location.endpoint, made.target
    is_path = made.source == "local" and path not in {"", "-"} and not path.lower().startswith("file:")
    # One that cannot be inspected is reported when it is opened.
    with contextlib.suppress(PermissionError, ValueError):
        if (
            is_path
            and not pathlib.Path(path).exists()
            and (targets.is_file(target) or targets.is_block(target))
        ):
            return errors.Unreachable(url=path, reason="no such file or directory").at_terminal()
        if is_path and targets.is_block(path) and targets.is_file(target):
            reason = f"exists, and {path} is a device"
            return errors.TargetExists(path=target, reason=reason).at_terminal()
    return ""


def _source_faults(made: Request) -> Iterator[str]:
    kind = sources.find(made.source)
    location = kind.accept(made.location)
    if made.is_archive and not kind.archives:
        yield f"source {made.source!r} does not support content type archive"
    yield from location.faults()
    if made.demand.checksum_file and made.is_delta:
        yield "a checksum file has the checksum of a whole disk, not of changes since a checkpoint"
    if made.demand.checksum_file and not location.file_name:
        yield f"source {made.source!r}: the disk has no file name to look up in the checksum file"
    read = (location, *map(kind.accept, made.layers))
    if made.target and any(each.reads(path) for each in read for path in targets.names_used(made.target)):
        yield targets.SAME_DISK
    sums, names = made.demand.checksum_file, targets.names_used(made.target)
    if sums and os.path.realpath(sums) in {os.path.realpath(path) for path in names if path}:
        yield f"{made.target}: would replace a file that is read, the checksums; name another target"
    if not made.layers:
        return
    if location.staged and not location.of_files:
        yield f"source {made.source!r} does not support layers"
    if made.is_archive:
        yield "layers are files of one disk, not an archive"
    if made.checksum is not None or made.demand.checksum_file:
        yield "a checksum is of one file, this disk has several; import them one after the other"
    last = base.file_name(made.layers[-1].endpoint)
    if made.stage.current not in {"", last}:
        # The disk would be remembered as that of another file, whose delta may then be applied to it.
        text = f"{{}} {made.stage.current!r}: the last layer is {last!r}; name that"
        yield fields.Fault(text, "IMPORTER_CURRENT_CHECKPOINT", "--current-checkpoint")
    if len({each.endpoint for each in (location, *made.layers)}) <= len(made.layers):
        yield "a layer is given twice; give each file once"
    for layer in made.layers:
        if not layer.endpoint:
            yield "a layer without an address"
        elif location.access.secret and _host(layer.endpoint) != _host(location.endpoint):
            # They were given for the server of SOURCE.
            yield "credentials and headers are sent to one server; name all layers at that of the first file"


def _host(endpoint: str) -> tuple[str, str]:
    """Return scheme and host of a URL; the same for all others, such as buckets of one store and paths."""
    scheme, separator, rest = endpoint.partition("://")
    is_web = separator and scheme in {"http", "https"}
    return (scheme, rest.partition("/")[0].rpartition("@")[2]) if is_web else ("", "")
