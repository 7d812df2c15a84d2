"""What is asked for, as a value: the library's and the contract's common language."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

from cdi_worker import errors, sources
from cdi_worker.formats import checksum
from cdi_worker.images.engine import fetch
from cdi_worker.sources import base

CONTENT_TYPES = ("kubevirt", "archive")
#: The content type of a file system's clone: a tar archive to unpack into a directory, or whose disk is
#: written to a device.
CLONE = "filesystem-clone"

#: Seconds to keep trying before the first answer.
CONNECT_PATIENCE = 20.0
#: Seconds of work that a kill may cost. Each note waits for the storage, so not too few.
JOURNAL_INTERVAL = 10.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One import. Sizes in bytes.

    ``source``: the name of a kind that ``sources.find`` knows. ``target``: a block
    device, the file to make, or, for an archive, the directory to fill. ``image_size``: the size
    asked for, None when the image's own will do. ``overhead``: the part of a file system to leave
    free. ``volume``: the file system that was mounted for this import alone, None for a target among
    things of others. ``direct``: bypass the page cache. ``checksum``: ``ALGORITHM:HEX`` of the bytes as
    served.
    ``connect_patience`` and ``journal_interval`` in seconds.
    """

    source: str
    location: base.Location
    target: str
    volume: str | None = None
    content_type: str = "kubevirt"
    scratch: str | None = None
    image_size: int | None = None
    overhead: Fraction = Fraction(0)
    preallocation: bool = False
    direct: bool = False
    checksum: str | None = None
    connect_patience: float = CONNECT_PATIENCE
    journal_interval: float = JOURNAL_INTERVAL
    fetch: fetch.Options = dataclasses.field(default_factory=fetch.Options)
    owner_uid: str = ""

    @property
    def is_archive(self) -> bool:
        """Whether the bytes must be a tar archive."""
        return self.content_type in {"archive", CLONE}

    @property
    def preallocates(self) -> bool:
        """Whether every byte gets storage. Files from an archive are as sparse as they are in it.

        With preallocation, the source of a clone sends an archive without holes.
        """
        return self.preallocation and self.content_type != "archive"

    @property
    def stage(self) -> base.Stage:
        """The stage of a multi-stage import."""
        return self.location.stage

    @property
    def is_delta(self) -> bool:
        """Whether this stage changes what an earlier stage has left on the target."""
        return bool(self.stage.previous)


def check(made: Request, faults: list[str] | None = None) -> None:
    """Raise ``RequestError`` for a request that makes no sense, with all its faults."""
    faults = list(faults or [])
    if made.content_type not in CONTENT_TYPES:
        faults.append(f"content type {made.content_type!r} is none of {', '.join(CONTENT_TYPES)}")
    if made.is_archive and Path(made.target).is_block_device():
        faults.append("an archive needs a volume with a file system, not a block device")
    try:
        faults += _source_faults(made)
        if made.checksum is not None:
            checksum.parse(made.checksum)
    except errors.RequestError as err:
        faults += err.faults
    if faults:
        raise errors.RequestError(*faults)


def _source_faults(made: Request) -> Iterator[str]:
    kind = sources.find(made.source)
    location = kind.accept(made.location)
    if made.is_archive and not kind.archives:
        yield f"source {made.source!r} cannot give an archive"
    yield from location.faults()
    if location.reads(made.target):
        yield "source and target are the same file"
