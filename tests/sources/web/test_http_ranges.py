"""Ranges of an HTTP source: wrong responses, cuts, and requests that continue."""

from __future__ import annotations

import contextlib
import os
import random
import resource
from pathlib import Path
from typing import Any

import pytest

from cdi_worker import errors
from cdi_worker.images import image
from cdi_worker.images.engine import cancelling, fetch
from cdi_worker.sources import base
from tests.support import http_disk, misbehave, reading, tls


@pytest.mark.parametrize(
    ("later", "kind"),
    [
        ({"etag": '"two"'}, errors.SourceChanged),
        ({"body": http_disk.DATA + b"more"}, errors.SourceChanged),
        ({"content_range": "bytes {first}-{last}/7"}, errors.SourceChanged),
        ({"content_range": "bytes 0-{last}/{total}"}, errors.NoRanges),
        # As many bytes as requested, from another place.
        ({"content_range": "bytes 2000-6999/{total}"}, errors.NoRanges),
        ({"content_range": "bytes 999-5998/{total}"}, errors.NoRanges),
        pytest.param({"content_range": "nonsense"}, errors.NoRanges, id="without a range"),
        pytest.param({"ranges": False}, errors.NoRanges, id="the whole object"),
        ({"status": 416}, errors.NoRanges),
        ({"status": 503}, errors.Transient),
        ({"status": 404}, errors.Unreachable),
        ({"cut": 0}, errors.Transient),
    ],
)
def test_response_of_another_range_is_refused(
    server: misbehave.Server, later: dict[str, Any], kind: type[errors.Error]
) -> None:
    with (
        http_disk.opened(server.serve("/disk", (http_disk.GOOD, 1), http_disk.changed(**later))) as image,
        pytest.raises(kind),
    ):
        reading.read_range(image.source.ranges, 1000, 5000)


@pytest.mark.parametrize("framing", ["length", "chunked", "close"])
def test_empty_response_is_an_outage(server: misbehave.Server, framing: str) -> None:
    """Its end looks regular: only the range says that bytes are missing."""
    empty = http_disk.changed(short_range=0, framing=framing, content_range="bytes {first}-5999/{total}")
    with (
        http_disk.opened(server.serve("/disk", (http_disk.GOOD, 1), empty)) as image,
        pytest.raises(errors.CutShort, match="empty response"),
    ):
        reading.read_range(image.source.ranges, 1000, 5000)


def test_first_response_that_begins_elsewhere_is_not_the_beginning(server: misbehave.Server) -> None:
    """The first bytes are asked for again, without a range."""
    elsewhere = http_disk.changed(content_range="bytes 1-{last}/{total}", lie=lambda first, _: first + 1)
    url = server.serve("/disk", (elsewhere, 1), http_disk.GOOD)
    with http_disk.opened(url) as image:
        assert image.source.ranges is None
        assert bytes(image.facts.head) == http_disk.DATA[: len(image.facts.head)]


LATER = "Tue, 03 Nov 2026 10:00:00 GMT"


@pytest.mark.parametrize("etag", ['W/"one"', None])
def test_other_date_under_a_weak_etag_is_another_object(server: misbehave.Server, etag: str | None) -> None:
    url = server.serve(
        "/disk", (http_disk.changed(etag=etag), 1), http_disk.changed(etag=etag, modified=LATER)
    )
    with http_disk.opened(url) as image, pytest.raises(errors.SourceChanged):
        reading.read_range(image.source.ranges, 1000, 5000)


def test_strong_etag_is_enough(server: misbehave.Server) -> None:
    """Replicas and the edges of a CDN have other dates for the same object."""
    url = server.serve("/disk", (http_disk.GOOD, 1), http_disk.changed(modified=LATER))
    with http_disk.opened(url) as image:
        assert reading.read_range(image.source.ranges, 1000, 5000) == http_disk.DATA[1000:6000]


@pytest.mark.parametrize("fault", [{"cut": 777}, {"missing": 0, "cut_at": 1777}])
def test_bytes_before_a_cut_are_kept(server: misbehave.Server, fault: dict[str, Any]) -> None:
    with http_disk.opened(server.serve("/disk", (http_disk.GOOD, 1), http_disk.changed(**fault))) as image:
        assert reading.read_range(image.source.ranges, 1000, 5000) == http_disk.DATA[1000:1777]


@pytest.mark.parametrize("kind", ["each", "stream"])
def test_server_that_answers_late_gets_few_requests(server: misbehave.Server, kind: str) -> None:
    options = fetch.FetchOptions()
    chunks = 15
    page = misbehave.Page(random.Random(7).randbytes(chunks * options.chunk), delay=0.5)
    opening = base.Opening(image.Engine(options))
    with base.open_image(http_disk.source(server.serve("/disk", page)), opening) as found:
        fetcher = found.fetcher(cancelling.Cancel())
        if kind == "stream":
            with contextlib.closing(fetcher.stream()) as stream:
                assert reading.read_all(stream) == page.body
        else:
            into = bytearray(fetcher.size)
            fetcher.each(
                fetch.split(0, fetcher.size, fetcher.step),
                lambda offset, data: into.__setitem__(slice(offset, offset + len(data)), data),
            )
            assert into == page.body
    # How many chunks a request asks for depends on the measured speed, so on a busy machine on chance.
    assert len(server.gets("/disk")) <= chunks * 2 // 3


def test_ranges_of_a_failed_first_contact_are_forgotten(server: misbehave.Server) -> None:
    """The next attempt may reach another server behind the same name."""
    turns = (http_disk.changed(cut=1000), 1), (misbehave.Page(status=503), 1)
    source = http_disk.source(server.serve("/disk", *turns, http_disk.changed(ranges=False)))
    with pytest.raises(errors.Transient, match="503"):
        source.open(base.Opening())
    with base.open_image(source) as image:
        assert image.source.ranges is None
        assert http_disk.whole(image) == http_disk.DATA


@pytest.mark.parametrize("is_secure", [False, True])
def test_body_of_many_packets_wakes_the_reader_seldom(tmp_path: Path, is_secure: bool) -> None:
    """Each wake-up costs CPU time, here and of the other threads, which wait for the interpreter."""
    body, pieces = os.urandom(8 << 20), 512
    pair = tls.Authority(tmp_path).issue() if is_secure else None
    with misbehave.Server(pair) as server:
        page = misbehave.Page(body, drip=(len(body) // pieces, 0.0005))
        with http_disk.opened(server.serve("/disk", page), base.Access(insecure=True)) as image:
            into = memoryview(bytearray(len(body)))
            reader = image.source.ranges.open_range(0, len(body))
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
            done = 0
            while done < len(body):
                done += reader.readinto(into[done : done + (1 << 20)])
            waits = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before
    assert into == body
    assert waits < pieces / 4
