"""Threads with one job: the first failure ends all of them."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from cdi_worker import errors
from cdi_worker.images.engine import retry

#: Seconds for threads to end once their reads are interrupted, and between two interruptions.
LAST_WAIT = 1.0
TURN = 0.1


def join(threads: Sequence[threading.Thread], interrupt: Callable[[], None]) -> None:
    """Wait for threads that are told to end; what they wait for is ended by ``interrupt``.

    Again and again: a thread may have been just about to ask. One that waits for what nothing ends can do no
    harm any more, and ends with its time-out.
    """
    deadline = time.monotonic() + LAST_WAIT
    left = [thread for thread in threads if thread.is_alive()]
    while left and time.monotonic() < deadline:
        interrupt()
        left[0].join(TURN)
        left = [thread for thread in left if thread.is_alive()]


class Crew:
    """Some threads with one job: the first failure stops all, and after the end none delivers.

    ``interrupt`` ends the reads that threads wait for.
    """

    def __init__(self, interrupt: Callable[[], None], cancel: retry.Cancel) -> None:
        self.stop = threading.Event()
        self.notify: Callable[[], None] = lambda: None
        self._interrupt = interrupt
        self._cancel = cancel
        self._threads: list[threading.Thread] = []
        self._ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._delivering = 0
        self._idle = threading.Condition()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        with self._idle:
            self.stop.set()
            self._idle.wait_for(lambda: not self._delivering)
        self.notify()
        join(self._threads, self._interrupt)

    @contextlib.contextmanager
    def delivering(self) -> Iterator[None]:
        """Hold the end back while a range is delivered; none is after the end has begun."""
        with self._idle:
            if self.stop.is_set():
                raise errors.Cancelled
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
        if self._cancel.is_set():
            raise errors.Cancelled

    def wait(self) -> None:
        """Return when every thread has ended well."""
        for _ in self._threads:
            while True:
                self.check()
                try:
                    self._ended.get(timeout=0.5)
                    break
                except queue.Empty:
                    continue
        self.check()

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as err:  # noqa: BLE001  (carried to the thread that waits)
            if self._failure is None:
                self._failure = err
            self.stop.set()
        self._ended.put(None)
        self.notify()
