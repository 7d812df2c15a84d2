"""Content codings of HTTP (RFC 9110, 8.4.1), the values of Content-Encoding.

A supported compression is detected and undone by the content. Names that stand for no coding are ignored. All
others are refused: the encoded bytes would be written to the disk.
"""

from __future__ import annotations

import logging

from cdi_worker import errors, masking
from cdi_worker.formats import detect

log = logging.getLogger(__name__)

IDENTITY = "identity"
#: aws-chunked belongs to the upload of an object; some S3 servers store it with the object.
_NONE = frozenset({"", IDENTITY, "aws-chunked"})
#: Not codings but a character set or a file mode, which tools store with the objects that they upload.
_MEANINGLESS = frozenset({"none", "binary", "utf-8", "utf8"})
_COMPRESSIONS = {"gzip": "gz", "zstd": "zst", "bzip2": "bz2", "xz": "xz"}


def normal(header: str) -> str:
    """Return the codings in the value of a Content-Encoding header, ``identity`` for none."""
    return ", ".join(name for name in _names(header) if name not in _NONE | _MEANINGLESS) or IDENTITY


def _names(header: str) -> list[str]:
    return [name.strip().lower().removeprefix("x-") for name in header.split(",")]


def check(header: str, head: bytes, name: str) -> None:
    """Raise ``errors.Unsupported`` unless the content, which begins with ``head``, has this compression.

    Web servers often send the header for a file that is compressed itself. ``name``: the file, for the log.
    """
    coding = normal(header)
    if not _MEANINGLESS.isdisjoint(_names(header)):
        log.warning(
            "meaningless content encoding ignored url=%r encoding=%r; remove it from the object",
            name,
            masking.quoted(header),
        )
    if coding == IDENTITY:
        return
    shown = masking.quoted(coding)
    if coding not in _COMPRESSIONS:
        reason = f"sent with the content encoding {shown!r}; have the server send the file as it is"
        raise errors.Unsupported(reason=reason)
    if head and detect.detect(head) != _COMPRESSIONS[coding]:
        reason = f"sent with the content encoding {shown!r}, but it is not {shown}; correct the server"
        raise errors.Unsupported(reason=reason)
