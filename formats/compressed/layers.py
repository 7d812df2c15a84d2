"""Detect and remove nested compression, layer by layer, down to the content."""

from __future__ import annotations

from typing import NamedTuple

from cdi_worker import errors
from cdi_worker.formats import detect, readers

#: Limit of nested compressions, against decompression bombs.
_DEPTH = 3

#: The format of a layer whose first bytes are not available: bz2 returns no output for the first 900 kB.
UNKNOWN = "unknown"

#: First bytes of the content that are enough to detect it: every signature (btrfs has the last one), and the
#: headers of the formats that are read from a stream.
ENOUGH = 65 << 10


class Content(NamedTuple):
    """The content below all ``compressions`` (outermost first): its ``format`` and first bytes, ``head``."""

    compressions: tuple[str, ...]
    format: str
    head: bytes


def look(head: bytes, *, whole: bool = False, size: int = detect.HEAD) -> Content:
    """Detect the content of a file from its first bytes alone; ``whole``: ``head`` is all of it.

    ``size``: maximum bytes of each layer to decompress.
    ``format`` is UNKNOWN when ``head`` is too short to decompress the start of a layer. Raises
    ``errors.Refused`` for contradicting signatures and too many layers, ``errors.Corrupt``, and for a whole
    file ``errors.Truncated``.
    """
    compressions: tuple[str, ...] = ()
    kind = detect.detect(head)
    while kind in detect.COMPRESSIONS:
        compressions = _deeper(compressions, kind)
        plain = decompressed(kind, readers.BytesReader(head))
        head = readers.Peek(plain, size).head if whole else readers.sample(plain, size)
        # Only the first bytes of an outer layer were decompressed.
        whole = whole and len(head) < size
        kind = detect.detect(head) if head or whole else UNKNOWN
    return Content(compressions, kind, head)


def open(  # noqa: A001 - read as layers.open
    reader: readers.Reader, *, limit: int | None = None
) -> tuple[Content, readers.Reader]:
    """Decompress all layers of ``reader``: return the content, and a reader of it from its start.

    ``limit`` bounds the bytes of every layer. Closing the result closes ``reader``; so does a failure.
    """
    compressions: tuple[str, ...] = ()
    opened = reader
    try:
        opened = top = readers.Peek(reader, detect.HEAD)
        while (kind := detect.detect(top.head)) in detect.COMPRESSIONS:
            compressions = _deeper(compressions, kind)
            opened = decompressed(kind, top, limit=limit)
            opened = top = readers.Peek(opened, detect.HEAD)
    except BaseException:
        opened.close()
        raise
    return Content(compressions, kind, top.head), top


def decompressed(kind: str, reader: readers.Reader, *, limit: int | None = None) -> readers.Reader:
    """Return a reader of one layer: ``decompress.open``."""
    from cdi_worker.formats.compressed import decompress

    return decompress.open(kind, reader, limit=limit)


def _deeper(compressions: tuple[str, ...], kind: str) -> tuple[str, ...]:
    if len(compressions) == _DEPTH:
        reason = f"the image is compressed more than {_DEPTH} times; decompress it first"
        raise errors.Refused(format=kind, rule="nesting", reason=reason)
    return (*compressions, kind)
