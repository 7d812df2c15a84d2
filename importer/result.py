"""The result of an import."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from cdi_worker.formats import checksum
from cdi_worker.importer import plan
from cdi_worker.importer.request import Request
from cdi_worker.importer.routes.attempt import Attempt
from cdi_worker.sources import base

if TYPE_CHECKING:
    from cdi_worker.formats import bmap, signature
    from cdi_worker.images.sinks import compared
    from cdi_worker.scratch import journal


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """The result of an import. Sizes in bytes; ``read`` counts bytes read from the source.

    ``resumed``: moved by an earlier attempt (without holes), and read back. ``refetched``: written by it, but
    storage did not hold them. ``seconds``: from the call to its end. ``layers``: the files of a chain, with
    the bytes of the disk that come from each. ``changes``: what an update in place found.

    Of the source, as it was served: ``origin``, its name (``source`` may be a part of it), ``served``, its
    size, and ``identity``. ``verified``: digests (``ALGORITHM:HEX``) that its bytes were verified against, by
    what they are of. ``signatures``: the verified signatures. ``sha256``: of the disk, if it is known without
    reading it again, or was read back; else empty. ``confirmed``: bytes that were read back from storage, and
    are those that were received. ``received``: their digests, to read the disk back; not for callers.
    ``map``: of the disk, if one was requested.
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
    confirmed: int = 0
    received: journal.Journal | None = dataclasses.field(default=None, repr=False, compare=False)
    map: bmap.Map | None = dataclasses.field(default=None, repr=False)

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
        if self.map is not None:
            fields["map"] = {"ranges": len(self.map.ranges), "bytes": self.map.mapped}
        return fields


def of(attempt: Attempt, facts: base.Facts, whole: base.Image, request: Request, seconds: float) -> Result:
    """Return the result of the attempt that succeeded.

    ``facts``: those of the disk, known at the end. ``whole``: what was opened, which may be a package with
    the disk; ``request``: that for the package.
    """
    outcome, served = attempt.outcome, whole.facts
    return Result(
        source=facts.name,
        target=attempt.request.target,
        plan=attempt.plan,
        format=attempt.content.format,
        compressions=attempt.content.compressions,
        size=outcome.size,
        read=outcome.read,
        resumed=outcome.kept,
        refetched=outcome.refetched,
        seconds=seconds,
        preallocated=attempt.request.preallocates,
        labels=facts.labels,
        vddk_info=facts.info,
        layers=outcome.layers,
        changes=outcome.changes,
        origin=served.name,
        served=served.size,
        identity=served.identity,
        verified={
            **facts.verified,
            **served.verified,
            **stated(_checksums(attempt, whole, request)),
            **_mapped(attempt.request),
        },
        signatures=served.signatures,
        sha256=_sha256(attempt, whole, request),
        received=outcome.receiving.noted if outcome.receiving else None,
        map=outcome.map,
    )


def stated(checksums: str | None) -> dict[str, str]:
    """Return the checksums of the bytes as served, as ``Result.verified`` has them."""
    return {"file": str(checksum.parse(checksums))} if checksums else {}


def _mapped(request: Request) -> dict[str, str]:
    """Return the digest of the map that verified all bytes of the disk; none if some were not read."""
    return {"map": request.blocks.digest} if request.blocks and not request.had else {}


def _checksums(attempt: Attempt, whole: base.Image, request: Request) -> str:
    """Return the checksums of the bytes as served that were verified; may be empty."""
    # The checksum of a request for a package is that of the whole.
    if attempt.image.source is not whole.source and request.checksum:
        return request.checksum
    return attempt.checksums


def _sha256(attempt: Attempt, whole: base.Image, request: Request) -> str:
    """Return the SHA-256 of the disk, if the checksum of the request is one; else empty."""
    # In this route alone, the bytes that were hashed are those that were written, all of them.
    is_same = (
        attempt.plan.route is plan.Route.STREAM
        and attempt.image.source is whole.source
        and request.checksum is not None
        and not (attempt.content.compressions or attempt.outcome.resumed)
        and not (request.is_archive or request.is_delta or attempt.request.had)
        and attempt.outcome.size == whole.facts.size
    )
    digests = stated(_checksums(attempt, whole, request)).get("file", "") if is_same else ""
    return dict(each.split(":") for each in digests.split(",") if each).get("sha256", "")
