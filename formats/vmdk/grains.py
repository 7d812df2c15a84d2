"""Inflating of compressed VMDK grains."""

from __future__ import annotations

from typing import cast

from isal import isal_zlib

from cdi_worker import errors
from cdi_worker.formats.vmdk.header import GRAIN_MARKER, SECTOR, Header

# With zlib's header and checksum.
_ZLIB = 15
# Its own types take the class for an instance.
_IsalError = cast("type[Exception]", isal_zlib.error)


class Grains:
    """The compressed grains of one image. Thread-safe.

    ``longest``: bytes that a grain takes in the file at most, its marker among them; so much QEMU
    reads of one.
    """

    def __init__(self, header: Header) -> None:
        self._size = header.grain * SECTOR
        self._end = header.capacity * SECTOR
        self.longest = 2 * self._size

    def inflate(self, data: bytes | memoryview, guest: int, /) -> bytes:
        """Return a grain of the disk; ``data`` begins with its marker and may be longer than it is.

        Raises ``errors.Corrupt``, also for a grain of another place.
        """
        if len(data) < GRAIN_MARKER.size:
            raise _corrupt(guest, "is cut off")
        sector, size = GRAIN_MARKER.unpack_from(data)
        if sector * SECTOR != guest:
            raise _corrupt(guest, f"says of itself that it is for byte {sector * SECTOR}")
        body = data[GRAIN_MARKER.size : GRAIN_MARKER.size + size]
        if not size or len(body) < size:
            raise _corrupt(guest, f"does not take {size} bytes")
        stream = isal_zlib.decompressobj(wbits=_ZLIB)
        try:
            # One byte more than wanted: to see the end of the stream, or that it has none there.
            result: bytes = stream.decompress(body, self._size + 1)
        except _IsalError as err:
            raise _corrupt(guest, err) from err
        # Of the last grain some programs store what is on the disk, others all of it.
        if not stream.eof or len(result) not in {self._size, min(self._size, self._end - guest)}:
            raise _corrupt(guest, f"does not end at {self._size} bytes")
        return result


def _corrupt(guest: int, reason: object) -> errors.Corrupt:
    return errors.Corrupt(format="vmdk", reason=f"the grain for byte {guest} {reason}")
