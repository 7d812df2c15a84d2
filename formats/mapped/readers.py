"""The disk formats that are read by our own readers, so that a disk needs no other program."""

from __future__ import annotations

from typing import Protocol

from cdi_worker import errors, lazy
from cdi_worker.formats import facts
from cdi_worker.formats.mapped import image, passing

#: Bytes of a file's beginning that tell whether it can be placed and where.
HEAD_SIZE = 64 << 10


class Reader(Protocol):
    """What the module of a format knows. ``UNIT``: what the format calls the pieces of a disk."""

    UNIT: str

    def look(self, head: bytes) -> object:
        """Read a file's first ``HEAD_SIZE`` bytes.

        Raises ``errors.Unsupported`` for what another program may be able to read.
        """

    def is_crowded(self, head: bytes) -> bool:
        """Tell whether a stream may name more pieces than are remembered."""

    def read_image(self, read: facts.Read, size: int) -> image.Image:
        """Read header and directory of a file of so many bytes."""

    def follow(self, head: bytes) -> passing.Follower:
        """Return what follows an image that comes in order and begins with ``head``."""


FORMATS: lazy.Table[str, Reader] = lazy.Table(
    {"qcow2": "cdi_worker.formats.qcow2.layout", "vmdk": "cdi_worker.formats.vmdk.layout"}
)


def obstacle(form: str, head: bytes) -> str:
    """Tell why our own reader cannot read an image that passed the checks; empty when it can."""
    if form in FORMATS:
        try:
            FORMATS[form].look(head)
        except errors.Unsupported as err:
            return str(err)
    return ""


def is_crowded(form: str, head: bytes) -> bool:
    """Tell whether a stream of an image without ``obstacle`` may name more pieces than are remembered."""
    return form in FORMATS and FORMATS[form].is_crowded(head)
