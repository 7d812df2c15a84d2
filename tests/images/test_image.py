"""The read engine of an import, after a server's ranges were found to be wrong."""

from __future__ import annotations

import random

import pytest

from cdi_worker import errors
from cdi_worker.formats import readers
from cdi_worker.images import image
from cdi_worker.images.engine import cancelling
from cdi_worker.sources import base
from tests.support import reading

DATA = random.Random(3).randbytes(50_000)


class Shifted(base.Source):
    """Its ranges are shifted by a byte; its stream breaks once, at byte 30 000."""

    def __init__(self) -> None:
        self.opened: list[int] = []

    def open(self, opening: base.Opening) -> base.Facts:
        return base.Facts(name="memory", size=len(DATA), head=DATA[:4096])

    def open_range(self, start: int, end: int, /) -> base.Reader:
        return readers.BytesReader(DATA[start + 1 : end + 1])

    def read_range(self, offset: int, into: memoryview, /) -> int:
        return self.open_range(offset, offset + len(into)).readinto(into)

    def stream(self, offset: int = 0) -> base.Reader:
        self.opened.append(offset)
        end = 30_000 if len(self.opened) == 1 else len(DATA)
        return readers.BytesReader(DATA[offset and offset + 1 : end])


def test_wrong_ranges_are_not_used_to_resume_the_stream() -> None:
    source, scope = Shifted(), cancelling.Cancel()
    engine = image.Engine()
    served = source.image(base.Opening(engine))
    with pytest.raises(errors.NoRanges) as caught:
        served.fetcher(scope).read(20_000, 100)
    engine.do_without_ranges(caught.value)
    assert reading.read_all(served.ordered(scope)) == DATA
    assert source.opened == [0, 0]
