"""Where a disk goes that is not a file or device of this machine: an NBD export."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final

from cdi_worker import lazy
from cdi_worker.images import targets
from cdi_worker.images.engine import cancelling

if TYPE_CHECKING:
    from cdi_worker.images import stored
    from cdi_worker.images.targets import remote
    from cdi_worker.importer.request import Request

#: What few imports need (start-up time).
WRITER: Final = "cdi_worker.sources.nbd.writer:connect"
NBD: Final = "cdi_worker.sources.nbd.locations:Nbd"
SERVING: Final = "cdi_worker.images.tools.qemu_nbd:finished"
EXPORT: Final = "cdi_worker.images.targets.export:image"


def connect(request: Request, cancel: cancelling.Cancel) -> remote.Connect:
    """Return what connects to an NBD export for the target of a request."""

    def connected(url: str, *, writable: bool = True, name: str = "") -> remote.Device:
        location = request.to or lazy.load(NBD)(request.target)
        made: remote.Device = lazy.load(WRITER)(location, cancel, url, writable=writable, name=name)
        return made

    return connected


@contextlib.contextmanager
def inspected(request: Request, cancel: cancelling.Cancel) -> Iterator[targets.Claim | None]:
    """Yield the claim on an NBD export, to which nothing is written; None for any other target."""
    if not targets.is_export(request.target):
        yield None
        return
    with targets.take(request.target, targets.Terms(connect=connect(request, cancel))) as claim:
        yield claim


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


@contextlib.contextmanager
def seen(claim: targets.Claim) -> Iterator[str]:
    """Yield the path of a claimed device, for programs that look for signatures at its ends."""
    if not targets.is_export(claim.path):
        yield claim.path
        return
    with lazy.load(EXPORT)(claim) as path:
        yield path
