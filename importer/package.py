"""Find the disk in a package that holds disks. The bytes show that a source is one, not its name."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import pathlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

from cdi_worker import errors
from cdi_worker.formats import checksum, detect
from cdi_worker.images import image, targets
from cdi_worker.images.engine import cancelling
from cdi_worker.importer.request import Request
from cdi_worker.sources import base

if TYPE_CHECKING:
    from cdi_worker.formats.ova import descriptor

log = logging.getLogger(__name__)


class Run(Protocol):
    """Imports a disk as requested."""

    def __call__(self, disk: base.Source, request: Request) -> None: ...


@contextlib.contextmanager
def unpacked(
    images: tuple[base.Image, ...], source: base.Source, request: Request, cancel: cancelling.Cancel
) -> Iterator[tuple[base.Source, tuple[base.Image, ...], Request]]:
    """Yield the disk in ``source``, its files, and the request for it; any other source as it is.

    ``images``: the files of ``source``. A checksum in the request is of the whole package, whose source
    verifies it.
    """
    found = _found(images[0], request, cancel) if len(images) == 1 else None
    if found is None:
        if request.disk:
            raise errors.RequestError(
                f"{source.name}: neither an OVA nor an OCI archive: it has no disk {request.disk!r} to choose"
            )
        yield source, images, request
        return
    engine = images[0].engine
    with contextlib.closing(found):
        found.open(base.Opening(engine))
        yield found, (image.Image(found, engine),), dataclasses.replace(request, checksum=None)


def each(
    whole: base.Image,
    request: Request,
    cancel: cancelling.Cancel,
    claim: Callable[[Request], None],
    run: Run,
) -> None:
    """Call ``run`` with each disk in ``whole``, an OVA, and the request for a file of its own.

    Before the first, ``claim`` is called with the request for each. Raises ``errors.RequestError`` if it is
    not an OVA.
    """
    if not _is_ova(whole.served, request):
        raise errors.RequestError(f"{whole.served.name}: not an OVA; import its disk without --all")
    from cdi_worker.sources.packages import every

    def begin(disks: tuple[descriptor.Disk, ...]) -> list[Callable[[base.Source], None]]:
        paths = [targets.followed(pathlib.Path(request.target, every.image_name(disk))) for disk in disks]
        for path in paths:
            if paths.count(path) > 1:
                raise errors.RequestError(f"two disks would be {path}; choose each with --disk")
        asked = [dataclasses.replace(request, target=path, checksum=None, disk="") for path in paths]
        # Sorted, because two runs could wait for each other's claims otherwise.
        for each in sorted(asked, key=lambda each: each.target):
            claim(each)
        return [functools.partial(run, request=each) for each in asked]

    every.each(whole, _expected(request), cancel, begin)


def _expected(request: Request) -> checksum.Checksum | None:
    return None if request.checksum is None else checksum.parse(request.checksum)


def _found(whole: base.Image, request: Request, cancel: cancelling.Cancel) -> base.Source | None:
    """Return the disk in ``whole``, None if it is not a package."""
    source = whole.served
    if not _is_tar(source, request):
        return None
    # Imported when used: few sources are packages (start-up time).
    from cdi_worker.formats.ova import package

    if package.is_ova(source.head):
        from cdi_worker.sources.packages import ova

        return ova.OvaSource(whole, request.disk, _expected(request), cancel)
    from cdi_worker.sources.packages import oci

    if oci.is_archive(source.head):
        return oci.PackedSource(whole, request.disk, _expected(request), cancel)
    return None


def _is_ova(source: base.Source, request: Request) -> bool:
    from cdi_worker.formats.ova import package

    return _is_tar(source, request) and package.is_ova(source.head)


def _is_tar(source: base.Source, request: Request) -> bool:
    if source.blank or source.format is not None or request.is_archive:
        return False
    return detect.detect(source.head) == "tar"
