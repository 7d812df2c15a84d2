"""Verify bytes as served against all checksums that are stated for them."""

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
    found = []
    for each in text.split(","):
        algorithm, colon, digest = (part.strip() for part in each.lower().partition(":"))
        if not colon or algorithm not in ALGORITHMS:
            reason = f"unknown format; expected ALGORITHM:HEX with {'|'.join(ALGORITHMS)}"
            raise errors.RequestError(f"invalid checksum {each!r}: {reason}")
        length = 2 * hashlib.new(algorithm, usedforsecurity=False).digest_size
        if len(digest) != length or not set(digest) <= set(string.hexdigits):
            reason = f"expected {length} hex digits after {algorithm!r}"
            raise errors.RequestError(f"invalid checksum {each!r}: {reason}")
        found.append(Checksum(algorithm, digest))
    first, *more = dict.fromkeys(found)
    return Checksum(first.algorithm, first.digest, tuple(more))


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
            name, calculated = each.algorithm, self._hashes[each.algorithm].hexdigest()
            if calculated != each.digest:
                raise errors.ChecksumMismatch(algorithm=name, expected=each.digest, calculated=calculated)


class HashingReader(readers.WatchedReader):
    """Hash every byte read. Call ``verify`` after the last one."""

    def __init__(self, reader: readers.Reader, checksum: Checksum) -> None:
        hashed = Hash(checksum)
        super().__init__(reader, hashed.update)
        self.verify = hashed.verify
