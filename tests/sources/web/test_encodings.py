"""Content-Encoding: what is not undone is refused, on every source that speaks HTTP, and never written."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import zlib
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.sources import base
from cdi_worker.sources.registry import locations as registry_locations
from tests.support import gcs_objects, http_disk, misbehave, pulled, s3_objects, ways
from tests.support.containers import Image, disk, layer

DISK = http_disk.DATA
#: The disk as a server may encode it, which no signature shows.
DEFLATED = zlib.compress(DISK)


def encoded(body: bytes, encoding: str, **faults: object) -> misbehave.Page:
    return dataclasses.replace(http_disk.GOOD, body=body, headers={"Content-Encoding": encoding}, **faults)


def imported(url: str, target: Path) -> bytes:
    ways.import_disk(url, target)
    return target.read_bytes()


@pytest.mark.parametrize(
    ("encoding", "ranges"), [*itertools.product(("deflate", "br", "gzip, br", "gzip"), (True, False))]
)
def test_unknown_or_wrong_encoding_is_refused(
    server: misbehave.Server, tmp_path: Path, encoding: str, ranges: bool
) -> None:
    url = server.serve("/disk", encoded(DEFLATED, encoding, ranges=ranges))
    with pytest.raises(errors.Unsupported, match=f"content encoding '{encoding}'"):
        imported(url, tmp_path / "disk.img")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("encoding", "ranges"),
    [*itertools.product(("none", "binary", "utf-8", "UTF-8", "utf8", "None, identity"), (True, False))],
)
def test_meaningless_encoding_is_ignored_with_a_warning(
    server: misbehave.Server, tmp_path: Path, encoding: str, ranges: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """As tools store it with an object that they upload: no coding has this name."""
    url = server.serve("/disk", encoded(DISK, encoding, ranges=ranges))
    assert imported(url, tmp_path / "disk.img") == DISK
    (warning,) = [each.getMessage() for each in caplog.records if "content encoding" in each.getMessage()]
    assert url in warning
    assert encoding in warning


def test_meaningless_encoding_of_some_responses_is_ignored(server: misbehave.Server) -> None:
    url = server.serve("/disk", (http_disk.GOOD, 1), encoded(DISK, "binary"))
    with http_disk.opened(url) as image:
        assert http_disk.whole(image) == DISK


@pytest.mark.parametrize("ranges", [True, False])
def test_gzip_is_undone(server: misbehave.Server, tmp_path: Path, ranges: bool) -> None:
    """As servers send it for files that end in .gz."""
    url = server.serve("/disk.gz", encoded(gzip.compress(DISK), "x-gzip", ranges=ranges))
    assert imported(url, tmp_path / "disk.img") == DISK


def test_encoding_of_later_ranges_is_checked(server: misbehave.Server) -> None:
    url = server.serve("/disk", (http_disk.GOOD, 1), encoded(DISK, "br"))
    with http_disk.opened(url) as image:
        with pytest.raises(errors.SourceError, match=r"different content encodings: identity and br"):
            image.source.ranges.read_range(300_000, memoryview(bytearray(1000)))
        with pytest.raises(errors.SourceError, match=r"different content encodings: identity and br"):
            image.source.stream(0)


def test_encoding_of_an_error_page_does_not_matter(server: misbehave.Server) -> None:
    gone = misbehave.Page(b"", status=416, headers={"Content-Encoding": "gzip"})
    url = server.serve("/disk", (http_disk.GOOD, 1), gone)
    with http_disk.opened(url) as image, pytest.raises(errors.NoRanges):
        image.source.ranges.read_range(300_000, memoryview(bytearray(1000)))


def test_s3_object_with_an_encoding_is_checked(server: misbehave.Server) -> None:
    with pytest.raises(errors.Unsupported, match="content encoding 'br'"):
        s3_objects.source(server.serve("/b/k", encoded(DISK, "br"))).open(base.Opening())
    # Stored by mistake with objects that an SDK uploaded in chunks.
    for each in ("aws-chunked", "none", "UTF-8"):
        with s3_objects.opened(server.serve("/b/k", encoded(DISK, each))) as image:
            assert http_disk.whole(image) == DISK


def test_gcs_object_with_an_encoding_is_checked(server: misbehave.Server) -> None:
    page = gcs_objects.media()
    page = dataclasses.replace(page, headers={**page.headers, "Content-Encoding": "br"})
    with pytest.raises(errors.Unsupported, match="content encoding 'br'"):
        gcs_objects.source(gcs_objects.serve(server, page)).open(base.Opening())


@pytest.mark.parametrize("encoding", ["none", "UTF-8"])
def test_gcs_object_with_a_meaningless_encoding_is_taken(server: misbehave.Server, encoding: str) -> None:
    page = gcs_objects.media()
    page = dataclasses.replace(page, headers={**page.headers, "Content-Encoding": encoding})
    url = gcs_objects.serve(server, page, contentEncoding=encoding)
    with gcs_objects.opened(url) as image:
        assert http_disk.whole(image) == gcs_objects.DATA


def test_blob_is_known_by_its_digest(server: misbehave.Server) -> None:
    """Registries behind a CDN send gzip for a layer that is one."""
    image = Image((layer(*disk(pulled.DISK)),))
    server.serve("/v2/r/manifests/latest", misbehave.Page(image.manifest.data))
    for blob in image.blobs:
        encoding = {"Content-Encoding": "gzip"} if blob in image.layers else {}
        server.serve(f"/v2/r/blobs/{blob.digest}", misbehave.Page(blob.data, headers=encoding))
    endpoint = f"docker://127.0.0.1:{server.port}/r"
    location = registry_locations.Registry(endpoint, base.Access(insecure=True))
    with pulled.at(location) as found:
        assert pulled.read(found) == pulled.DISK
