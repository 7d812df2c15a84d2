"""Misbehaving registries: throttling, resets, redirects, and hostile documents."""

from __future__ import annotations

import dataclasses
import random
import threading

import pytest

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.sources import base
from cdi_worker.sources.registry import documents, locations
from cdi_worker.sources.registry import source as registry
from tests.support import containers, misbehave, pulled, reading
from tests.support.containers import Image

DISK = random.Random(1).randbytes(3 << 20)
IMAGE = Image((containers.layer(*containers.disk(DISK), compression=""),))
LAYER = IMAGE.layers[0]
BUSY = misbehave.Page(b"", status=429, headers={"Retry-After": "0"})
MANIFEST = "/v2/r/manifests/latest"


def blob_path(blob: containers.Blob) -> str:
    return f"/v2/r/blobs/{blob.digest}"


def page(blob: containers.Blob, **changes: object) -> misbehave.Page:
    page_of_blob = misbehave.Page(blob.data, content_type=blob.media_type)
    return dataclasses.replace(page_of_blob, **changes)


@pytest.fixture
def server() -> misbehave.Server:
    return misbehave.Server()


def serve(server: misbehave.Server, image: Image = IMAGE) -> None:
    """Serve an image as a normal registry does."""
    server.serve(MANIFEST, page(image.manifest))
    for blob in image.blobs:
        server.serve(blob_path(blob), page(blob))


def endpoint(server: misbehave.Server, target: str = "") -> str:
    return f"docker://127.0.0.1:{server.port}/r{target}"


def pull(
    server: misbehave.Server, access: base.Access | None = None, target: str = "", patience: float = 180.0
) -> bytes:
    location = locations.Registry(endpoint(server, target), access or base.Access(insecure=True))
    with pulled.at(location, patience=patience) as found:
        data = reading.read_all(found.ordered(cancelling.Cancel(), lambda _: None))
        found.verify()
    return data


def test_insecure_registry_may_use_plain_http(server: misbehave.Server) -> None:
    with server:
        serve(server)
        assert pull(server) == DISK
        with pytest.raises(errors.Unreachable, match="TLS"):
            pull(server, base.Access())


def test_throttled_documents_are_requested_again(server: misbehave.Server) -> None:
    with server:
        serve(server)
        server.serve(blob_path(IMAGE.config_blob), (BUSY, 2), page(IMAGE.config_blob))
        assert pull(server) == DISK
        server.serve(MANIFEST, page(IMAGE.manifest, missing=1))
        with pytest.raises(errors.Transient, match="ended before the end of the body"):
            pull(server)
        server.serve(MANIFEST, BUSY)
        # The caller retries the first request when it opens the source.
        with pytest.raises(errors.Transient, match="429") as caught:
            pull(server)
        assert caught.value.retry_after == 0


@pytest.mark.parametrize("ranges", [True, False])
def test_temporary_errors_in_a_layer_are_retried(server: misbehave.Server, ranges: bool) -> None:
    good = page(LAYER, ranges=ranges)
    faults = (
        BUSY,
        dataclasses.replace(BUSY, status=503),
        misbehave.Page(LAYER.data, cut=150_000, ranges=ranges),
    )
    with server:
        serve(server)
        server.serve(blob_path(LAYER), (good, 1), *((fault, 1) for fault in faults), good)
        assert pull(server) == DISK
        # The first answer of all is as welcome as a later one.
        server.serve(blob_path(LAYER), *((fault, 1) for fault in faults), good)
        assert pull(server) == DISK


def test_layer_that_always_fails_is_an_error(server: misbehave.Server) -> None:
    with server:
        serve(server)
        server.serve(blob_path(LAYER), page(LAYER, ranges=False, cut=1_000_000))
        with pytest.raises(
            errors.TransferFailed,
            match=r"broke \d+ times before this byte, and the server cannot resume there",
        ):
            pull(server, patience=0.5)


def test_mirrors_may_have_other_etags_and_dates(server: misbehave.Server) -> None:
    """The digest identifies the bytes, whatever tag or date each mirror has."""
    with server:
        serve(server)
        pages = [page(LAYER, etag=f'"{number}"', modified=None) for number in range(3)]
        server.serve(blob_path(LAYER), *[(item, 1) for item in pages], page(LAYER, etag=None))
        assert pull(server) == DISK


def test_redirect_is_reused_and_gets_no_credentials(server: misbehave.Server) -> None:
    guarded = {"password": "cdi:secret"}
    with server, misbehave.Server() as store:
        places = tuple(store.serve(f"/{number}?signature=s3cret", page(LAYER)) for number in range(3))
        server.serve(MANIFEST, page(IMAGE.manifest, **guarded))
        server.serve(blob_path(IMAGE.config_blob), page(IMAGE.config_blob, **guarded))
        server.serve(blob_path(LAYER), page(LAYER, to=places, **guarded))
        access = base.Access(insecure=True, user="cdi", password="secret", headers=(("X-Key", "secret"),))
        assert pull(server, access) == DISK
        assert len({request.path for request in store.requests}) == 1
        assert len(server.gets(blob_path(LAYER))) == 1
        for request in store.requests:
            assert not {"authorization", "x-key"} & set(request.headers)


def test_second_reading_must_find_the_same_disk(server: misbehave.Server) -> None:
    """The first one need not be verified: with random bytes for the digest it may be of another blob."""
    other, real = (
        containers.layer(*containers.disk(data), compression="") for data in (b"A" * 400_000, b"A" * 399_900)
    )
    image = Image((real,))
    with server:
        serve(server, image)
        lie = dataclasses.replace(page(real), body=other.data)
        server.serve(blob_path(real), (lie, 1), page(real))
        location = locations.Registry(endpoint(server), base.Access(insecure=True))
        with pulled.at(location) as found:
            assert found.facts.size == 400_000
            found.ordered(cancelling.Cancel(), lambda _: None)
            with pytest.raises(errors.SourceChanged, match=r"disk was .* of 400000 bytes"):
                found.ordered(cancelling.Cancel(), lambda _: None)


def test_expired_signed_url_is_requested_again(server: misbehave.Server) -> None:
    expired = misbehave.Page(b"<Error/>", status=403)
    with server, misbehave.Server() as store:
        old = store.serve("/old", (page(LAYER), 1), expired)
        new = store.serve("/new", page(LAYER))
        serve(server)
        server.serve(blob_path(LAYER), (page(LAYER, to=(old,)), 1), page(LAYER, to=(new,)))
        assert pull(server) == DISK
        assert store.gets("/new")


def test_endless_redirects_are_refused(server: misbehave.Server) -> None:
    with server:
        serve(server)
        server.serve(blob_path(LAYER), page(LAYER, to=(server.url(blob_path(LAYER)),)))
        with pytest.raises(errors.Unreachable, match="more than 10 redirects"):
            pull(server)


# -- documents -----------------------------------------------------------------------------------


def test_document_that_is_not_one_is_refused(server: misbehave.Server) -> None:
    large = b" " * (documents.LARGEST_MANIFEST + 1)
    with server:
        for body, message in ((b"<html>log in", "not JSON"), (large, "larger than 4194304 bytes")):
            server.serve(MANIFEST, misbehave.Page(body, content_type="text/html"))
            with pytest.raises(errors.Unsupported, match=message):
                pull(server)
        # Schema 1 is obsolete.
        accepted_types = server.gets(MANIFEST)[-1].headers["accept"]
        assert "manifest.v1" not in accepted_types.replace("oci.image.manifest.v1", "")
        serve(server, dataclasses.replace(IMAGE, config=containers.Blob(large, IMAGE.config_blob.media_type)))
        with pytest.raises(errors.Unsupported, match="larger than 4194304 bytes"):
            pull(server)


def test_document_with_another_digest_is_refused(server: misbehave.Server) -> None:
    digest = IMAGE.manifest.digest
    other = dataclasses.replace(IMAGE.manifest, data=IMAGE.manifest.data + b" ")
    with server:
        serve(server)
        server.serve(f"/v2/r/manifests/{digest}", page(other))
        with pytest.raises(errors.DigestMismatch, match=digest):
            pull(server, target=f"@{digest}")
        index = containers.index(containers.for_platform(IMAGE.manifest, documents.normal_architecture("")))
        server.serve(MANIFEST, page(index))
        with pytest.raises(errors.DigestMismatch, match=digest):
            pull(server)


def test_foreign_layer_is_refused(server: misbehave.Server) -> None:
    foreign = dataclasses.replace(
        LAYER, media_type="application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"
    )
    with server:
        serve(server, Image((foreign,)))
        with pytest.raises(errors.Refused, match="foreign layer"):
            pull(server)


def test_digest_is_computed_without_the_header(server: misbehave.Server) -> None:
    """The digest is computed if the registry does not state it, or states a malformed one."""
    location = locations.Registry(endpoint(server), base.Access(insecure=True))
    stated = "sha256:" + "1" * 64
    with server:
        for header, digest in (
            ("", IMAGE.manifest.digest),
            ("latest", IMAGE.manifest.digest),
            (stated, stated),
        ):
            headers = {"Docker-Content-Digest": header} if header else {}
            server.serve(MANIFEST, page(IMAGE.manifest, headers=headers))
            before = len(server.gets(MANIFEST))
            assert registry.RegistrySource(location, cancelling.Cancel()).digest() == digest
            assert len(server.gets(MANIFEST)) - before == (digest != stated)


@pytest.mark.parametrize("head", [405, 503])
def test_digest_works_without_head_requests(server: misbehave.Server, head: int) -> None:
    location = locations.Registry(endpoint(server), base.Access(insecure=True))
    with server:
        server.serve(MANIFEST, page(IMAGE.manifest, head=head))
        assert registry.RegistrySource(location, cancelling.Cancel()).digest() == IMAGE.manifest.digest
        server.serve(MANIFEST, misbehave.Page(status=403, head=405))
        with pytest.raises(errors.Unreachable, match="403"):
            registry.RegistrySource(location, cancelling.Cancel()).digest()


def test_cancel_ends_waiting_for_a_retry(server: misbehave.Server) -> None:
    cancel = cancelling.Cancel()
    with server:
        serve(server)
        server.serve(blob_path(LAYER), dataclasses.replace(BUSY, headers={"Retry-After": "60"}))
        location = locations.Registry(endpoint(server), base.Access(insecure=True))
        threading.Timer(0.2, cancel.set).start()
        with pytest.raises(errors.Cancelled):
            pulled.source(location, cancel).open(base.Opening())
