"""The result of an import."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from cdi_worker.formats import checksum
from cdi_worker.importer import plan
from cdi_worker.importer.attempt import Attempt, Counts
from cdi_worker.importer.request import Request
from cdi_worker.importer.survey import Survey
from cdi_worker.sources import base
from cdi_worker.sources.trust import Demanded

if TYPE_CHECKING:
    from cdi_worker.formats import signature
    from cdi_worker.images.sinks import compared


class Result(NamedTuple):
    """The result of an import: what was asked, stated, looked at, planned and done. Sizes in bytes.

    ``facts``: of the disk; ``served``: of what was opened, which may be a package with the disk. ``counts``:
    of the attempt that succeeded. ``provenance``: what the source has shown at the end. ``seconds``: from the
    call to its end.

    ``verified``: digests (``ALGORITHM:HEX``) that the bytes were verified against, by what they are of.
    ``signatures``: the verified signatures. ``sha256``: of the disk, if it is known without reading it again,
    or was read back; else empty. ``confirmed``: bytes that were read back from storage, and are those that
    were received.
    """

    request: Request
    served: base.Facts
    facts: base.Facts
    survey: Survey
    plan: plan.Plan
    counts: Counts
    provenance: base.Provenance
    seconds: float
    verified: Mapping[str, str]
    signatures: tuple[signature.Signature, ...]
    sha256: str = ""
    confirmed: int = 0

    @property
    def source(self) -> str:
        """The address of the disk, without secrets."""
        return self.facts.name

    @property
    def target(self) -> str:
        """The path or URL of the finished disk."""
        return self.request.target

    @property
    def format(self) -> str:
        """The format of the image."""
        return self.survey.format

    @property
    def compressions(self) -> tuple[str, ...]:
        """The compressions around the image, the outermost first."""
        return self.survey.compressions

    @property
    def size(self) -> int:
        """Bytes of the disk, or of the files of an archive."""
        return self.counts.size

    @property
    def read(self) -> int:
        """Bytes read from the source."""
        return self.counts.read

    @property
    def written(self) -> int:
        """Bytes of data written to the target: without zeros, and without what QEMU or an archive writes."""
        return self.counts.written if self.changes is None else self.changes.written

    @property
    def resumed(self) -> int:
        """Bytes moved by an earlier attempt (without holes), and read back."""
        return self.counts.kept

    @property
    def refetched(self) -> int:
        """Bytes written by an earlier attempt that storage did not hold."""
        return self.counts.refetched

    @property
    def layers(self) -> tuple[tuple[str, int], ...]:
        """The files of a chain, with the bytes of the disk that come from each."""
        return self.counts.layers

    @property
    def changes(self) -> compared.Changes | None:
        """What an update in place found."""
        return self.counts.changes

    @property
    def preallocated(self) -> bool:
        """Whether storage is allocated for every byte."""
        return self.request.preallocates

    @property
    def labels(self) -> Mapping[str, str]:
        """The ``kubevirt.io`` labels of the image."""
        return self.provenance.labels

    @property
    def vddk_info(self) -> Mapping[str, str]:
        """The server's details for the termination message (``vddkInfo``)."""
        return self.provenance.info

    @property
    def origin(self) -> str:
        """The address of what was opened: the disk, or a package with it."""
        return self.served.name

    @property
    def identity(self) -> str | None:
        """Which version of ``origin`` it is."""
        return self.served.identity

    def as_fields(self) -> dict[str, object]:
        """Return what ``--json`` prints."""
        fields: dict[str, object] = {
            "source": self.source,
            "target": self.target,
            "format": self.format,
            "compression": list(self.compressions),
            "size": self.size,
            "read": self.read,
            "written": self.written,
            "resumed": self.resumed,
            "refetched": self.refetched,
            "seconds": round(self.seconds, 3),
            "route": str(self.plan.route),
            "reason": self.plan.reason,
            "labels": dict(self.labels),
            "origin": self.origin,
            "identity": self.identity,
            "verified": dict(self.verified),
            "signatures": [dataclasses.asdict(each) for each in self.signatures],
        }
        if self.layers:
            fields["chain"] = [{"name": name, "bytes": count} for name, count in self.layers]
        if self.changes is not None:
            fields["update"] = dataclasses.asdict(self.changes)
        return fields


def of(
    attempt: Attempt, provenance: base.Provenance, whole: base.Image, demanded: Demanded, seconds: float
) -> Result:
    """Return the result of the attempt that succeeded.

    ``whole``: what was opened, which may be a package with the disk; ``demanded``: of the whole.
    """
    served, is_whole = whole.facts, attempt.image.source is whole.source
    if whole.source.disks:
        # Several disks have no bytes in common.
        served = dataclasses.replace(served, identity=attempt.facts.identity)
    # A demanded checksum is that of the whole package.
    checksums = attempt.checksums if is_whole or not demanded.checksum else demanded.checksum
    digests = stated(checksums)
    # Only in this route are the hashed bytes exactly the written ones.
    is_disk = (
        attempt.plan.route is plan.Route.STREAM
        and is_whole
        and demanded.checksum is not None
        and not (attempt.survey.compressions or attempt.counts.resumed)
        and not (attempt.request.is_archive or attempt.request.is_delta)
        and attempt.counts.size == served.size
    )
    of_disk = digests.get("file", "").split(",") if is_disk else ()
    return Result(
        request=attempt.request,
        served=served,
        facts=attempt.facts,
        survey=attempt.survey,
        plan=attempt.plan,
        counts=attempt.counts,
        seconds=seconds,
        provenance=provenance,
        verified={**provenance.verified, **digests},
        signatures=(*served.signatures, *demanded.signatures),
        sha256=dict(each.split(":") for each in of_disk if each).get("sha256", ""),
    )


def stated(checksums: str | None) -> dict[str, str]:
    """Return the checksums of the bytes as served, as ``Result.verified`` has them."""
    return {"file": str(checksum.parse(checksums))} if checksums else {}
