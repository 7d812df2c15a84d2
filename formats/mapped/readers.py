"""The disk formats that are read by our own readers, so that a disk needs no other program.

Each has a module that tells what reads its images at random, and what follows them as they pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from cdi_worker import errors
from cdi_worker.formats import facts
from cdi_worker.formats.mapped import image, passing
from cdi_worker.formats.qcow2 import header, layout
from cdi_worker.formats.vmdk import layout as vmdk_layout

#: Bytes of a file's beginning that tell whether it can be placed and where.
HEAD_SIZE = header.HEAD_SIZE


class Reader(NamedTuple):
    """``unit``: what the format calls the pieces of a disk.

    ``look(head)`` takes a file's beginning and raises ``errors.Unsupported`` for what another program may
    be able to read; ``read_image(read, size)`` reads header and directory of a file of so many bytes.
    """

    unit: str
    look: Callable[[bytes], object]
    read_image: Callable[[facts.Read, int], image.Image]
    follow: Callable[[bytes], passing.Follower]


FORMATS: Mapping[str, Reader] = {
    "qcow2": Reader("clusters", header.parse, layout.read_image, layout.follow),
    "vmdk": Reader("grains", vmdk_layout.look, vmdk_layout.read_image, vmdk_layout.follow),
}


def obstacle(form: str, head: bytes) -> str:
    """Tell why our own reader cannot read an image that passed the checks; empty when it can."""
    if form in FORMATS:
        try:
            FORMATS[form].look(head)
        except errors.Unsupported as err:
            return str(err)
    return ""


def is_crowded(form: str, head: bytes) -> bool:
    """Tell whether a stream of an image without ``obstacle`` may tell of more pieces than are remembered.

    Of vmdk all tables come first. Of qcow2, whose tables come among the data, nobody knows.
    """
    return form == "vmdk" and vmdk_layout.is_crowded(head)
