"""Decompress VMDK grains."""

from __future__ import annotations

from typing import cast

from isal import isal_zlib

from cdi_worker import errors
from cdi_worker.formats.mapped import pieces
from cdi_worker.formats.vmdk.header import GRAIN_MARKER, SECTOR, VmdkHeader

# wbits of a zlib stream: with header and checksum (RFC 1950).
_ZLIB = 15
# isal's type stubs declare the class as an instance.
_IsalError = cast("type[Exception]", isal_zlib.error)


class Grains:
    """The compressed grains of one image. Thread-safe.

    ``longest``: maximum bytes of a grain in the file, including its marker, as in QEMU's block/vmdk.c.
    """

    def __init__(self, header: VmdkHeader) -> None:
        self._size = header.grain * SECTOR
        self._end = header.capacity * SECTOR
        self.longest = 2 * self._size

    def inflate(self, data: bytes | memoryview, piece: pieces.Piece, /) -> bytes:
        """Decompress a grain; ``data``: the grain with its marker, may be longer.

        Raises ``errors.Corrupt``, also if the marker belongs to another grain.
        """
        guest = piece.guest
        if len(data) < GRAIN_MARKER.size:
            raise _corrupt(guest, "is truncated")
        sector, size = GRAIN_MARKER.unpack_from(data)
        if sector * SECTOR != guest:
            raise _corrupt(guest, f"has the marker of the grain for byte {sector * SECTOR}")
        body = data[GRAIN_MARKER.size : GRAIN_MARKER.size + size]
        if not size or len(body) < size:
            raise _corrupt(guest, f"has a marker with a wrong size of {size} bytes")
        stream = isal_zlib.decompressobj(wbits=_ZLIB)
        try:
            # One byte more than expected: at its output limit isal does not look for the end of the stream.
            result: bytes = stream.decompress(body, self._size + 1)
        except _IsalError as err:
            raise _corrupt(guest, err) from err
        # The last grain may be stored whole or only to the end of the disk, depending on the program.
        if not stream.eof or len(result) not in {self._size, min(self._size, self._end - guest)}:
            raise _corrupt(guest, f"does not decompress to {self._size} bytes")
        return result


def _corrupt(guest: int, reason: object) -> errors.Corrupt:
    return errors.Corrupt(format="vmdk", reason=f"the grain for byte {guest} {reason}")
