"""Requests lend their content to the reader of an upload: every byte is read once, whatever the timing."""

from __future__ import annotations

import hashlib
import random
import threading
from concurrent import futures

import pytest

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.sources import base, upload
from tests.support import processes


class Content:
    """The bytes of a request. ``stays``: after them it blocks until it is interrupted."""

    def __init__(self, data: bytes, *, stays: bool = False, breaks: Exception | None = None) -> None:
        self.data = data
        self.at = 0
        self._stays = stays
        self._breaks = breaks
        self._interrupted = threading.Event()
        self._dice = random.Random(len(data))

    def readinto(self, into: memoryview, /) -> int:
        if self._interrupted.is_set():
            raise ConnectionError("interrupted")
        part = self.data[self.at : self.at + self._dice.randint(1, len(into))]
        if not part and self._stays:
            assert self._interrupted.wait(processes.PATIENCE)
            raise ConnectionError("interrupted")
        if not part and self._breaks:
            raise self._breaks
        into[: len(part)] = part
        self.at += len(part)
        return len(part)

    def interrupt(self) -> None:
        self._interrupted.set()


class Reading:
    """The thread that reads the upload."""

    def __init__(self, body: upload.Body, size: int = 1000) -> None:
        self.found = bytearray()
        self._body = body
        self._size = size
        self._pool = futures.ThreadPoolExecutor(1)
        self.ended = self._pool.submit(self._run)
        self._pool.shutdown(wait=False)

    def _run(self) -> None:
        into = memoryview(bytearray(self._size))
        while count := self._body.readinto(into):
            self.found += into[:count]


def lending(body: upload.Body, content: Content) -> futures.Future[Exception | None]:
    """Lend the content in a thread of its own."""
    pool = futures.ThreadPoolExecutor(1)
    result = pool.submit(body.lend, content)
    pool.shutdown(wait=False)
    processes.wait_for(lambda: body.is_lent or result.done(), "the loan")
    return result


def test_requests_are_read_one_after_the_other() -> None:
    body = upload.Body()
    reading = Reading(body)
    for part in (b"one", b"", b"two" * 1000):
        assert body.lend(Content(part)) is None
        assert not body.is_lent
    assert body.received == 3003
    assert not body.is_complete
    body.end()
    reading.ended.result(processes.PATIENCE)
    assert reading.found == b"one" + b"two" * 1000
    assert body.is_complete
    assert body.lend(Content(b"late")) is None
    assert body.received == 3003


def test_error_of_the_content_is_raised_in_the_lender() -> None:
    body = upload.Body()
    reading = Reading(body)
    broken = ConnectionResetError("gone")
    assert body.lend(Content(b"abc", breaks=broken)) is broken
    assert body.lend(Content(b"def")) is None
    body.end()
    reading.ended.result(processes.PATIENCE)
    assert reading.found == b"abcdef"


def test_silent_content_is_withdrawn() -> None:
    body = upload.Body()
    reading = Reading(body)
    body.withdraw()
    lent = lending(body, Content(b"abc", stays=True))
    body.withdraw()
    assert isinstance(lent.result(processes.PATIENCE), ConnectionError)
    assert (body.received, body.is_lent) == (3, False)
    assert body.lend(Content(b"def")) is None
    body.end()
    reading.ended.result(processes.PATIENCE)
    assert reading.found == b"abcdef"


def test_content_is_withdrawn_without_a_reader() -> None:
    """Everything could have been read, but was not."""
    body = upload.Body()
    lent = lending(body, Content(b"abc"))
    body.withdraw()
    assert isinstance(lent.result(processes.PATIENCE), ConnectionError)
    assert body.received == 0
    reading = Reading(body)
    assert body.lend(Content(b"abc")) is None
    body.end()
    reading.ended.result(processes.PATIENCE)
    assert reading.found == b"abc"


def test_available_content_is_not_withdrawn() -> None:
    body = upload.Body()
    lent = lending(body, Content(b"x" * 5000))
    withdrawing = threading.Thread(target=body.withdraw)
    withdrawing.start()
    reading = Reading(body)
    withdrawing.join(processes.PATIENCE)
    assert lent.result(processes.PATIENCE) is None
    assert body.received == 5000
    body.end()
    reading.ended.result(processes.PATIENCE)


@pytest.mark.parametrize("lends", [False, True])
def test_failure_reaches_reader_and_lender(lends: bool) -> None:
    """The reader gets the first error at once; the lender continues when the reader has ended."""
    body = upload.Body()
    reading = Reading(body)
    lent = lending(body, Content(b"abc", stays=True)) if lends else None
    failure = errors.TransferFailed(url="x", offset=3, reason="first")
    body.fail(failure)
    body.fail(errors.Cancelled())
    assert reading.ended.exception(processes.PATIENCE) is failure
    assert body.is_complete
    body.end()
    if lent is not None:
        assert lent.result(processes.PATIENCE) is None
    with pytest.raises(errors.TransferFailed):
        body.readinto(memoryview(bytearray(1)))


def test_stop_ends_reader_and_lender() -> None:
    body = upload.Body()
    reading = Reading(body)
    lent = lending(body, Content(b"", stays=True))
    body.fail(errors.Cancelled())
    assert isinstance(reading.ended.exception(processes.PATIENCE), errors.Cancelled)
    body.end()
    assert lent.result(processes.PATIENCE) is None


def test_no_byte_is_lost_or_duplicated() -> None:
    """Several clients resume one upload, and take it over from each other at any moment."""
    seed = 2
    data = random.Random(seed).randbytes(300_000)
    body = upload.Body()
    reading = Reading(body, 700)
    turn = threading.Lock()

    def client(number: int) -> None:
        dice = random.Random(seed * 10 + number)
        while body.received < len(data):
            body.withdraw()
            if not turn.acquire(timeout=dice.random() * 0.01):
                continue
            try:
                at = body.received
                length = dice.choice([1, 100, 5000, 60_000])
                # A complete upload is not taken over again.
                stays = dice.random() < 0.1 and at + length < len(data)
                body.lend(Content(data[at : at + length], stays=stays))
            finally:
                turn.release()

    clients = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for each in clients:
        each.start()
    for each in clients:
        each.join(processes.PATIENCE)
    body.end()
    reading.ended.result(processes.PATIENCE)
    assert hashlib.sha256(reading.found).digest() == hashlib.sha256(data).digest()


def test_source_is_read_once() -> None:
    body = upload.Body()
    data = random.Random(1).randbytes(base.HEAD_SIZE + 1000)
    lent = futures.ThreadPoolExecutor(1).submit(body.lend, Content(data))
    source = upload.UploadSource(body, len(data), cancelling.Cancel())
    with base.open_image(source) as image:
        assert image.facts.head == data[: base.HEAD_SIZE]
        stream = image.source.stream()
        found, into = b"", memoryview(bytearray(100_000))
        while len(found) < len(data):
            found += into[: stream.readinto(into)]
        assert found == data
        body.end()
        assert stream.readinto(into) == 0
        for offset in (0, 5):
            with pytest.raises(errors.NoRanges):
                image.source.stream(offset)
    assert lent.result(processes.PATIENCE) is None
