"""Targets behind NBD, what is at a target, and finished disks, which are only read."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final, NamedTuple

from cdi_worker import errors, sources, units
from cdi_worker.images import targets
from cdi_worker.images.engine import cancelling
from cdi_worker.images.targets import export, storage
from cdi_worker.sources import base

if TYPE_CHECKING:
    from cdi_worker.images.targets import remote
    from cdi_worker.importer.request import Request


#: What becomes of a disk that exists, by ``Request.existing``.
_AT_TERMINAL: Final = {
    "refuse": "needs --force",
    "replace": "is replaced",
    "remove": "is replaced",
    "update": "is changed in place",
}


def connect(request: Request, cancel: cancelling.Cancel) -> remote.Connect:
    """Return what connects to an NBD export for the target of a request. Raises ``errors.MissingExtra``."""
    from cdi_worker.sources.nbd import handshake, locations, writer

    handshake.library()

    def connected(url: str, *, writable: bool = True, name: str = "") -> remote.Device:
        # qemu-nbd on this machine is waited for as long as a remote server.
        location = sources.find("nbd").accept(request.to or base.Location(request.target))
        assert isinstance(location, locations.Nbd)  # noqa: S101  (the class of this kind)
        patience = min(location.access.patience, request.fetch.no_progress)
        access = dataclasses.replace(location.access, patience=patience)
        location = dataclasses.replace(location, access=access)
        return writer.connect(location, cancel, url, writable=writable, name=name)

    return connected


def claim_export(request: Request, cancel: cancelling.Cancel) -> AbstractContextManager[targets.Claim | None]:
    """Claim an NBD export, to which nothing is written; None for any other target."""
    if not targets.is_export(request.target):
        return contextlib.nullcontext()
    return targets.take(request.target, targets.Terms(connect=connect(request, cancel)))


def _serve(path: str) -> AbstractContextManager[str]:
    """Serve a finished qcow2 file over NBD, read-only; the value is its URL."""
    from cdi_worker.images.tools import qemu_img, qemu_nbd

    return qemu_nbd.serve(qemu_img.local(path, "qcow2"))


def check_replaceable(claim: targets.Claim, request: Request) -> None:
    """Raise ``errors.TargetExists`` if a claimed target holds what the request does not replace."""
    if request.is_delta or request.existing == "remove":
        return
    targets.check_replaceable(claim, force=request.existing in {"replace", "update"})
    found = contents(claim.path, claim) if request.existing in {"refuse", "update"} else []
    if request.existing == "update" and found:
        from cdi_worker.images.tools import wipefs

        # An earlier import has left a disk.
        found = wipefs.in_use(found)
    if found:
        raise errors.TargetExists(path=claim.path, reason=f"holds {', '.join(found)}")


class Standing(NamedTuple):
    """What is at a target before an import, for a person. Sizes in bytes.

    ``size``: of the device, or of the disk that exists; ``available``: of the file system. ``holds``: see
    ``contents``. ``outcome``: what an import makes of it.
    """

    path: str
    kind: str
    size: int
    available: int
    holds: list[str]
    outcome: str

    def __str__(self) -> str:
        if self.kind == "stream":
            return "standard output"
        size = units.format_size(self.size) if self.size else f"{units.format_size(self.available)} free"
        return f"{self.path}: {', '.join(filter(None, (size, *self.holds, self.outcome)))}"


def standing(request: Request, claim: targets.Claim | None) -> Standing:
    """Return what is at the target of a request. ``claim``: on an NBD export."""
    path, holds = request.target, list[str]()
    found = targets.facts(f"{path}/disk.img" if request.is_archive else path, claim)
    # What prevents finding that prevents the import.
    with contextlib.suppress(errors.Error):
        holds = contents(path, claim)
    outcome = ""
    if holds or (found.kind == "file" and found.size):
        outcome = "is changed in place" if request.is_delta else _AT_TERMINAL[request.existing]
    return Standing(path, found.kind, found.size, found.available, holds, outcome)


def contents(path: str, claim: targets.Claim | None = None) -> list[str]:
    """Return what a device or a claimed export holds, see ``wipefs.contents``; of a file, nothing."""
    if isinstance(claim, export.ExportClaim):
        opened: AbstractContextManager[str] = export.image(claim)
    elif targets.is_block(path):
        opened = contextlib.nullcontext(path)
    else:
        return []
    from cdi_worker.images.tools import wipefs

    # The signatures of RAID and the second GPT are at the end of the device.
    with opened as image:
        return wipefs.contents(image)


# -- a finished disk, which is only read


@contextlib.contextmanager
def open_finished(
    request: Request, path: str, cancel: cancelling.Cancel, *, is_qcow2: bool
) -> Iterator[targets.Claim]:
    """Open a finished disk to read it: connect to an NBD export, serve a qcow2 file. Nothing is locked."""
    with contextlib.ExitStack() as stack:
        device, url = None, path
        if is_qcow2:
            from cdi_worker.images.targets import qcow2

            qcow2.check(path)
            url = stack.enter_context(_serve(path))
        if targets.is_export(url):
            device = connect(request, cancel)(url, writable=False, name=path)
        yield stack.enter_context(targets.ReadingClaim(path, device))


@contextlib.contextmanager
def refuse_changes(path: str) -> Iterator[None]:
    """Raise ``errors.TargetError`` if a file is written or replaced in the block."""
    before = _state(path)
    yield
    if _state(path) != before:
        raise storage.changed(path)


def _state(path: str) -> tuple[int, ...]:
    """Return what changes when a file is written or replaced; of a device, nothing does."""
    if targets.is_export(path):
        return ()
    with errors.on_target(path, "open"):
        found = pathlib.Path(path).stat()
    return () if targets.is_block(path) else (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
