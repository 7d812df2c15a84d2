"""Names and values of CDI's and our own upload headers, shared by both ends."""

from __future__ import annotations

import re
import types
from typing import Final

CHECKSUM: Final = "x-cdi-checksum"
CONTENT_TYPE: Final = "x-cdi-content-type"
#: The content types of a clone (contract, Clone source).
BLOCK: Final = "blockdevice-clone"
FILESYSTEM: Final = "filesystem-clone"
CLONES: Final = (BLOCK, FILESYSTEM)
#: Negotiation of our own clone format (docs/pods/clone.md): the server offers it in the answer to a probe,
#: the client chooses it for an upload. Other servers and clients ignore both.
OFFER: Final = "x-cdi-worker-offer"
CHOICE: Final = "x-cdi-worker-stream"
EXTENTS: Final = "extents-3"
#: Of a clone in our own format: the client states what it sends (a token of its run, and the bytes of the
#: disk), and the server which part of that it has (start-end, in bytes of the disk).
CONTENT: Final = "x-cdi-worker-content"
KEPT: Final = "x-cdi-worker-kept"
#: With 503, of a server that ends, such as that of an evicted pod: one that follows it may take the upload.
#: Without it, another upload runs.
LEAVING: Final = types.MappingProxyType({"Retry-After": "1"})

_NUMBER: Final = re.compile("[0-9]{1,18}")


def number(text: str) -> int | None:
    """Return a number of bytes, which fits into 63 bits; None if ``text`` is none."""
    return int(text) if _NUMBER.fullmatch(text) else None
