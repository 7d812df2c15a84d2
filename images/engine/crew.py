"""A group of threads with the same job, which the first failure ends."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from cdi_worker.images.engine import cancelling

#: Maximum seconds to wait for threads after their reads were ended.
LAST_WAIT = 1.0
#: Seconds between two calls of ``look`` while no thread ends.
INTERVAL = 1.0


def join(threads: Sequence[threading.Thread]) -> None:
    """Wait at most LAST_WAIT seconds for threads whose cancel is set.

    A thread in a call that cannot be ended is left running: it no longer delivers, and ends with its timeout.
    """
    deadline = time.monotonic() + LAST_WAIT
    # Not a thread that failed to start: the error of its start is raised.
    for thread in filter(lambda thread: thread.ident, threads):
        thread.join(max(0.0, deadline - time.monotonic()))


class Crew:
    """Threads with the same job. The first failure ends all; after ``close`` no thread delivers.

    ``scope``: the cancel of the attempt. A failure sets it, which ends the reads of the other threads.
    """

    def __init__(self, scope: cancelling.Cancel) -> None:
        self._scope = scope
        self._threads: list[threading.Thread] = []
        #: True: a thread has ended. False: the scope is set.
        self._ended: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._delivering = 0
        self._idle = threading.Condition()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(None if kind is None else kind.__name__)

    def close(self, reason: str | None) -> None:
        """Wait for the threads to end; set the scope with ``reason`` first if there is one."""
        if reason is not None:
            self._scope.set(reason)
        with self._idle:
            self._idle.wait_for(lambda: not self._delivering)
        join(self._threads)

    @contextlib.contextmanager
    def hold_close(self) -> Iterator[None]:
        """Make ``close`` wait for the end of this block. Raises ``errors.Cancelled`` after ``close``."""
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
        for _ in range(count):
            name = f"fetch-{len(self._threads)}"
            thread = threading.Thread(target=self._run, args=(job,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def check(self) -> None:
        """Raise the first failure, or ``errors.Cancelled`` if the scope is set."""
        if self._failure is not None:
            raise self._failure
        self._scope.check()

    def wait(self, look: Callable[[], None] = lambda: None) -> None:
        """Wait until all threads have ended; call ``look`` each INTERVAL. Raises the first failure."""
        ended = 0
        with self._scope.on_set(lambda: self._ended.put(False)):
            # A thread may start others until it ends.
            while ended < len(self._threads):
                try:
                    ended += self._ended.get(timeout=INTERVAL)
                except queue.Empty:
                    look()
                self.check()

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as err:  # noqa: BLE001  (raised again in the waiting thread)
            if self._failure is None:
                self._failure = err
            self._scope.fail(err)
        self._ended.put(True)
