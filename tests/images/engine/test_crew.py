"""The end of threads that wait for an answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from cdi_worker import errors
from cdi_worker.images.engine import cancelling, crew
from tests.support import processes

SOON = processes.PATIENCE


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "LAST_WAIT", 0.3)


def run(workers: crew.Crew, job: Callable[[], object], count: int) -> None:
    with workers:
        workers.start(job, count)
        workers.wait()


def test_threads_that_nothing_ends_are_left_behind_together() -> None:
    over = threading.Event()
    threads = [threading.Thread(target=over.wait) for _ in range(8)]
    for thread in threads:
        thread.start()
    began = time.monotonic()
    crew.join(threads)
    assert time.monotonic() - began < 6 * crew.LAST_WAIT
    assert all(thread.is_alive() for thread in threads)
    over.set()
    crew.join(threads)
    assert not any(thread.is_alive() for thread in threads)


def test_the_first_failure_ends_the_waits_of_the_others() -> None:
    scope = cancelling.Cancel()
    workers = crew.Crew(scope)
    numbers = iter(range(3))

    def work() -> None:
        if next(numbers) == 2:
            raise errors.Unreachable(url="here", reason="gone")
        scope.pause(60)

    began = time.monotonic()
    with pytest.raises(errors.Unreachable, match="gone"):
        run(workers, work, 3)
    assert time.monotonic() - began < SOON
    assert scope.reason == "Unreachable"


def test_threads_that_others_start_are_waited_for() -> None:
    workers = crew.Crew(cancelling.Cancel())
    ended: list[int] = []

    def late() -> None:
        time.sleep(crew.LAST_WAIT + 0.5)
        ended.append(1)

    def first() -> None:
        time.sleep(0.2)  # until it is waited for
        workers.start(late, 2)

    run(workers, first, 1)
    assert len(ended) == 2


def test_thread_that_cannot_be_started_is_the_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a pod whose limit of processes is reached."""
    workers = crew.Crew(cancelling.Cancel())

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        run(workers, lambda: None, 1)


def test_what_ends_well_sets_nothing() -> None:
    scope = cancelling.Cancel()
    workers = crew.Crew(scope)
    run(workers, lambda: None, 3)
    assert not scope.is_set()


def test_a_cancel_ends_the_wait_for_threads_that_do_not() -> None:
    scope, over = cancelling.Cancel(), threading.Event()
    workers = crew.Crew(scope)
    threading.Timer(0.1, scope.set).start()
    began = time.monotonic()
    with pytest.raises(errors.Cancelled):
        run(workers, over.wait, 2)
    assert time.monotonic() - began < SOON
    over.set()
