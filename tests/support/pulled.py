"""Push images to a registry and pull their disks as an import does."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

from cdi_worker.images import image
from cdi_worker.images.engine import cancelling, fetch
from cdi_worker.sources import base, trust
from cdi_worker.sources.registry import locations
from cdi_worker.sources.registry import source as registry
from tests.support import reading, registries
from tests.support.containers import Image

DISK = random.Random(1).randbytes(300_000) + bytes(200_000) + b"end"
LARGE = random.Random(2).randbytes(3 << 20)
OTHER = b"other" * 1000


class Patient(registry.RegistrySource):
    """A source with patience of its own."""

    patience = 180.0

    def open(self, opening: base.Opening) -> None:
        """Open it; its blobs are read by an engine as in an import."""
        engine = image.Engine(fetch.Options(no_progress=self.patience))
        super().open(base.Opening(engine, opening.judging))


def source(
    location: locations.Registry, cancel: cancelling.Cancel | None = None, *, patience: float = 180.0
) -> registry.RegistrySource:
    """Return the source, read by an engine as in an import."""
    made = Patient(location, cancel or cancelling.Cancel())
    made.patience = patience
    return made


@contextlib.contextmanager
def demanding(source: base.Source, demand: trust.Demand) -> Iterator[base.Source]:
    """Open an image that must have these signatures; close it after the block."""
    with contextlib.closing(source):
        with trust.opening(source, demand, "registry") as judging:
            source.open(base.Opening(judging=judging))
        yield source


def opened(guarded: registries.Registry, endpoint: str, **more: str) -> registry.RegistrySource:
    """Return the source for ``endpoint``; ``more`` are further fields of its location."""
    return source(locations.Registry(endpoint, guarded.access(), **more))


def read(source: base.Source) -> bytes:
    """Read and verify the disk, as an import does."""
    data = reading.read_all(image.Image(source, image.Engine()).ordered(cancelling.Cancel()))
    source.verify()
    return data


def pull(guarded: registries.Registry, image: Image, name: str = "r", **more: str) -> bytes:
    """Push an image and return the disk that is pulled back."""
    guarded.push(name, image)
    with opened(guarded, guarded.reference(name), **more) as source:
        assert source.size is not None
        data = read(source)
        assert len(data) == source.size
        assert data.startswith(source.head)
        assert len(source.head) == min(source.size, 256 * 1024)
        return data
