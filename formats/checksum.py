"""Verify the bytes as served against the checksums that are stated for them: all of them."""

from __future__ import annotations

import hashlib
import string
from typing import NamedTuple

from cdi_worker import errors
from cdi_worker.formats import readers

ALGORITHMS = ("md5", "sha1", "sha256", "sha512")


class Checksum(NamedTuple):
    """A hashlib algorithm and the expected digest in lower-case hex. ``more``: others of the same bytes."""

    algorithm: str
    digest: str
    more: tuple[Checksum, ...] = ()

    def __str__(self) -> str:
        return ",".join(f"{each.algorithm}:{each.digest}" for each in (self, *self.more))


def parse(text: str) -> Checksum:
    """Parse ``algorithm:hex`` in any letter case, with blanks around each part; several with commas.

    Raises ``errors.RequestError``.
    """
    first, *more = dict.fromkeys(map(_parse, text.split(",")))
    return Checksum(first.algorithm, first.digest, tuple(more))


def _parse(text: str) -> Checksum:
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
        self._expected = (checksum, *checksum.more)
        names = {each.algorithm for each in self._expected}
        self._hashes = {name: hashlib.new(name, usedforsecurity=False) for name in names}

    def update(self, data: memoryview) -> None:
        for each in self._hashes.values():
            each.update(data)

    def verify(self) -> None:
        """Compare with all expected digests after the last byte. Raises ``errors.ChecksumMismatch``."""
        for each in self._expected:
            calculated = self._hashes[each.algorithm].hexdigest()
            if calculated != each.digest:
                raise errors.ChecksumMismatch(
                    algorithm=each.algorithm, expected=each.digest, calculated=calculated
                )


class HashingReader(readers.Watched):
    """Hash every byte read. Call ``verify`` after the last one."""

    def __init__(self, reader: readers.Reader, checksum: Checksum) -> None:
        hashed = Hash(checksum)
        super().__init__(reader, hashed.update)
        self.verify = hashed.verify
