"""An import request: made by hand for the library, and of settings (``make``) for everything else."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, get_args

from cdi_worker import errors, lazy, sources, units
from cdi_worker.formats import checksum
from cdi_worker.images import targets
from cdi_worker.images.engine import fetch
from cdi_worker.importer.settings import Existing, Room, Settings
from cdi_worker.sources import base, trust

if TYPE_CHECKING:
    from cdi_worker.images.targets import layout
    from cdi_worker.importer.sampling import Sample
    from cdi_worker.sources.trust import maps

#: What few imports need (start-up time).
LAYOUT: Final = "cdi_worker.images.targets.layout:parse"
FILE_NAME: Final = "cdi_worker.sources.staged:file_name"
CONTENT_TYPES = ("kubevirt", "archive")
#: The content type of a file system's clone: a tar archive, unpacked into a directory; on a device, only its
#: disk is written.
CLONE = "filesystem-clone"

#: Seconds to retry until the source has answered once.
CONNECT_PATIENCE = 20.0
#: Seconds of work that a kill may lose. Each save waits for the storage, so it must not be too short.
JOURNAL_INTERVAL = 10.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One import. Sizes in bytes, times in seconds.

    ``source``: the name of a source for ``sources.find``. ``layers``: qcow2 files of the same kind of source,
    each with what changed since the one before it, the first since the one at ``location``. ``target``: a
    block device, the file to create, the URL of an NBD export, or for an archive the directory to unpack
    into; ``-`` is standard output; empty only to ``inspect``.
    ``image_size``: the disk has at least this size, or the import fails; None for the image's own. ``room``:
    the space that a cluster has made for it. ``direct``: bypass the page cache.
    ``checksum``: ``ALGORITHM:HEX`` of the bytes as served. ``demand``: the signatures that they must have,
    and the map by which they are verified. ``have``: URL or path of the map of the disk that is updated;
    what it says is not read. ``blocks``, ``had``: both maps, which ``contact`` reads.
    ``disk``: of an OVA, by file name, disk id or number, or of an OCI archive, by name or title.

    ``existing``: what becomes of a disk that exists already: ``refuse`` to write, ``replace`` it when the new
    one is complete, ``remove`` it first, where the volume has no space for both, or ``update`` it in place:
    compare all of it and write what differs (``compare`` is set by ``verify``). ``wait``: seconds to wait for
    another run that writes to the target, at least one. ``permissions`` of the disk's file; None: by the
    umask. ``report``: the file of the report (``provenance``), empty: none. ``read_back``: read the finished
    disk once, for its SHA-256. ``write_map``: the file of the disk's block map, empty: none. ``to``: the
    location of a target that is an NBD export, for TLS; None: that of its address alone. ``state``: the
    folder for the journal of an NBD export; empty: an interrupted import starts over. ``sample``: ``verify``
    compares only this much of it. ``format``: of the target's file, ``raw`` or ``qcow2[,OPTION=VALUE…]``;
    empty: raw. ``compress``: write compressed clusters. ``backing``: write an overlay of this file, with what
    differs from it.
    """

    source: str
    location: base.Location
    layers: tuple[base.Location, ...] = ()
    target: str = ""
    room: Room = dataclasses.field(default_factory=Room)
    content_type: str = "kubevirt"
    scratch: str | None = None
    image_size: int | None = None
    preallocation: bool = False
    direct: bool = False
    checksum: str | None = None
    disk: str = ""
    demand: trust.Demand = trust.NOTHING
    have: str = ""
    blocks: maps.Blocks | None = None
    had: maps.Blocks | None = None
    connect_patience: float = CONNECT_PATIENCE
    journal_interval: float = JOURNAL_INTERVAL
    fetch: fetch.Options = dataclasses.field(default_factory=fetch.Options)
    existing: Existing = "refuse"
    wait: float = 0.0
    permissions: int | None = None
    report: str = ""
    read_back: bool = False
    write_map: str = ""
    to: base.Location | None = None
    state: str = ""
    sample: Sample | None = None
    format: str = ""
    compress: bool = False
    backing: str = ""

    @property
    def form(self) -> layout.Qcow2 | None:
        """The qcow2 file to write; None: a raw disk. Raises ``errors.RequestError``."""
        if self.existing == "compare" or not (self.format or self.compress or self.backing):
            return None
        backing = os.path.realpath(self.backing) if self.backing else ""
        made: layout.Qcow2 | None = lazy.load(LAYOUT)(self.format, compress=self.compress, backing=backing)
        return made

    @property
    def is_qcow2(self) -> bool:
        """Whether the finished disk at ``target``, which is only read, is in a qcow2 file."""
        name = self.format.partition(",")[0]
        return name == "qcow2" or (not name and self.target.lower().endswith(".qcow2"))

    @property
    def is_archive(self) -> bool:
        """Whether the bytes must be a tar archive."""
        return self.content_type in {"archive", CLONE}

    @property
    def maps_first(self) -> bool:
        """Whether ``write_map`` is written before the disk is usable, not when it is complete.

        It may replace the map of the disk that is updated. A kill, or a disk that is not read back, must not
        leave that map beside the new disk, where ``have`` would trust it.
        """
        return self.existing == "update" and self.write_map not in {"", targets.STDOUT}

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


#: Fields that have the same name, and the same meaning, in the settings.
_SAME = frozenset(Request.__dataclass_fields__) & set(Settings._fields) - {"layers", "room", "demand"}


def make(source: str, location: base.Location, target: str, settings: Settings) -> Request:
    """Return the request to import the disk at ``location`` to ``target``, which ``execute`` checks."""
    return Request(
        source=source,
        location=location,
        layers=tuple(dataclasses.replace(location, endpoint=layer) for layer in settings.layers),
        target=target,
        room=settings.room or Room(),
        image_size=settings.size,
        demand=trust.Demand(**settings.demand),
        connect_patience=min(CONNECT_PATIENCE, settings.stall),
        fetch=fetch.Options(
            connections=settings.connections, no_progress=settings.stall, slowest=settings.slowest
        ),
        **{name: getattr(settings, name) for name in _SAME},
    )


def of(address: str) -> Request:
    """Return the request for a URL or path, whose kind of source it shows, without a target."""
    return Request(source=sources.of(address).name, location=base.Location(address))


def disk_path(target: str, settings: Settings) -> str:
    """Return the path of the disk: a target that is a folder contains it, unless it is for an archive."""
    if target and settings.content_type != "archive" and targets.is_folder(target):
        return str(pathlib.Path(target, "disk.img"))
    return target


def check(made: Request, faults: list[str] | None = None, *, needs_target: bool = True) -> None:
    """Raise ``RequestError`` that lists all faults of an invalid request."""
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
        faults.append("--checksum and --checksum-file exclude each other")
    try:
        faults += _source_faults(made)
        if made.checksum is not None:
            checksum.parse(made.checksum)
    except errors.RequestError as err:
        faults += err.faults
    if faults:
        raise errors.RequestError(*faults)


def _target_faults(made: Request, needs_target: bool) -> Iterator[str]:
    if needs_target and not made.target:
        yield "no target given: name a file, a directory or a device"
    if made.is_archive and targets.is_block(made.target):
        yield "an archive needs a volume with a file system, not a block device"
    if made.target == targets.STDOUT and made.is_archive:
        yield "an archive cannot be written to standard output; name a folder"
    if made.target == targets.STDOUT and made.stage.current:
        yield "a stage with checkpoints cannot be written to standard output; name a file or a device"
    yield from (_finished_faults if made.existing == "compare" else _format_faults)(made)
    if made.write_map:
        yield from _written_map_faults(made)
    yield from _map_faults(made)
    yield from (_export_faults if targets.is_export(made.target) else _path_faults)(made)
    if made.existing == "update" and (made.is_archive or made.target == targets.STDOUT):
        yield "only a disk on a file or a device can be updated in place (--update)"
    if made.existing == "compare" and (made.is_archive or made.target == targets.STDOUT):
        yield "only a disk in a file or on a device can be verified, not an archive or a stream"


def _written_map_faults(made: Request) -> Iterator[str]:
    if made.is_archive:
        yield "--write-map: an archive has no map, only a disk has"
    if made.is_delta:
        yield "--write-map: changes since a checkpoint are not a disk; use cdi-worker map after it"
    if made.source == "none":
        yield "--write-map: a blank disk has nothing to map"
    if made.write_map == targets.STDOUT == made.report:
        yield "--write-map and --report: standard output gets one of them; name a file for the other"


def _finished_faults(made: Request) -> Iterator[str]:
    """Yield the faults of the format of a finished disk, which is only read."""
    try:
        if made.format or made.backing:
            lazy.load(LAYOUT)(made.format or ("qcow2" if made.is_qcow2 else ""), backing=made.backing)
    except errors.RequestError as err:
        yield from err.faults


def _format_faults(made: Request) -> Iterator[str]:
    if not made.format and made.target.lower().endswith(".qcow2"):
        yield (
            f"{made.target}: a raw disk would get this name; write a qcow2 file with --format qcow2, "
            "or a raw disk with --format raw"
        )
    try:
        if made.form is None:
            return
    except errors.RequestError as err:
        yield from err.faults
        return
    is_file = made.target != targets.STDOUT and not targets.is_export(made.target)
    if not is_file or targets.is_block(made.target):
        yield f"{made.target}: --format qcow2 writes a file; a device, an export and a pipe get a raw disk"
    if made.is_archive or made.stage.current or made.is_delta:
        yield "--format qcow2 is for a whole disk: not for an archive, nor for a stage with checkpoints"
    if made.existing == "update":
        yield "a qcow2 file cannot be updated in place (--update); write an overlay of it with --backing"
    if made.preallocation:
        yield "--preallocate is for raw disks; use --format qcow2,preallocation=falloc"
    if _files(made.backing) & _files(*targets.used(made.target)):
        yield "the target is its own backing file (--backing)"


def _map_faults(made: Request) -> Iterator[str]:
    if made.demand.map and (made.is_archive or made.is_delta or made.layers):
        yield "--map is for one raw disk: not for an archive, layers, or changes since a checkpoint"
    if made.demand.map and made.compress:
        yield "--map: a range may be written twice, and compressed clusters are written once; omit --compress"
    if made.have and made.existing != "update":
        yield "--have is the map of the disk that is updated; add --update"
    if made.have and made.is_delta:
        yield "--have is the map of a whole disk; use it without a previous checkpoint"
    if made.have and made.demand.map and made.read_back:
        yield "--have with --map: what is the same in both is not received, and --verify compares what is"


def _path_faults(made: Request) -> Iterator[str]:
    scheme, separator, _ = made.target.partition("://")
    if separator and not targets.is_folder(f"{scheme}:"):
        yield f"{scheme}:// is not a target; name a file, a directory, a device, or an NBD export (nbd://…)"
    if made.state:
        yield "--state is for the journal of an NBD export; all other targets keep their own"


def _export_faults(made: Request) -> Iterator[str]:
    if made.is_archive:
        yield "an archive cannot be written to an NBD export; name a folder"
    if made.stage.current or made.is_delta:
        yield "a stage with checkpoints cannot be written to an NBD export; name a file or a device"
    if made.state and not targets.is_folder(made.state):
        yield f"{made.state}: --state needs an existing folder"
    location = sources.find("nbd").accept(made.to or base.Location(made.target))
    yield from location.faults()


def _source_faults(made: Request) -> Iterator[str]:
    kind = sources.find(made.source)
    location = kind.accept(made.location)
    if made.is_archive and not kind.archives:
        yield f"source {made.source!r} does not support content type archive"
    yield from location.faults()
    if made.demand.checksum_file and made.is_delta:
        yield "--checksum-file: a checksum is of a whole disk, not of changes since a checkpoint"
    if made.demand.checksum_file and not location.file_name:
        yield f"source {made.source!r}: the disk has no file name to look up in --checksum-file"
    read = (location, *map(kind.accept, made.layers))
    if made.target and any(each.reads(path) for each in read for path in targets.used(made.target)):
        yield "source and target are the same disk"
    yield from _written_faults(made, read)
    if made.layers:
        yield from _layer_faults(made, location)


def _written_faults(made: Request, read: tuple[base.Location, ...]) -> Iterator[str]:
    """Yield a fault for a disk, or a file beside it, that would replace one that is read, or the other.

    The map of the disk that is updated (``have``) may be replaced by that of the new one.
    """
    kept = _files(made.demand.map, made.demand.checksum_file)
    beside = kept | _files(made.have)
    if beside and not beside.isdisjoint(_files(*targets.used(made.target))):
        yield f"{made.target}: would replace a file that is read, a map or checksums; name another target"
    kept |= _files(made.backing)
    for option, path, more in (("--report", made.report, made.have), ("--write-map", made.write_map, "")):
        if path in {"", targets.STDOUT}:
            continue
        is_had = bool(more) and os.path.realpath(path) == os.path.realpath(more)
        if is_had or any(each.reads(path) for each in read) or os.path.realpath(path) in kept:
            yield f"{option} {path}: would replace a file that is read; name another file"
        kept.add(os.path.realpath(path))


def _files(*paths: str | None) -> set[str]:
    """Return the whole paths of files, of the names that are not empty."""
    return {os.path.realpath(path) for path in paths if path}


def _layer_faults(made: Request, first: base.Location) -> Iterator[str]:
    if first.staged and not first.of_files:
        yield f"source {made.source!r} does not support layers (--layer)"
    if made.is_archive:
        yield "layers are files of one disk, not an archive (--layer)"
    if made.checksum is not None or made.demand.checksum_file:
        yield "a checksum is of one file, this disk has several (--layer); import them one after the other"
    last = lazy.load(FILE_NAME)(made.layers[-1].endpoint)
    if made.stage.current not in {"", last}:
        # The disk would be remembered as that of another file, whose delta may then be applied to it.
        yield f"--current-checkpoint {made.stage.current!r}: the last layer (--layer) is {last!r}; name that"
    if len({each.endpoint for each in (first, *made.layers)}) <= len(made.layers):
        yield "a layer is given twice (--layer); give each file once"
    for layer in made.layers:
        if not layer.endpoint:
            yield "a layer without an address (--layer)"
        elif first.access.secret and _host(layer.endpoint) != _host(first.endpoint):
            # They were given for the server of SOURCE.
            yield "credentials and headers are sent to one server; name all layers at the server of SOURCE"


def _host(endpoint: str) -> tuple[str, str]:
    """Return scheme and host of a URL; the same for all others, such as buckets of one store and paths."""
    scheme, separator, rest = endpoint.partition("://")
    is_web = separator and scheme in {"http", "https"}
    return (scheme, rest.partition("/")[0].rpartition("@")[2]) if is_web else ("", "")
