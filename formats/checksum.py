"""Verify the bytes as served against the checksum in the request."""

from __future__ import annotations

import dataclasses
import hashlib
import string

from cdi_worker import errors
from cdi_worker.formats import readers

ALGORITHMS = ("md5", "sha1", "sha256", "sha512")


@dataclasses.dataclass(frozen=True, slots=True)
class Checksum:
    """A hashlib algorithm and the expected digest in lower-case hex."""

    algorithm: str
    digest: str


def parse(text: str) -> Checksum:
    """Parse ``algorithm:hex`` in any letter case, with blanks around each part.

    Raises ``errors.RequestError``.
    """
    algorithm, colon, digest = (part.strip() for part in text.lower().partition(":"))
    if not colon or algorithm not in ALGORITHMS:
        known = "|".join(ALGORITHMS)
        raise errors.RequestError(
            f"invalid checksum {text!r}: unknown format; expected ALGORITHM:HEX with {known}"
        )
    length = 2 * hashlib.new(algorithm, usedforsecurity=False).digest_size
    if len(digest) != length or not set(digest) <= set(string.hexdigits):
        raise errors.RequestError(
            f"invalid checksum {text!r}: expected {length} hex digits after {algorithm!r}"
        )
    return Checksum(algorithm, digest)


class Hash:
    """Compute the checksum of bytes. hashlib releases the GIL for 2 KiB and more."""

    def __init__(self, checksum: Checksum) -> None:
        self._checksum = checksum
        self._hash = hashlib.new(checksum.algorithm, usedforsecurity=False)

    def update(self, data: memoryview) -> None:
        self._hash.update(data)

    def verify(self) -> None:
        """Compare with the expected digest after the last byte. Raises ``errors.ChecksumMismatch``."""
        calculated = self._hash.hexdigest()
        if calculated != self._checksum.digest:
            raise errors.ChecksumMismatch(
                algorithm=self._checksum.algorithm, expected=self._checksum.digest, calculated=calculated
            )


class HashingReader(readers.Watched):
    """Hash every byte read. Call ``verify`` after the last one."""

    def __init__(self, reader: readers.Reader, checksum: Checksum) -> None:
        hashed = Hash(checksum)
        super().__init__(reader, hashed.update)
        self.verify = hashed.verify
