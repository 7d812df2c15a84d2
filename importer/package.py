"""Find the disk in a package that holds disks. The bytes show that a source is one, not its name."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from cdi_worker import errors
from cdi_worker.formats import checksum, detect
from cdi_worker.images import image
from cdi_worker.images.engine import cancelling
from cdi_worker.importer.request import Request
from cdi_worker.sources import base


@contextlib.contextmanager
def unpacked(
    images: tuple[base.Image, ...], source: base.Source, request: Request, cancel: cancelling.Cancel
) -> Iterator[tuple[base.Source, tuple[base.Image, ...], Request]]:
    """Yield the disk in ``source``, its files, and the request for it; any other source as it is.

    ``images``: the files of ``source``. A checksum in the request is of the whole package, whose source
    verifies it.
    """
    disk = _disk(images[0], request, cancel) if len(images) == 1 else None
    if disk is None:
        if request.disk:
            raise errors.RequestError(
                f"{source.name}: neither an OVA nor an OCI archive: it has no disk {request.disk!r} to choose"
            )
        yield source, images, request
        return
    engine = images[0].engine
    with contextlib.closing(disk):
        disk.open(base.Opening(engine))
        yield disk, (image.Image(disk, engine),), dataclasses.replace(request, checksum=None)


def expected(request: Request) -> checksum.Checksum | None:
    """Return the checksum of the whole package, None without one."""
    return None if request.checksum is None else checksum.parse(request.checksum)


def _disk(whole: base.Image, request: Request, cancel: cancelling.Cancel) -> base.Source | None:
    """Return the disk in ``whole``, None if it is not a package."""
    source = whole.served
    if not is_tar(source, request):
        return None
    # Imported when used: few sources are packages (start-up time).
    from cdi_worker.formats.ova import package

    if package.is_ova(source.head):
        from cdi_worker.sources.packages import ova

        return ova.OvaSource(whole, request.disk, expected(request), cancel)
    from cdi_worker.sources.packages import oci

    if oci.is_archive(source.head):
        return oci.PackedSource(whole, request.disk, expected(request), cancel)
    return None


def is_tar(source: base.Source, request: Request) -> bool:
    """Return whether the bytes are a tar archive, and not asked for as one."""
    if source.blank or source.format is not None or request.is_archive:
        return False
    return detect.detect(source.head) == "tar"
