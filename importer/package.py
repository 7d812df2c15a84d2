"""Find the disk in a package that holds disks. The bytes show that a source is one, not its name."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from cdi_worker import errors
from cdi_worker.formats import checksum, detect
from cdi_worker.images.engine import cancelling
from cdi_worker.importer.request import Request
from cdi_worker.sources import base


@contextlib.contextmanager
def unpacked(
    whole: base.Image, request: Request, cancel: cancelling.Cancel
) -> Iterator[tuple[base.Image, Request]]:
    """Yield the disk in ``whole``, and the request for it; any other image as it is.

    A checksum in the request is of the whole package, whose source verifies it.
    """
    # Only the file of a delta may be in a package, too, not those of a chain.
    source = _disk(whole.files[0], request, cancel) if len(whole.files) == 1 else None
    if source is None:
        if request.disk:
            reason = f"neither an OVA nor an OCI archive: it has no disk {request.disk!r} to choose"
            raise errors.RequestError(f"{whole.facts.name}: {reason}")
        yield whole, request
        return
    with base.opened(source, base.Opening(whole.engine)) as disk:
        yield disk, dataclasses.replace(request, checksum=None)


def expected(request: Request) -> checksum.Checksum | None:
    """Return the checksum of the whole package, None without one."""
    return None if request.checksum is None else checksum.parse(request.checksum)


def _disk(whole: base.Image, request: Request, cancel: cancelling.Cancel) -> base.Source | None:
    """Return the disk in ``whole``, None if it is not a package."""
    head = whole.facts.head
    if not is_tar(whole.facts, request):
        return None
    # Imported when used: few sources are packages (start-up time).
    from cdi_worker.formats.ova import package

    if package.is_ova(head):
        from cdi_worker.sources.packages import ova

        return ova.OvaSource(whole, request.disk, expected(request), cancel)
    from cdi_worker.sources.packages import oci

    if oci.is_archive(head):
        return oci.PackedSource(whole, request.disk, expected(request), cancel)
    return None


def is_tar(facts: base.Facts, request: Request) -> bool:
    """Return whether the bytes are a tar archive, and not asked for as one."""
    if facts.blank or facts.format is not None or request.is_archive:
        return False
    return detect.detect(facts.head) == "tar"
