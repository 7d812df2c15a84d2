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
#: Maximum seconds without progress for a server that asks to wait (Retry-After). Rate limits are usually
#: counted per minute; a request for more is answered by a later run.
LONGEST_SILENCE = 600.0


class Patience:
    """Decide after each failure whether to retry, and when.

    The number of attempts and the total time are not limited: only ``limit`` seconds without progress end the
    retries. What the server asks to wait (Retry-After) is added to them, up to ``longest`` seconds in total.
    Not thread-safe: each piece of work has its own.
    """

    def __init__(self, limit: float, cancel: cancelling.Cancel, *, longest: float = LONGEST_SILENCE) -> None:
        self._limit = limit
        self._longest = max(limit, longest)
        self._cancel = cancel
        self.progress()

    def progress(self) -> None:
        """Report progress: restart the limit and the back-off."""
        self._since = time.monotonic()
        self._allowed = self._limit
        self._delay = FIRST_DELAY

    def wait(self, failure: errors.Transient, offset: int) -> None:
        """Sleep before the next attempt. Raises ``errors.TransferFailed`` if that would exceed the limit."""
        delay = self._delay * random.uniform(0.5, 1.0)  # noqa: S311  (jitter, not a secret)
        self._delay = min(self._delay * 2, LONGEST_DELAY)
        asked = failure.retry_after or 0.0
        delay = max(delay, asked)
        self._allowed = min(self._allowed + asked, self._longest)
        waited = time.monotonic() - self._since
        if waited + delay > self._allowed:
            reason = f"{failure.fields['reason']}; no data for {waited:.0f} s"
            if asked:
                reason += (
                    f", and the server asks to wait {asked:.0f} s (at most {self._longest:.0f} s in total)"
                )
            raise errors.TransferFailed(url=failure.fields["url"], offset=offset, reason=reason) from failure
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
