"""Where a disk goes that is not a file or device of this machine, and finished disks, which are read."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final

from cdi_worker import errors, lazy
from cdi_worker.images import targets
from cdi_worker.images.engine import cancelling
from cdi_worker.images.targets import storage

if TYPE_CHECKING:
    from cdi_worker.images import stored
    from cdi_worker.images.targets import remote
    from cdi_worker.importer.request import Request

log = logging.getLogger(__name__)

#: What few imports need (start-up time).
QCOW2: Final = "cdi_worker.images.targets.qcow2:check"
WRITER: Final = "cdi_worker.sources.nbd.writer:connect"
NBD: Final = "cdi_worker.sources.nbd.locations:Nbd"
SERVING: Final = "cdi_worker.images.tools.qemu_nbd:finished"
WIPEFS: Final = "cdi_worker.images.tools.wipefs:in_use"
EXPORT: Final = "cdi_worker.images.targets.export:image"


def connect(request: Request, cancel: cancelling.Cancel) -> remote.Connect:
    """Return what connects to an NBD export for the target of a request."""

    def connected(url: str, *, writable: bool = True, name: str = "") -> remote.Device:
        location = request.to or lazy.load(NBD)(request.target)
        made: remote.Device = lazy.load(WRITER)(location, cancel, url, writable=writable, name=name)
        return made

    return connected


def inspected(request: Request, cancel: cancelling.Cancel) -> AbstractContextManager[targets.Claim | None]:
    """Return the claim on an NBD export, to which nothing is written; None for any other target."""
    if not targets.is_export(request.target):
        return contextlib.nullcontext()
    return targets.take(request.target, targets.Terms(connect=connect(request, cancel)))


def finished(request: Request) -> Callable[[str], AbstractContextManager[stored.Read]] | None:
    """Return what opens the finished disk of a request to read it; None for a file or a device."""

    @contextlib.contextmanager
    def opened(path: str) -> Iterator[stored.Read]:
        with contextlib.ExitStack() as stack:
            url = path
            if request.form is not None:
                url = stack.enter_context(lazy.load(SERVING)(path))
            connected = connect(request, cancelling.NEVER)(url, writable=False, name=path)
            yield stack.enter_context(contextlib.closing(connected)).read

    return opened if request.form is not None or targets.is_export(request.target) else None


def check_replaceable(claim: targets.Claim, request: Request) -> None:
    """Raise ``errors.TargetExists`` if a claimed target holds what the request does not replace."""
    if request.is_delta or request.existing == "remove":
        return
    targets.check_replaceable(claim, force=request.existing in {"replace", "update"})
    if request.existing not in {"refuse", "update"} or not targets.is_foreign(claim):
        return
    is_export = targets.is_export(claim.path)
    with lazy.load(EXPORT)(claim) if is_export else contextlib.nullcontext(claim.path) as path:
        # Swap, LVM or RAID, whose signatures are at the ends of the device.
        owners = lazy.load(WIPEFS)(path)
    if owners:
        raise errors.TargetExists(path=claim.path, reason=f"holds {', '.join(owners)}")


# -- a finished disk, which is only read


@contextlib.contextmanager
def reading(request: Request, cancel: cancelling.Cancel) -> Iterator[targets.Claim]:
    """Yield the claim on a disk, which is none: an NBD export is connected to, a qcow2 file is served."""
    path = request.target
    with contextlib.ExitStack() as stack:
        device, url = None, path
        if request.is_qcow2:
            backing = os.path.realpath(request.backing) if request.backing else ""
            lazy.load(QCOW2)(path, backing)
            url = stack.enter_context(lazy.load(SERVING)(path))
        if targets.is_export(url):
            device = connect(request, cancel)(url, writable=False, name=path)
        yield stack.enter_context(targets.reading(path, device))


def in_use(path: str) -> bool:
    """Return whether a device is mounted or in use, with a warning."""
    found = targets.in_use(path)
    if found:
        log.warning("the device is mounted or in use, and may change while it is compared path=%r", path)
    return found


@contextlib.contextmanager
def unchanged(path: str) -> Iterator[None]:
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
