"""Ending threads that wait for a response."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from cdi_worker.images.engine import crew


class Waiting:
    """Threads that wait until the ``needed``-th interruption; earlier ones have no effect."""

    def __init__(self, needed: int) -> None:
        self._left = needed
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
def waiting_threads(request: pytest.FixtureRequest) -> Iterator[Waiting]:
    waiting = Waiting(request.param)
    yield waiting
    waiting.end()


@pytest.mark.parametrize("waiting_threads", [3], indirect=True)
def test_join_repeats_an_interruption_without_effect(waiting_threads: Waiting) -> None:
    crew.join(waiting_threads.threads, waiting_threads.interrupt)
    assert not any(thread.is_alive() for thread in waiting_threads.threads)


@pytest.mark.parametrize("waiting_threads", [-1], indirect=True)
def test_join_waits_for_all_threads_at_once(waiting_threads: Waiting) -> None:
    began = time.monotonic()
    crew.join(waiting_threads.threads, waiting_threads.interrupt)
    assert time.monotonic() - began < 3 * crew.LAST_WAIT
    assert all(thread.is_alive() for thread in waiting_threads.threads)
