"""Blobs as they pass: the right bytes, or an error, whatever the other end does."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import gc
import os
import random
import threading
import time

import pytest

from cdi_worker import errors
from cdi_worker.formats import readers
from cdi_worker.images.engine import fetch
from cdi_worker.sources import base
from cdi_worker.sources.registry import blobs, documents
from cdi_worker.sources.web import http
from tests.support import misbehave, processes, reading

DATA = random.Random(1).randbytes(3 << 20)
OPTIONS = fetch.Options(connections=3, chunk=256 << 10, window=4, no_progress=2)


def descriptor(data: bytes, algorithm: str = "sha256") -> documents.Descriptor:
    return documents.Descriptor("", documents.digest(data, algorithm), len(data))


def verified(stated: bytes, served: bytes, head: int = 1000, algorithm: str = "sha256") -> blobs.Verified:
    return blobs.Verified(
        descriptor(stated, algorithm), "x", served[:head], lambda at: readers.Bytes(served[at:])
    )


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, blobs.PIECE, len(DATA)])
@pytest.mark.parametrize("algorithm", ["sha256", "sha512"])
def test_verified(size: int, algorithm: str) -> None:
    reader = verified(DATA[:size], DATA[:size], algorithm=algorithm)
    assert reading.drained(reader) == DATA[:size]
    assert reader.readinto(memoryview(bytearray(1))) == 0
    reader.close()
    reader.close()


@pytest.mark.parametrize("size", [1, 900, 5000, len(DATA)])
@pytest.mark.parametrize("change", ["short", "long", "other"])
def test_not_what_the_digest_names(size: int, change: str) -> None:
    good = DATA[:size]
    served = {"short": good[:-1], "long": good + b"+", "other": good[:-1] + bytes([good[-1] ^ 1])}[change]
    reader = verified(good, served)
    with pytest.raises(errors.DigestMismatch, match="digest mismatch"):
        reading.drained(reader)
    reader.close()


def test_the_rest_is_not_opened_for_the_head() -> None:
    reader = blobs.Verified(descriptor(DATA), "x", DATA[:5000], lambda _: pytest.fail("opened"))
    assert content_of(reader, 5000) == DATA[:5000]
    reader.close()


def content_of(reader: base.Reader, size: int) -> bytes:
    data = bytearray(size)
    done = 0
    while done < size:
        done += reader.readinto(memoryview(data)[done:])
    return bytes(data)


def test_failures_cross_the_thread() -> None:
    class Failing(readers.Bytes):
        def readinto(self, into: memoryview, /) -> int:
            raise errors.TransferFailed(url="x", offset=1, reason="gone")

    reader = blobs.Verified(descriptor(DATA), "x", b"", lambda _: Failing(b""))
    for _ in range(2):
        with pytest.raises(errors.TransferFailed, match="gone"):
            reader.readinto(memoryview(bytearray(10)))
    reader.close()


def test_closing_waits_for_no_answer() -> None:
    """A read that cannot be ended, as the making of a connection, must not hold up a cancel."""
    over = threading.Event()

    class Deaf(readers.Bytes):
        def readinto(self, into: memoryview, /) -> int:
            over.wait(60)
            return 0

    reader = blobs.Verified(descriptor(DATA), "x", b"", lambda _: Deaf(b""))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        read = pool.submit(reading.drained, reader)
        time.sleep(0.1)
        began = time.monotonic()
        reader.close()
        assert time.monotonic() - began < 5
        over.set()
        assert isinstance(read.exception(), errors.DigestMismatch)


def test_read_all_is_bounded() -> None:
    assert blobs.read_all(readers.Bytes(b"12345"), 5, "x") == b"12345"
    with pytest.raises(errors.Unsupported, match="more than 4 bytes"):
        blobs.read_all(readers.Bytes(b"12345"), 4, "x")


# -- over the wire ------------------------------------------------------------------------------


def ordered(url: str, position: int = 0, cancel: threading.Event | None = None) -> blobs.Ordered:
    def reopen(_stop: base.Cancel) -> http.HttpSource:
        return http.HttpSource(url, base.Access()).__enter__()

    return blobs.Ordered(
        reopen(threading.Event()),
        position,
        reopen=reopen,
        options=OPTIONS,
        cancel=cancel or threading.Event(),
    )


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("position", [0, 100_000])
def test_ordered(ranges: bool, position: int) -> None:
    with misbehave.Server() as server:
        reader = ordered(server.serve("/blob", misbehave.Page(DATA, ranges=ranges)), position)
        assert reading.drained(reader) == DATA[position:]
        reader.close()
        assert (len(server.gets("/blob")) > 3) == ranges


@pytest.mark.parametrize("ranges", [True, False])
def test_resets(ranges: bool) -> None:
    good = misbehave.Page(DATA, ranges=ranges)
    torn = misbehave.Page(DATA, ranges=ranges, cut=1_000_000 if not ranges else 300_000)
    with misbehave.Server() as server:
        reader = ordered(server.serve("/blob", (good, 1), (torn, 3), good), 1000)
        assert reading.drained(reader) == DATA[1000:]
        reader.close()


def test_ranges_that_stop_to_work() -> None:
    with misbehave.Server() as server:
        good = misbehave.Page(DATA)
        reader = ordered(server.serve("/blob", (good, 4), misbehave.Page(DATA, ranges=False)), 1000)
        assert reading.drained(reader) == DATA[1000:]
        reader.close()


def test_closing_ends_a_stalled_read() -> None:
    with misbehave.Server() as server:
        page = misbehave.Page(DATA, stall=300_000)
        reader = ordered(server.serve("/blob", (misbehave.Page(DATA), 1), page))
        whole = blobs.Verified(descriptor(DATA), "x", b"", lambda _: reader)
        assert whole.readinto(memoryview(bytearray(10))) == 10
        whole.close()


@pytest.mark.parametrize("ranges", [True, False])
def test_cancel(ranges: bool) -> None:
    cancel = threading.Event()
    with misbehave.Server() as server:
        page = misbehave.Page(DATA, ranges=ranges, drip=(10_000, 0.01))
        reader = ordered(server.serve("/blob", page), cancel=cancel)
        assert reader.readinto(memoryview(bytearray(10)))
        cancel.set()
        with pytest.raises(errors.Cancelled):
            reading.drained(reader)
        reader.close()


def test_closed_while_it_is_opened_again_it_leaves_nothing_open() -> None:
    page = misbehave.Page(DATA)
    gc.collect()  # what earlier tests have left, whose end would hide one that stays
    before = len(os.listdir("/proc/self/fd"))

    def reopen(_stop: base.Cancel) -> http.HttpSource:
        opened = http.HttpSource(url, base.Access()).__enter__()
        closing = threading.Thread(target=ordered.close)
        closing.start()
        closing.join()
        return opened

    with misbehave.Server() as server:
        url = server.serve("/blob", (page, 1), dataclasses.replace(page, ranges=False))
        blob = http.HttpSource(url, base.Access()).__enter__()
        ordered = blobs.Ordered(blob, 0, reopen=reopen, options=OPTIONS, cancel=threading.Event())
        with pytest.raises(errors.Cancelled):
            ordered.readinto(memoryview(bytearray(1000)))
    processes.wait_for(lambda: len(os.listdir("/proc/self/fd")) <= before, "all is closed")
