"""What becomes of one upload: the blocking half, for a thread of its own."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Callable, Mapping

from formats import checksum
from images import cancelling, retry
from importer import clone_target, errors, execute, progress, request, upload_headers
from sources import upload


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    """What to make of the bytes.

    ``clone``: a content type of ``upload_headers.CLONES``, or empty; ``extents``: as our own source sends it.
    """

    wanted: request.Request
    clone: str
    extents: bool


class Accepted(progress.NullProgress):
    """Tells once when the bytes are all there, safe, and fit: what is left is processing."""

    #: The phases that begin after the last byte was verified (``importer.job``, the routes).
    AFTER = frozenset({"convert", "sync"})

    def __init__(self, tell: Callable[[], object]) -> None:
        self._tell = tell
        self._told = False

    def phase(self, name: str, total: int | None) -> None:
        if name in self.AFTER and not self._told:
            self._told = True
            self._tell()


def order(settings: request.Request, headers: Mapping[str, str], *, archive: bool) -> Order:
    """Return what a request asks for; a clone is one on every path. Raises ``RequestError``."""
    content_type = headers.get(upload_headers.CONTENT_TYPE, "")
    wanted = dataclasses.replace(settings, checksum=headers.get(upload_headers.CHECKSUM) or None)
    if wanted.checksum is not None:
        checksum.parse(wanted.checksum)
    clone = content_type if content_type in upload_headers.CLONES else ""
    if archive and not clone:
        if pathlib.Path(wanted.target).is_block_device():
            raise errors.RequestError("an archive needs a volume with a file system, not a block device")
        folder = str(pathlib.Path(wanted.target).parent)
        wanted = dataclasses.replace(wanted, content_type="archive", target=folder)
    extents = bool(clone) and headers.get(upload_headers.CHOICE) == upload_headers.EXTENTS
    return Order(wanted, clone, extents)


def carry_out(
    what: Order, body: upload.Body, size: int | None, accepted: Callable[[], object], cancel: retry.Cancel
) -> None:
    """Bring the bytes of ``body`` to the target. Raises ``errors.Error``; nothing usable is left then."""
    shown = progress.Several(progress.Lines(sys.stderr), Accepted(accepted))
    if what.clone:
        clone_target.receive(
            what.wanted, what.clone, body, shown, cancel, give_up=body.stop, ours=what.extents
        )
    else:
        execute.bring(upload.UploadSource(body, size), what.wanted, shown, cancelling.Stop(cancel))
