"""Push images to a registry and pull their disks as an import does."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

from cdi_worker.images import image
from cdi_worker.images.engine import cancelling, fetch
from cdi_worker.sources import base, trust
from cdi_worker.sources.packages import oci
from cdi_worker.sources.registry import locations
from cdi_worker.sources.registry import source as registry
from tests.support import reading, registries
from tests.support.containers import Image

DISK = random.Random(1).randbytes(300_000) + bytes(200_000) + b"end"
LARGE = random.Random(2).randbytes(3 << 20)
OTHER = b"other" * 1000


def opened(
    guarded: registries.Registry, endpoint: str, **more: str
) -> contextlib.AbstractContextManager[base.Image]:
    """Open the source for ``endpoint``; ``more`` are further fields of its location."""
    return base.open_image(of(guarded, endpoint, **more))


def of(guarded: registries.Registry, endpoint: str, **more: str) -> registry.RegistrySource:
    """Return the source for ``endpoint``; ``more`` are further fields of its location."""
    return source(locations.Registry(endpoint, guarded.access(), **more))


def at(
    location: locations.Registry, cancel: cancelling.Cancel | None = None, *, patience: float = 180.0
) -> contextlib.AbstractContextManager[base.Image]:
    """Open the source, whose blobs are read by an engine as in an import; close it after the block."""
    engine = image.Engine(fetch.FetchOptions(no_progress=patience))
    return base.open_image(source(location, cancel), base.Opening(engine))


def source(location: locations.Registry, cancel: cancelling.Cancel | None = None) -> registry.RegistrySource:
    """Return the source."""
    return oci.source(location, cancel or cancelling.Cancel())


@contextlib.contextmanager
def demanding(source: base.Source, key: str) -> Iterator[base.Image]:
    """Open an image that must be signed with the key in this file; close it after the block."""
    engine = image.Engine()
    with contextlib.closing(source):
        facts = source.open(base.Opening(engine, key))
        trust.confirm(trust.Demanded(signed_by=key), "registry", facts)
        yield image.Image(source, facts, engine)


def read(opened: base.Image) -> bytes:
    """Read and verify the disk, as an import does."""
    data = reading.read_all(opened.ordered(cancelling.Cancel()))
    opened.verify()
    return data


def pull(guarded: registries.Registry, image: Image, name: str = "r", **more: str) -> bytes:
    """Push an image and return the disk that is pulled back."""
    guarded.push(name, image)
    with opened(guarded, guarded.reference(name), **more) as found:
        assert found.facts.size is not None
        data = read(found)
        assert len(data) == found.facts.size
        assert data.startswith(found.facts.head)
        assert len(found.facts.head) == min(found.facts.size, 256 * 1024)
        return data
