"""Blobs are streamed and verified: the right bytes or an error, whatever the server does."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import random
import time

import pytest

from cdi_worker import errors
from cdi_worker.formats import readers
from cdi_worker.images import image
from cdi_worker.images.engine import ahead, cancelling, fetch
from cdi_worker.sources import base
from cdi_worker.sources.registry import blobs, documents
from tests.support import http_disk, misbehave, processes, reading

DATA = random.Random(1).randbytes(3 << 20)
OPTIONS = fetch.FetchOptions(connections=3, chunk=256 << 10, window=4, no_progress=2)


def descriptor(data: bytes, algorithm: str = "sha256") -> documents.Descriptor:
    return documents.Descriptor("", documents.digest(data, algorithm), len(data))


class Part(base.Source):
    """A blob in memory of which ``head`` bytes came with the first contact."""

    def __init__(self, data: bytes, head: int) -> None:
        self.opened = False
        self._data = data
        self._head = head

    def open(self, opening: base.Opening) -> base.Facts:
        return base.Facts(name="a blob", size=len(self._data), head=self._data[: self._head])

    def stream(self, offset: int = 0) -> base.Reader:
        self.opened = True
        return self.reader(self._data[offset:])

    def reader(self, data: bytes) -> base.Reader:
        return readers.BytesReader(data)


def verified_part(stated: bytes, part: base.Source, algorithm: str = "sha256") -> blobs.Verified:
    stop = cancelling.Cancel().child()
    return blobs.Verified(descriptor(stated, algorithm), "x", part.image(base.Opening()), stop)


def verified(stated: bytes, served: bytes, head: int = 1000, algorithm: str = "sha256") -> blobs.Verified:
    return verified_part(stated, Part(served, head), algorithm)


@pytest.mark.parametrize(
    ("size", "algorithm"),
    [*((size, "sha256") for size in (0, 1, 999, 1000, 1001, ahead.CHUNK)), (len(DATA), "sha512")],
)
def test_blob_is_verified(size: int, algorithm: str) -> None:
    reader = verified(DATA[:size], DATA[:size], algorithm=algorithm)
    assert reading.read_all(reader) == DATA[:size]
    assert reader.readinto(memoryview(bytearray(1))) == 0
    reader.close()
    reader.close()


@pytest.mark.parametrize(
    ("change", "size"),
    [
        ("other", 1),
        ("short", 900),
        ("long", 900),
        ("other", 5000),
        ("short", len(DATA)),
        ("long", len(DATA)),
    ],
)
def test_wrong_digest_is_refused(change: str, size: int) -> None:
    good = DATA[:size]
    served = {"short": good[:-1], "long": good + b"+", "other": good[:-1] + bytes([good[-1] ^ 1])}[change]
    reader = verified(good, served)
    with pytest.raises(errors.DigestMismatch, match="digest mismatch"):
        reading.read_all(reader)
    reader.close()


@pytest.mark.parametrize(("size", "difference"), [(900, -1), (900, 1), (5000, -1), (5000, 1)])
def test_blob_of_another_size_than_stated_is_refused(size: int, difference: int) -> None:
    """The digest is right: a manifest that states another size of its layer contradicts itself."""
    stated = dataclasses.replace(descriptor(DATA[:size]), size=size + difference)
    part = Part(DATA[:size], 1000).image(base.Opening())
    reader = blobs.Verified(stated, "x", part, cancelling.Cancel().child())
    with pytest.raises(errors.DigestMismatch, match=f"expected {size + difference} bytes"):
        reading.read_all(reader)
    reader.close()


def test_long_blob_is_not_read_to_its_end() -> None:
    """A blob may be endless."""
    reader = verified(DATA[:5000], DATA[:5000] + bytes(8 << 20))
    assert content_of(reader, 5000) == DATA[:5000]
    with pytest.raises(errors.DigestMismatch, match=r"expected 5000 bytes, calculated \d+ bytes or more"):
        reader.readinto(memoryview(bytearray(1000)))
    reader.close()


def test_only_the_head_is_fetched_at_first() -> None:
    part = Part(DATA, 5000)
    reader = verified_part(DATA, part)
    assert content_of(reader, 5000) == DATA[:5000]
    assert not part.opened
    reader.close()


def content_of(reader: base.Reader, size: int) -> bytes:
    data = bytearray(size)
    done = 0
    while done < size:
        done += reader.readinto(memoryview(data)[done:])
    return bytes(data)


def test_error_of_the_thread_is_raised() -> None:
    class Failing(readers.BytesReader):
        def readinto(self, into: memoryview, /) -> int:
            raise errors.TransferFailed(url="x", offset=1, reason="gone")

    class FailingPart(Part):
        def reader(self, data: bytes) -> base.Reader:
            return Failing(b"")

    reader = verified_part(DATA, FailingPart(DATA, 0))
    for _ in range(2):
        with pytest.raises(errors.TransferFailed, match="gone"):
            reader.readinto(memoryview(bytearray(10)))
    reader.close()


def test_read_all_is_bounded() -> None:
    assert blobs.read_all(readers.BytesReader(b"12345"), 5, "x") == b"12345"
    with pytest.raises(errors.Unsupported, match="larger than 4 bytes"):
        blobs.read_all(readers.BytesReader(b"12345"), 4, "x")


# -- over the wire ------------------------------------------------------------------------------


def blob_at(url: str) -> blobs.Verified:
    """Open the blob, read by an import's engine."""
    stop = cancelling.Cancel().child()
    blob = http_disk.source(url, cancel=stop).image(base.Opening(image.Engine(OPTIONS)))
    return blobs.Verified(descriptor(DATA), "x", blob, stop)


@pytest.mark.parametrize("ranges", [True, False])
def test_blob_is_read_in_order(ranges: bool) -> None:
    with misbehave.Server() as server:
        reader = blob_at(server.serve("/blob", misbehave.Page(DATA, ranges=ranges)))
        assert reading.read_all(reader) == DATA
        reader.close()
        assert (len(server.gets("/blob")) > 1) == ranges
        assert len(DATA) <= server.sent("/blob") <= 1.01 * len(DATA)


@pytest.mark.parametrize("ranges", [True, False])
def test_closing_ends_a_stalled_read(ranges: bool) -> None:
    with misbehave.Server() as server:
        page = misbehave.Page(DATA, ranges=ranges, stall=100_000 if ranges else 400_000)
        reader = blob_at(server.serve("/blob", (misbehave.Page(DATA, ranges=ranges), 1), page))
        if not ranges:
            # The first contact must not be the stalled request.
            reader.close()
            reader = blob_at(server.url("/blob"))
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            read = pool.submit(reading.read_all, reader)
            # Nothing shows that the read waits by now.
            time.sleep(0.3)
            began = time.monotonic()
            reader.close()
            assert isinstance(read.exception(processes.PATIENCE), errors.Error)
            assert time.monotonic() - began < processes.PATIENCE
