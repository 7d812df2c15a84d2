"""Responses of a pinned redirect: they are closed by their owner, and an interrupted one has no end."""

from __future__ import annotations

import pytest

from cdi_worker import errors
from cdi_worker.formats import readers
from cdi_worker.images.engine import cancelling
from cdi_worker.sources.web import http
from tests.support import http_disk, misbehave, processes

DATA = bytes(range(256)) * 4096


@pytest.mark.parametrize("ranges", [True, False])
def test_incomplete_response_is_closed(ranges: bool) -> None:
    """Even if the reader keeps the response for a next read, which may never come."""
    before = processes.descriptors()
    with (
        misbehave.Server() as server,
        http_disk.opened(server.serve("/d", misbehave.Page(DATA, ranges=ranges))) as image,
    ):
        if ranges:
            reader = image.source.ranges.open_range(0, len(DATA))
            assert reader.readinto(memoryview(bytearray(1000))) == 1000
    processes.wait_for(lambda: processes.descriptors() <= before, "the connections are closed")


@pytest.mark.parametrize("ranges", [True, False])
def test_interrupted_response_is_not_complete(ranges: bool) -> None:
    page = misbehave.Page(DATA, ranges=ranges, framing="length" if ranges else "close")
    cancel = cancelling.Cancel()
    with (
        misbehave.Server() as server,
        http_disk.opened(server.serve("/d", page), cancel=cancel) as image,
    ):
        stream = image.source.stream()
        into = memoryview(bytearray(len(DATA)))
        assert readers.fill(stream, into[: http.HEAD_SIZE + 1]) == http.HEAD_SIZE + 1
        cancel.set()
        with pytest.raises(errors.Cancelled):
            stream.readinto(into)
