"""Blobs, verified against their digest while they are read."""

from __future__ import annotations

import hashlib

from cdi_worker import errors
from cdi_worker.formats import readers
from cdi_worker.images import image
from cdi_worker.images.engine import ahead, cancelling
from cdi_worker.sources import base
from cdi_worker.sources.registry import documents


class Verified:
    """A reader of a blob that verifies size and digest at the end. Raises ``errors.DigestMismatch``.

    The bytes after ``head`` are read when they are needed; a thread reads and hashes ahead, because hashing
    takes about as long as decompressing. ``stop`` aborts that thread and the reads of ``blob``.
    """

    def __init__(
        self, descriptor: documents.Descriptor, name: str, blob: base.Image, stop: cancelling.Child
    ) -> None:
        self.head = blob.facts.head
        self._descriptor = descriptor
        self._name = f"{name}: blob {descriptor.digest}"
        self._hash = hashlib.new(descriptor.digest.partition(":")[0], self.head, usedforsecurity=False)
        self._blob = blob
        #: Counts the bytes of ``blob``, once those after ``head`` are read.
        self.arrivals = image.Arrivals()
        self._stop = stop
        self._first = readers.BytesReader(self.head)
        self._rest: base.Reader | None = None
        self._done = 0
        self._ended = False

    def readinto(self, into: memoryview, /) -> int:
        if self._ended or not len(into):
            return 0
        count = self._first.readinto(into)
        if not count and len(self.head) < self._descriptor.size:
            if self._rest is None:
                self.arrivals.add(len(self.head))
                rest = self._blob.rest(self._stop, len(self.head), self.arrivals.add)
                self._rest = ahead.AheadReader(readers.WatchedReader(rest, self._hash.update), self._stop)
            count = self._rest.readinto(into)
        self._done += count
        if self._done > self._descriptor.size:
            raise self._mismatch(f"{self._descriptor.size} bytes", f"{self._done} bytes or more")
        if count:
            return count
        self._ended = True
        if self._done != self._descriptor.size:
            raise self._mismatch(f"{self._descriptor.size} bytes", f"{self._done} bytes")
        expected = self._descriptor.digest
        calculated = f"{self._hash.name}:{self._hash.hexdigest()}"
        if calculated != expected:
            raise self._mismatch(expected, calculated)
        return 0

    def close(self) -> None:
        """Close the blob and abort a read of it. Safe to call twice."""
        self._stop.set("closed")
        self._blob.source.close()
        if self._rest is not None:
            self._rest.close()
        self._stop.close()

    def _mismatch(self, expected: str, calculated: str) -> errors.DigestMismatch:
        return errors.DigestMismatch(url=self._name, expected=expected, calculated=calculated)


def read_all(reader: base.Reader, limit: int, name: str) -> bytes:
    """Return all bytes of ``reader``. Raises ``errors.Unsupported`` if there are more than ``limit``."""
    into = memoryview(bytearray(limit + 1))
    done = readers.fill(reader, into)
    if done > limit:
        raise errors.Unsupported(reason=f"{name}: manifest or configuration larger than {limit} bytes")
    return bytes(into[:done])
