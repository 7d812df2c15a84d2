"""What is inside the compressions: the same question asked of each layer until it is no compression."""

from __future__ import annotations

import dataclasses

from cdi_worker import errors
from cdi_worker.formats import detect, readers
from cdi_worker.formats.compressed import decompress

#: Nobody compresses four times for a good reason.
_DEPTH = 3

#: The format of a layer of which too little was seen: bz2 yields nothing before 900 kB went in.
UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True, slots=True)
class Content:
    """``format``: what ``head``, the first bytes below all ``compressions`` (outermost first), is."""

    compressions: tuple[str, ...]
    format: str
    head: bytes


def look(head: bytes) -> Content:
    """Tell what a file is from its first bytes alone.

    ``format`` is UNKNOWN when the layer below a compression does not begin within ``head``. Raises
    ``errors.Refused`` for contradicting signatures and too many layers, ``errors.Corrupt``.
    """
    compressions: tuple[str, ...] = ()
    kind = detect.detect(head)
    while kind in detect.COMPRESSIONS:
        compressions = _deeper(compressions, kind)
        head = readers.sample(decompress.open(kind, readers.Bytes(head)), detect.HEAD)
        kind = detect.detect(head) if head else UNKNOWN
    return Content(compressions, kind, head)


def open(  # noqa: A001 - read as layers.open
    reader: readers.Reader, *, limit: int | None = None, tool: decompress.Tool | None = None
) -> tuple[Content, readers.Reader]:
    """Take the compressions off ``reader``: return what it is, and a reader of it from its start.

    ``limit`` bounds the bytes of every layer; ``tool`` is that of ``decompress.open``. Closing the
    result closes ``reader``; so does a failure, which would leave a tool running.
    """
    compressions: tuple[str, ...] = ()
    opened = reader
    try:
        opened = top = readers.Peek(opened, detect.HEAD)
        while (kind := detect.detect(top.head)) in detect.COMPRESSIONS:
            compressions = _deeper(compressions, kind)
            opened = decompress.open(kind, top, limit=limit, tool=tool)
            opened = top = readers.Peek(opened, detect.HEAD)
    except BaseException:
        opened.close()
        raise
    return Content(compressions, kind, top.head), top


def _deeper(compressions: tuple[str, ...], kind: str) -> tuple[str, ...]:
    if len(compressions) == _DEPTH:
        raise errors.Refused(format=kind, rule="nesting", reason=f"compressed more than {_DEPTH} times")
    return (*compressions, kind)
