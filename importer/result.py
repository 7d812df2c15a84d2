"""The result of an import."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from cdi_worker.importer import plan

if TYPE_CHECKING:
    from cdi_worker.formats import signature
    from cdi_worker.images.sinks import compared


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """The result of an import. Sizes in bytes; ``read`` counts bytes read from the source.

    ``resumed``: written by an earlier attempt, and read back. ``refetched``: also written by it, but storage
    did not hold them. ``layers``: the files of a chain, with the bytes of the disk that come from each.
    ``changes``: what an update in place found.

    Of the source, as it was served: ``origin``, its name (``source`` may be a part of it), ``served``, its
    size, and ``identity``. ``verified``: digests (``ALGORITHM:HEX``) that its bytes were verified against, by
    what they are of. ``signatures``: the verified signatures. ``sha256``: of the disk, if it is known without
    reading it again; else empty.
    """

    source: str
    target: str
    plan: plan.Plan
    format: str
    compressions: tuple[str, ...]
    size: int
    read: int
    resumed: int
    refetched: int
    seconds: float
    preallocated: bool
    labels: Mapping[str, str]
    vddk_info: Mapping[str, str]
    layers: tuple[tuple[str, int], ...] = ()
    changes: compared.Changes | None = None
    origin: str = ""
    served: int | None = None
    identity: str | None = None
    verified: Mapping[str, str] = dataclasses.field(default_factory=dict)
    signatures: tuple[signature.Signature, ...] = ()
    sha256: str = ""

    def as_fields(self) -> dict[str, object]:
        """Return what ``--json`` prints and reports contain."""
        fields: dict[str, object] = {
            "source": self.source,
            "target": self.target,
            "format": self.format,
            "compression": list(self.compressions),
            "size": self.size,
            "read": self.read,
            "resumed": self.resumed,
            "refetched": self.refetched,
            "seconds": round(self.seconds, 3),
            "route": str(self.plan.route),
            "reason": self.plan.reason,
            "labels": dict(self.labels),
        }
        if self.layers:
            fields["chain"] = [{"name": name, "bytes": count} for name, count in self.layers]
        if self.changes is not None:
            fields["update"] = dataclasses.asdict(self.changes)
        return fields
