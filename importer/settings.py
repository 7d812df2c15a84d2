"""The settings of an import, in one form for all front ends: each translates its own words into them.

``request.make`` makes the request, the only place that does. Roles that import nothing load this module too:
it imports little (start-up time).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from fractions import Fraction

    from cdi_worker.importer.sampling import Sample
    from cdi_worker.sources import base

#: What becomes of a disk that exists: see ``request.Request``.
Existing: TypeAlias = Literal["refuse", "replace", "remove", "update", "compare"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Room:
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


class Settings(NamedTuple):
    """The settings of an import; those that have the name of a field of ``request.Request`` are that field.

    ``layers``: the addresses of the other files of a chain. ``size``: of the disk, in bytes. ``demand``: the
    fields of ``sources.trust.Demand``. ``connections``: in parallel. ``stall``: seconds without data after
    which a source fails; ``slowest``: bytes per second that count as data.
    """

    layers: tuple[str, ...] = ()
    content_type: str = "kubevirt"
    scratch: str | None = None
    size: int | None = None
    room: Room | None = None
    preallocation: bool = False
    direct: bool = False
    checksum: str | None = None
    disk: str = ""
    demand: Mapping[str, Any] = MappingProxyType({})
    have: str = ""
    existing: Existing = "refuse"
    wait: float = 0.0
    permissions: int | None = None
    connections: int = 6
    stall: float = 180.0
    slowest: float = 1024.0
    state: str = ""
    format: str = ""
    compress: bool = False
    backing: str = ""
    report: str = ""
    read_back: bool = False
    write_map: str = ""
    verify: bool = False
    sample: Sample | None = None

    def refuse_demand(self, name: str, reason: str) -> None:
        """Raise ``errors.Untrusted`` if a signature is demanded of ``name``, which has none."""
        if self.demand.keys() <= {"policy"}:
            # A policy concerns images.
            return
        from cdi_worker.sources import trust

        trust.Demand(**self.demand).refuse(name, reason)

    def access(self, **login: Any) -> base.Access:
        """Return the access to a server, with these fields of ``base.Access``."""
        from cdi_worker.sources import base

        return base.Access(connections=self.connections, patience=self.stall, slowest=self.slowest, **login)


#: Where nothing is set.
DEFAULT = Settings()
