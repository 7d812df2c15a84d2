"""Threads with one job: the first failure ends all of them."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from cdi_worker.images.engine import cancelling

#: Seconds for threads to end once their reads have been.
LAST_WAIT = 1.0


def join(threads: Sequence[threading.Thread]) -> None:
    """Wait for threads whose cancel is set.

    One that waits for what nothing ends can do no harm any more, and ends with its time-out.
    """
    deadline = time.monotonic() + LAST_WAIT
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


class Crew:
    """Some threads with one job: the first failure stops all, and after the end none delivers.

    ``scope``: of the attempt that the job is a part of. A failure sets it, and with it ends the reads that
    other threads wait in.
    """

    def __init__(self, scope: cancelling.Cancel) -> None:
        self._scope = scope
        self._threads: list[threading.Thread] = []
        #: Whether a thread has ended; False: something else is to be looked at.
        self._ended: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._delivering = 0
        self._idle = threading.Condition()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(None if kind is None else kind.__name__)

    def close(self, reason: str | None) -> None:
        """End the threads, with a ``reason`` where there is more to do."""
        if reason is not None:
            self._scope.set(reason)
        with self._idle:
            self._idle.wait_for(lambda: not self._delivering)
        join(self._threads)

    @contextlib.contextmanager
    def delivering(self) -> Iterator[None]:
        """Hold the end back while a range is delivered; none is after the end has begun."""
        with self._idle:
            self._scope.check()
            self._delivering += 1
        try:
            yield
        finally:
            with self._idle:
                self._delivering -= 1
                self._idle.notify_all()

    def start(self, job: Callable[[], None], count: int) -> None:
        for number in range(count):
            thread = threading.Thread(target=self._run, args=(job,), name=f"fetch-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def check(self) -> None:
        """Raise the first failure, or ``Cancelled``."""
        if self._failure is not None:
            raise self._failure
        self._scope.check()

    def wait(self) -> None:
        """Return when every thread has ended well."""
        left = len(self._threads)
        with self._scope.on_set(lambda: self._ended.put(False)):
            while left:
                left -= self._ended.get()
                self.check()

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as err:  # noqa: BLE001  (carried to the thread that waits)
            if self._failure is None:
                self._failure = err
            self._scope.set(type(err).__name__)
        self._ended.put(True)
