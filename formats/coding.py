"""Content codings of HTTP (RFC 9110, 8.4.1), the values of Content-Encoding.

One that is a compression of ours is undone like any other, by its content. All others are refused: their
bytes would be written to the disk as they are.
"""

from __future__ import annotations

from cdi_worker import errors, masking
from cdi_worker.formats import detect

IDENTITY = "identity"
#: aws-chunked belongs to the upload of an object; some S3 servers store it with the object.
_NONE = frozenset({"", IDENTITY, "aws-chunked"})
_COMPRESSIONS = {"gzip": "gz", "zstd": "zst", "bzip2": "bz2", "xz": "xz"}


def normal(header: str) -> str:
    """Return the codings in the value of a Content-Encoding header, ``identity`` for none."""
    names = (name.strip().lower().removeprefix("x-") for name in header.split(","))
    return ", ".join(name for name in names if name not in _NONE) or IDENTITY


def check(header: str, head: bytes) -> None:
    """Raise ``errors.Unsupported`` unless detecting the content, which begins with ``head``, undoes it.

    Web servers often send this header for a compressed file, whose bytes are then what the file has.
    """
    coding = normal(header)
    if coding == IDENTITY:
        return
    shown = masking.mask(coding)[:80]
    if coding not in _COMPRESSIONS:
        reason = f"sent with the content encoding {shown!r}; have the server send the file as it is"
        raise errors.Unsupported(reason=reason)
    if head and detect.detect(head) != _COMPRESSIONS[coding]:
        reason = f"sent with the content encoding {shown!r}, but it is not {shown}; correct the server"
        raise errors.Unsupported(reason=reason)
