"""Ranges of an HTTP source: what is not what was asked for, what breaks, and what goes on."""

from __future__ import annotations

from typing import Any

import pytest

from cdi_worker import errors
from tests.support import http_disk, misbehave, reading


@pytest.mark.parametrize(
    ("later", "kind"),
    [
        ({"etag": '"two"'}, errors.SourceChanged),
        ({"modified": "Tue, 03 Nov 2026 10:00:00 GMT"}, errors.SourceChanged),
        ({"body": http_disk.DATA + b"more"}, errors.SourceChanged),
        ({"content_range": "bytes {first}-{last}/7"}, errors.SourceChanged),
        ({"content_range": "bytes 0-{last}/{total}"}, errors.NoRanges),
        ({"content_range": "nonsense"}, errors.NoRanges),
        ({"ranges": False}, errors.NoRanges),
        ({"status": 416}, errors.NoRanges),
        ({"status": 503}, errors.Transient),
        ({"status": 404}, errors.Unreachable),
        ({"cut": 0}, errors.Transient),
    ],
)
def test_range_that_is_not_what_was_asked_for(
    server: misbehave.Server, later: dict[str, Any], kind: type[errors.Error]
) -> None:
    with (
        http_disk.opened(server.serve("/disk", (http_disk.GOOD, 1), http_disk.changed(**later))) as source,
        pytest.raises(kind),
    ):
        reading.part(source, 1000, 5000)


@pytest.mark.parametrize("fault", [{"cut": 777}, {"missing": 0, "cut_at": 1777}])
def test_what_came_before_a_break_counts(server: misbehave.Server, fault: dict[str, Any]) -> None:
    with http_disk.opened(server.serve("/disk", (http_disk.GOOD, 1), http_disk.changed(**fault))) as source:
        assert reading.part(source, 1000, 5000) == http_disk.DATA[1000:1777]


def test_reads_that_follow_each_other_are_one_request(server: misbehave.Server) -> None:
    with http_disk.opened(server.serve("/disk", http_disk.GOOD)) as source:
        source.expect(1000, 400_000)
        assert reading.part(source, 1000, 100_000) == http_disk.DATA[1000:101_000]
        assert reading.part(source, 101_000, 100_000) == http_disk.DATA[101_000:201_000]
        # A gap is read over; the last one ends the answer.
        assert reading.part(source, 250_000, 151_000) == http_disk.DATA[250_000:401_000]
        assert [seen.headers["range"] for seen in server.gets("/disk")[1:]] == ["bytes=1000-400999"]
        # What comes back, or lies behind, is asked for anew.
        assert reading.part(source, 1000, 10) == http_disk.DATA[1000:1010]
        assert reading.part(source, 500_000, 10) == http_disk.DATA[500_000:500_010]
        assert len(server.gets("/disk")) == 4


def test_a_request_for_several_reads_goes_on_after_a_break(server: misbehave.Server) -> None:
    with http_disk.opened(
        server.serve("/disk", (http_disk.GOOD, 1), (http_disk.changed(cut=150_000), 1), http_disk.GOOD)
    ) as source:
        source.expect(0, 400_000)
        assert reading.part(source, 0, 100_000) == http_disk.DATA[:100_000]
        assert reading.part(source, 100_000, 100_000) == http_disk.DATA[100_000:150_000]
        assert reading.part(source, 150_000, 50_000) == http_disk.DATA[150_000:200_000]
        assert reading.part(source, 200_000, 200_000) == http_disk.DATA[200_000:400_000]
        ranges = [seen.headers["range"] for seen in server.gets("/disk")[1:]]
        assert ranges == ["bytes=0-399999", "bytes=150000-399999"]
