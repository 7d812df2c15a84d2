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
#: In a clone of our own format the client states what it sends (a token of its run, and the size of the
#: disk), and the server which part of that it has (start-end, in bytes of the disk).
CONTENT: Final = "x-cdi-worker-content"
KEPT: Final = "x-cdi-worker-kept"
#: Sent with 503 by a server that is ending, such as that of an evicted pod: its successor may take the
#: upload. A 503 without it means that another upload is running.
LEAVING: Final = types.MappingProxyType({"Retry-After": "1"})

_NUMBER: Final = re.compile("[0-9]{1,18}")


def number(text: str) -> int | None:
    """Parse a number of bytes, below 10^18; return None if ``text`` is not one."""
    return int(text) if _NUMBER.fullmatch(text) else None
