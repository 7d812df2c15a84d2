"""The end of threads that wait for an answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from cdi_worker.images.engine import crew


class Waiting:
    """Threads that wait until the ``wanted``-th interruption: those before it came too early for them."""

    def __init__(self, wanted: int) -> None:
        self._left = wanted
        self._over = threading.Event()
        self.threads = [threading.Thread(target=self._over.wait) for _ in range(8)]
        for thread in self.threads:
            thread.start()

    def interrupt(self) -> None:
        self._left -= 1
        if not self._left:
            self.end()

    def end(self) -> None:
        self._over.set()
        for thread in self.threads:
            thread.join()


@pytest.fixture
def late(request: pytest.FixtureRequest) -> Iterator[Waiting]:
    waiting = Waiting(request.param)
    yield waiting
    waiting.end()


@pytest.mark.parametrize("late", [3], indirect=True)
def test_an_interruption_that_comes_too_early_is_made_again(late: Waiting) -> None:
    crew.join(late.threads, late.interrupt)
    assert not any(thread.is_alive() for thread in late.threads)


@pytest.mark.parametrize("late", [-1], indirect=True)
def test_nobody_waits_for_one_after_the_other(late: Waiting) -> None:
    began = time.monotonic()
    crew.join(late.threads, late.interrupt)
    assert time.monotonic() - began < 3 * crew.LAST_WAIT
    assert all(thread.is_alive() for thread in late.threads)
