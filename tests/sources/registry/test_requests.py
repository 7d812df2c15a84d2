"""How many requests a registry gets for an image: each of them may cost it a password check."""

from __future__ import annotations

import collections
import functools
import random
from pathlib import Path

import pytest

from cdi_worker.images.engine import cancelling, fetch
from tests.support import containers, pulled, registries, tls

SIZE = 48_000_000
CONNECTIONS = fetch.FetchOptions().connections
SMALL = containers.layer(containers.Entry("etc/passwd", b"root"))


@functools.cache
def large() -> containers.Blob:
    """Return a layer with a disk."""
    return containers.layer(*containers.disk(random.Random(4).randbytes(SIZE)), compression="")


def pull(registry: registries.Registry) -> collections.Counter[tuple[str, int]]:
    """Pull a large image; count the GETs by kind and status."""
    registry.push("large", containers.Image((large(), SMALL)))
    into = memoryview(bytearray(1 << 20))
    with pulled.opened(registry, registry.reference("large")) as found:
        reader, left = found.ordered(cancelling.Cancel(), lambda _: None), SIZE
        while left:
            left -= reader.readinto(into)
        found.verify()
    found = registry.answered("large")
    kinds = {f"/v2/large/blobs/{large().digest}": "layer"}
    return collections.Counter((kinds.get(path, "other"), status) for path, status in found)


@pytest.fixture
def authority(tmp_path: Path) -> tls.Authority:
    return tls.Authority(tmp_path / "ca")


def test_registry_that_hashes_passwords_gets_few_requests(authority: tls.Authority, tmp_path: Path) -> None:
    running = registries.registry(tmp_path / "registry", authority=authority, password=True, rounds=10)
    with running as registry:
        counts = pull(registry)
    # The challenge; manifest, configuration and the small layer.
    assert (counts["other", 401], counts["other", 200], counts["other", 206]) == (1, 1, 2)
    assert counts["layer", 401] == 0
    # The first bytes, and at least 8 MiB a request, on a machine so busy that the hashing does not show.
    assert counts["layer", 206] <= CONNECTIONS + 5


def test_token_is_kept(authority: tls.Authority, tmp_path: Path) -> None:
    with (
        registries.Tokens(authority) as tokens,
        registries.registry(tmp_path / "registry", authority=authority, tokens=tokens) as registry,
    ):
        counts = pull(registry)
        assert len(tokens.issued) == 1
    assert counts["other", 401] == 1
    assert counts["layer", 401] == 0


def test_connection_is_kept_from_blob_to_blob(authority: tls.Authority, tmp_path: Path) -> None:
    image = containers.Image((containers.layer(*containers.disk(pulled.DISK)), SMALL, SMALL))
    with registries.registry(tmp_path / "registry", authority=authority, password=True) as registry:
        assert pulled.pull(registry, image, "small") == pulled.DISK
        assert len(registry.answered("small")) > 4
        assert len(registry.clients("small")) == 1
