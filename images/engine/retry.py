"""Retry with exponential back-off, jitter and a no-progress limit."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from cdi_worker import errors
from cdi_worker.images.engine import cancelling

log = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_DELAY = 0.2
LONGEST_DELAY = 20.0
#: Maximum of a server's Retry-After, in seconds. It may be longer than the no-progress limit.
LONGEST_RETRY_AFTER = 300.0


class Patience:
    """Decide after each failure whether to retry, and when.

    The number of attempts and the total time are not limited: only ``limit`` seconds without progress end the
    retries. Not thread-safe: each piece of work has its own.
    """

    def __init__(self, limit: float, cancel: cancelling.Cancel) -> None:
        self._limit = limit
        self._cancel = cancel
        self.progress()

    def progress(self) -> None:
        """Report progress: restart the limit and the back-off."""
        self._deadline = time.monotonic() + self._limit
        self._delay = FIRST_DELAY

    def wait(self, failure: errors.Transient, offset: int) -> None:
        """Sleep before the next attempt. Raises ``errors.TransferFailed`` when the limit is reached."""
        delay = self._delay * random.uniform(0.5, 1.0)  # noqa: S311  (jitter, not a secret)
        self._delay = min(self._delay * 2, LONGEST_DELAY)
        if failure.retry_after is not None:
            requested = min(failure.retry_after, LONGEST_RETRY_AFTER)
            delay = max(delay, requested)
            self._deadline = max(self._deadline, time.monotonic() + requested + self._limit / 2)
        if time.monotonic() + delay > self._deadline:
            raise errors.TransferFailed(
                url=failure.fields["url"], offset=offset, reason=failure.fields["reason"]
            ) from failure
        log.debug("retry offset=%d delay=%.1f reason=%s", offset, delay, failure)
        if self._cancel.wait(delay):
            raise self._cancel.error() from failure


def patiently(
    call: Callable[[], T],
    limit: float,
    cancel: cancelling.Cancel,
    retried: Callable[[errors.Transient], None] = lambda _: None,
) -> T:
    """Return the result of ``call``; retry after each ``errors.Transient``, for ``limit`` seconds."""
    patience = Patience(limit, cancel)
    while True:
        try:
            return call()
        except errors.Transient as err:
            retried(err)
            patience.wait(err, 0)
