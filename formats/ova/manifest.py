"""Read the manifest (``.mf``) of an OVF package: a checksum for each of its files (DSP0243, 5.1)."""

from __future__ import annotations

import re
from typing import Final

from cdi_worker import errors
from cdi_worker.formats import checksum
from cdi_worker.formats.ova import descriptor

#: Bytes of a manifest: a line for each file.
LARGEST: Final = 1 << 20
#: ``SHA256(vm-disk1.vmdk)= 5fb1…``, with or without blanks and hyphens.
_LINE = re.compile(r"\s*([A-Za-z0-9-]+)\s*\((.+)\)\s*=\s*([0-9A-Fa-f]+)\s*")


def parse(data: bytes) -> dict[str, checksum.Checksum]:
    """Return the checksums by file name.

    Raises ``errors.Refused`` for two different checksums of a file, ``errors.Corrupt`` for any other line.
    """
    found: dict[str, checksum.Checksum] = {}
    for line in data.decode(errors="surrogateescape").splitlines():
        if not line.strip():
            continue
        match = _LINE.fullmatch(line)
        if not match:
            raise errors.Corrupt(format="OVF manifest", reason=f"not a checksum: {line[:200]!r}")
        name = match[2].strip()
        try:
            stated = checksum.parse(f"{match[1].replace('-', '')}:{match[3]}")
        except errors.RequestError as err:
            raise errors.Corrupt(format="OVF manifest", reason=f"{name[:200]!r}: {err}") from err
        if found.setdefault(name, stated) != stated:
            raise descriptor.refused("manifest", f"the manifest has two checksums of {name[:200]!r}")
    return found
