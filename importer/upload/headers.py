"""The headers of an upload that are CDI's or our own, and what stands in them: known to both ends."""

from __future__ import annotations

from typing import Final

CHECKSUM: Final = "x-cdi-checksum"
CONTENT_TYPE: Final = "x-cdi-content-type"
#: The content types of a clone (contract, Clone source).
BLOCK: Final = "blockdevice-clone"
FILESYSTEM: Final = "filesystem-clone"
CLONES: Final = (BLOCK, FILESYSTEM)
#: How a server and a clone source of ours agree on more than CDI's (docs/clone.md): the server offers it
#: in the answer to a probe, the client chooses it for an upload. Others pass over both.
OFFER: Final = "x-cdi-worker-offer"
CHOICE: Final = "x-cdi-worker-stream"
EXTENTS: Final = "extents-2"
