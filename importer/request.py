"""What is asked for, as a value: the library's and the contract's common language."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

from images import fetch
from sources import base

#: Seconds to keep trying before the first answer.
CONNECT_PATIENCE = 20.0
#: Seconds of work that a kill may cost. Each note waits for the storage, so not too few.
JOURNAL_INTERVAL = 10.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One import. Sizes in bytes.

    ``source``: a name of ``sources.MODULES`` or of a third party's entry point. ``target``: a block
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
        return self.content_type == "archive"

    @property
    def preallocates(self) -> bool:
        """Whether every byte gets storage: files out of an archive are as sparse as it says."""
        return self.preallocation and not self.is_archive

    @property
    def is_delta(self) -> bool:
        """Whether this stage changes what an earlier stage has left on the target."""
        return bool(self.location.previous)
