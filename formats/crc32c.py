"""CRC-32C (RFC 3720, 12.1): of a VHDX, and of an object in Google Cloud Storage."""

from __future__ import annotations

from typing import Any, Final

import anycrc

#: ``calc`` computes a CRC; ``combine`` joins those of two runs of bytes by the length of the second.
#: google-crc32c and crc32c cannot join CRCs. awscrt can, with seven times the size.
MODEL: Final[Any] = anycrc.Model("CRC32C")
