"""The GCS source with an emulator and with a misbehaving server."""

from __future__ import annotations

import dataclasses
import gc
import gzip
import random
import time
import urllib.parse
from pathlib import Path
from typing import Any

import pytest

from cdi_worker import errors
from cdi_worker.importer import contract
from cdi_worker.importer.roles import importer
from cdi_worker.sources import base
from cdi_worker.sources.objects import locations
from cdi_worker.sources.web import http, session
from tests.support import gcs_objects, misbehave, objectservers, proxy, reading, tls


@pytest.fixture(scope="module")
def store(emulator: objectservers.Emulator) -> objectservers.Emulator:
    emulator.put("disk.img", gcs_objects.DATA)
    return emulator


def test_object_is_read_by_ranges_and_in_order(store: objectservers.Emulator) -> None:
    with gcs_objects.opened(store.url("disk.img")) as image:
        assert (image.facts.size, image.facts.head) == (
            len(gcs_objects.DATA),
            gcs_objects.DATA[: http.HEAD_SIZE],
        )
        assert image.facts.identity is not None
        assert image.facts.identity.startswith("generation 1")
        assert image.facts.digest == f"generation:{image.facts.identity.split()[1]}"
        assert reading.read_range(image.source.ranges, 300_001, 70_000) == gcs_objects.DATA[300_001:370_001]
        assert (
            reading.read_range(image.source.ranges, len(gcs_objects.DATA) - 5, 100) == gcs_objects.DATA[-5:]
        )
        assert reading.read_through_engine(image) == gcs_objects.DATA
        image.verify()
    with gcs_objects.opened(store.url("disk.img")) as image:
        assert reading.read_all(image.source.stream()) == gcs_objects.DATA
        image.verify()
        assert reading.read_all(image.source.stream(1000)) == gcs_objects.DATA[1000:]


def test_object_of_any_name_is_found(store: objectservers.Emulator) -> None:
    for name in ("a/b c/d+e%f.img", "é/ü.img", "x=y&z?.img", "(a)!'*#.img"):
        store.put(name, b"disk" * 1000)
        with gcs_objects.opened(store.url(urllib.parse.quote(name))) as image:
            assert image.facts.head == b"disk" * 1000, name


def test_compressed_object_is_read_as_stored(store: objectservers.Emulator) -> None:
    packed = gzip.compress(gcs_objects.DATA)
    store.put("packed", packed, encoding="gzip")
    with gcs_objects.opened(store.url("packed")) as image:
        assert image.facts.size == len(packed)
        assert reading.read_through_engine(image) == packed
        image.verify()


def test_gzip_encoding_is_accepted_and_not_decoded(server: misbehave.Server) -> None:
    packed = gzip.compress(gcs_objects.DATA)
    page = gcs_objects.media(packed)
    page = dataclasses.replace(page, headers={**page.headers, "Content-Encoding": "gzip"})
    with gcs_objects.opened(gcs_objects.serve(server, page, data=packed, contentEncoding="gzip")) as image:
        assert reading.read_through_engine(image) == packed
        image.verify()
    assert {request.headers["accept-encoding"] for request in server.gets(gcs_objects.MEDIA)} == {"gzip"}


def test_empty_object_is_read(store: objectservers.Emulator) -> None:
    store.put("empty", b"")
    with gcs_objects.opened(store.url("empty")) as image:
        assert (image.facts.size, image.facts.head, reading.read_all(image.source.stream())) == (0, b"", b"")
        image.verify()


def test_only_the_first_generation_is_read(server: misbehave.Server) -> None:
    gone = misbehave.Page(b"No such object: b/o", status=404, content_type="text/html")
    with gcs_objects.opened(gcs_objects.serve(server, (gcs_objects.media(), 2), gone)) as image:
        assert image.facts.identity is not None
        assert image.facts.identity.startswith("generation 7 crc32c ")
        assert reading.read_range(image.source.ranges, 5, 10) == gcs_objects.DATA[5:15]
        with pytest.raises(errors.SourceChanged, match="generation was 7, now replaced or deleted"):
            reading.read_range(image.source.ranges, 5, 10)


def test_changed_metadata_is_not_a_changed_object(server: misbehave.Server) -> None:
    touched = gcs_objects.media(etag='"two"', modified="Wed, 04 Nov 2026 10:00:00 GMT")
    with gcs_objects.opened(gcs_objects.serve(server, (gcs_objects.media(), 1), touched)) as image:
        assert reading.read_through_engine(image) == gcs_objects.DATA


def test_other_generation_in_the_response_is_detected(server: misbehave.Server) -> None:
    other = dataclasses.replace(gcs_objects.media(), headers={"x-goog-generation": "8"})
    with (
        gcs_objects.opened(gcs_objects.serve(server, (gcs_objects.media(), 1), other)) as image,
        pytest.raises(errors.SourceChanged),
    ):
        reading.read_range(image.source.ranges, 0, 10)


@pytest.mark.parametrize("ordered", [True, False])
def test_corrupted_bytes_are_detected(server: misbehave.Server, ordered: bool) -> None:
    url = gcs_objects.serve(
        server, gcs_objects.media(gcs_objects.DATA[:-1] + b"?"), data=gcs_objects.DATA[:-1] + b"!"
    )
    with gcs_objects.opened(url) as image:
        assert image.facts.size is not None
        image.verify()  # not everything was read: no error
        reading.read_all(image.source.stream()) if ordered else reading.read_through_engine(image)
        with pytest.raises(errors.ChecksumMismatch, match="checksum mismatch: expected crc32c:"):
            image.verify()


def test_second_read_is_verified_again(server: misbehave.Server) -> None:
    """The fallback to one stream reads the ranges again, and writes what it reads."""
    url = gcs_objects.serve(server, (gcs_objects.media(), 2), gcs_objects.media(b"?" + gcs_objects.DATA[1:]))
    with gcs_objects.opened(url) as image:
        reading.read_range(image.source.ranges, 0, 1000)
        reading.read_all(image.source.stream())
        with pytest.raises(errors.ChecksumMismatch):
            image.verify()


def test_throttling_and_resets_are_retried(server: misbehave.Server) -> None:
    busy = gcs_objects.error(429, "slow down", "rateLimitExceeded")
    limited = gcs_objects.error(403, "too many", "userRateLimitExceeded")
    torn = gcs_objects.media(cut=100_000)
    url = gcs_objects.serve(
        server,
        (gcs_objects.media(), 1),
        (busy, 2),
        (torn, 5),
        (limited, 1),
        (gcs_objects.error(503, "later"), 1),
        gcs_objects.media(),
    )
    with gcs_objects.opened(url) as image:
        assert reading.read_through_engine(image) == gcs_objects.DATA
        image.verify()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>log in</html>",
        b"\xff\xfe",
        b"[]",
        b"[" * 100_000,
        b"{}",
        b'{"generation": "7"}',
        b'{"generation": "new", "size": "1"}',
        b'{"generation": {}, "size": []}',
        b'{"generation": "7", "size": "1", "crc32c": "!!!"}',
        b'{"generation": "' + b"9" * 5000 + b'", "size": "1"}',
        b'{"generation": "7", "size": "1", "metadata": {"a": "' + b"a" * (2 << 20) + b'"}}',
    ],
    ids=lambda body: repr(body[:20]),
)
def test_malformed_metadata_is_reported(server: misbehave.Server, body: bytes) -> None:
    server.serve(gcs_objects.METADATA, misbehave.Page(body, ranges=False))
    gc.collect()  # finalizers find no room on a stack filled by nested brackets
    assert "the response is not object metadata" in gcs_objects.refusal(server.url("/b/o"))


@pytest.mark.parametrize("fault", [{"cut": 5}, {"missing": 5}])
def test_incomplete_metadata_is_requested_again(server: misbehave.Server, fault: dict[str, Any]) -> None:
    url = gcs_objects.serve(server, gcs_objects.media())
    whole, _ = server.turn(gcs_objects.METADATA, "HEAD")
    server.serve(gcs_objects.METADATA, (dataclasses.replace(whole, **fault), 1), whole)
    with pytest.raises(errors.Transient), gcs_objects.opened(url):
        pass
    with gcs_objects.opened(url) as image:
        assert image.facts.size == len(gcs_objects.DATA)


def test_deeply_nested_error_is_reported(server: misbehave.Server) -> None:
    server.serve(gcs_objects.METADATA, misbehave.Page(b"[" * 60_000, status=403))
    gc.collect()
    assert "access denied" in gcs_objects.refusal(server.url("/b/o"))


def test_refusal_names_its_cause(store: objectservers.Emulator, server: misbehave.Server) -> None:
    expected = f"no such object '{store.folder}nothing' in bucket 'images'"
    assert expected in gcs_objects.refusal(store.url("nothing"))
    url = gcs_objects.serve(server, gcs_objects.media())
    for page, cause in (
        (gcs_objects.error(404, "The specified bucket does not exist."), "no such bucket 'b'"),
        (gcs_objects.error(404, "No such object: b/o"), "no such object 'o' in bucket 'b'"),
        (gcs_objects.error(403, "no permission"), "access denied without credentials: no permission"),
        (gcs_objects.error(400, "User project specified is invalid."), "400 Bad Request: User project"),
    ):
        server.serve(gcs_objects.METADATA, page)
        assert cause in gcs_objects.refusal(url)


@pytest.mark.parametrize(
    "endpoint", ["gs://bucket", "gs:///name", "http://host/bucket", "https://h/b/o?sig=1"]
)
def test_malformed_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(errors.RequestError) as caught:
        gcs_objects.opened(endpoint)
    assert "=1" not in str(caught.value)


def test_google_is_reached_through_proxy_and_custom_ca(server: misbehave.Server, tmp_path: Path) -> None:
    authority = tls.Authority(tmp_path)
    with proxy.Proxy(authority=authority, origin=server.url("")) as between:
        access = base.Access(https_proxy=between.url, ca_files=(str(authority.certificate),))
        gcs_objects.serve(server, gcs_objects.media())
        with gcs_objects.opened("gs://b/o", access) as image:
            assert image.facts.name == "gs://b/o"
            assert reading.read_through_engine(image) == gcs_objects.DATA
    assert between.requests[0].target == "storage.googleapis.com:443"


def test_emulator_from_the_environment_is_used() -> None:
    paths = contract.Paths(data="/nowhere")
    for host in ("http://127.0.0.1:9", "127.0.0.1:9", "http://127.0.0.1:9/"):
        env = {"IMPORTER_SOURCE": "gcs", "IMPORTER_ENDPOINT": "gs://b/o o", "STORAGE_EMULATOR_HOST": host}
        location = importer.read(env, paths).location
        assert isinstance(location, locations.Gcs)
        assert location.address == "http://127.0.0.1:9/b/o%20o"


def test_slow_transfer_has_no_total_time_limit(server: misbehave.Server) -> None:
    """The only limit is on silence, here half a second: Google's library limits the whole transfer."""
    data, access = gcs_objects.DATA[:60_000], base.Access(patience=0.5)
    slow = gcs_objects.media(data, drip=(5_000, 0.1))
    url = gcs_objects.serve(server, (slow, 2), gcs_objects.media(data, stall=1000), data=data)
    started = time.monotonic()
    with gcs_objects.opened(url, access) as image:
        assert image.facts.head == data
        assert reading.read_all(image.source.stream()) == data
        image.verify()
        assert time.monotonic() - started > 4 * access.patience
        with pytest.raises(errors.Transient, match="timed out"):
            reading.read_all(image.source.stream())
    assert {request.headers["user-agent"] for request in server.gets(gcs_objects.MEDIA)} == {
        session.USER_AGENT
    }


def test_bytes_of_a_failed_first_contact_are_not_verified(server: misbehave.Server) -> None:
    """The object may have been replaced before the next attempt."""
    old, new = (random.Random(seed).randbytes(len(gcs_objects.DATA)) for seed in (1, 2))
    turns = (*((gcs_objects.media(old, cut=cut), 1) for cut in (100_000, 50_000)), gcs_objects.error(503, ""))
    url = gcs_objects.serve(server, *turns, data=old)
    source = gcs_objects.source(url)
    with pytest.raises(errors.Transient, match="503"):
        source.open(base.Opening())
    gcs_objects.serve(server, gcs_objects.media(new), data=new)
    with base.open_image(source) as image:
        assert reading.read_through_engine(image) == new
        image.verify()
