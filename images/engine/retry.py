"""Retry with exponential back-off, jitter and a no-progress limit, and judge what is too slow."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from cdi_worker import errors, units
from cdi_worker.images.engine import cancelling

log = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_DELAY = 0.2
LONGEST_DELAY = 20.0
#: Maximum seconds without progress for a server that asks to wait (Retry-After). Rate limits are usually
#: counted per minute; a request for more is answered by a later run.
LONGEST_SILENCE = 600.0
#: Bytes per second, on average over the stall timeout, below which a peer counts as one that sends nothing.
MIN_SPEED = 1024


class Slow(TimeoutError):
    """A peer has sent nothing, or too little, for too long. ``remedy``: how to wait for it nevertheless."""

    def __init__(self, count: int, seconds: float, min_speed: float) -> None:
        reason = f"only {count} bytes in {seconds:.0f} s, less than {units.format_size(min_speed)} per second"
        super().__init__(reason if count else f"no data for {seconds:.0f} s")
        self.remedy = errors.Remedy([("accept less", "min_speed") if count else ("wait longer", "patience")])


class Shared:
    """When one of the connections to a source last made progress: ``at``, of ``time.monotonic``."""

    def __init__(self) -> None:
        self.at = time.monotonic()


class Patience:
    """Decide after each failure whether to retry, and when.

    The number of attempts and the total time are not limited: only ``limit`` seconds without progress end the
    retries. There is one retry in any case, because a silent connection may use up the limit. After a
    malformed response it is the only one, unless there are new bytes. Less than
    ``min_speed`` bytes per second, on average since the last progress, is not progress. The time that the
    server asks to wait (Retry-After) is added to the limit, up to ``longest`` seconds in total. ``retried``
    is called with each failure before its wait, with ``failure.pause``. Not thread-safe: each thread has its
    own, and the progress of those with the same ``shared`` counts for all.
    """

    def __init__(
        self,
        limit: float,
        cancel: cancelling.Cancel,
        *,
        min_speed: float = MIN_SPEED,
        longest: float = LONGEST_SILENCE,
        retried: Callable[[errors.Transient], object] = lambda _: None,
        shared: Shared | None = None,
    ) -> None:
        self._limit = limit
        self._min_speed = min_speed
        self._longest = max(limit, longest)
        self._cancel = cancel
        self._retried = retried
        self._shared = shared or Shared()
        #: Where a response was malformed.
        self._malformed: int | None = None
        self._begin(time.monotonic())

    def _begin(self, now: float) -> None:
        self._since = self._unbroken = self._reported = self._shared.at = now
        self._bytes = 0
        self._failures = 0
        self._allowed = self._limit
        self._delay = FIRST_DELAY

    @property
    def is_over(self) -> bool:
        """Whether the limit has passed since there was progress."""
        return time.monotonic() - self._since > self._allowed

    def progress(self, count: int, name: str, offset: int) -> None:
        """Report bytes that arrived: if they are fast enough, restart the limit and the back-off.

        Raises ``errors.TransferFailed`` if they were too slow for longer than the limit, without a failure.
        """
        now = time.monotonic()
        self._bytes += count
        self._reported = now
        if self._bytes >= self._min_speed * (now - self._since):
            self._begin(now)
        elif now - max(self._unbroken, self._shared.at) > self._limit:
            lack = Slow(self._bytes, now - self._since, self._min_speed)
            raise errors.TransferFailed(url=name, offset=offset, reason=str(lack), remedy=lack.remedy)

    def resume(self) -> None:
        """Exclude the time since the last report: the caller needed it, for example for slow storage."""
        idle = time.monotonic() - self._reported
        self._since += idle
        self._unbroken += idle
        self._reported += idle

    def wait(self, failure: errors.Transient, offset: int) -> None:
        """Sleep before the next attempt. Raises ``errors.TransferFailed`` if that would exceed the limit.

        ``offset``: where the missing bytes begin.
        """
        if isinstance(failure, errors.Malformed):
            if offset == self._malformed:
                raise errors.TransferFailed(
                    url=failure.fields["url"], offset=offset, reason=failure.fields["reason"]
                ) from failure
            self._malformed = offset
        self._failures += 1
        delay = self._delay * random.uniform(0.5, 1.0)  # noqa: S311  (jitter, not a secret)
        # A longer one than the limit would end the retries, also while other connections make progress.
        self._delay = min(self._delay * 2, LONGEST_DELAY, max(FIRST_DELAY, self._limit / 4))
        asked = failure.retry_after or 0.0
        delay = max(delay, asked)
        self._allowed = min(self._allowed + asked, self._longest)
        since = max(self._since, self._shared.at)
        waited = time.monotonic() - since
        if (waited if self._failures > 1 else 0) + delay > self._allowed:
            lack = Slow(self._bytes, waited, self._min_speed)
            reason = f"{failure.fields['reason']}; {lack}"
            if asked:
                reason += (
                    f", and the server asks to wait {asked:.0f} s (at most {self._longest:.0f} s in total)"
                )
            # A server that sends nothing but errors is not helped by more time.
            remedy = lack.remedy if self._bytes else None
            raise errors.TransferFailed(
                url=failure.fields["url"], offset=offset, reason=reason, remedy=remedy
            ) from failure
        failure.pause = errors.Pause(time.monotonic() + delay, since, self._allowed)
        self._retried(failure)
        log.debug("retry offset=%d delay=%.1f reason=%s", offset, delay, failure)
        if self._cancel.wait(delay):
            raise self._cancel.error() from failure
        self._unbroken = self._reported = time.monotonic()


def patiently(
    call: Callable[[], T],
    limit: float,
    cancel: cancelling.Cancel,
    retried: Callable[[errors.Transient], object] = lambda _: None,
) -> T:
    """Return the result of ``call``; retry after each ``errors.Transient``, for ``limit`` seconds."""
    patience = Patience(limit, cancel, retried=retried)
    while True:
        try:
            return call()
        except errors.Transient as err:
            patience.wait(err, 0)


class SpeedMeter:
    """Measure a peer's speed during reads. It is given up after ``seconds`` without data or too slow.

    ``min_speed``: bytes per second, on average since it last had that speed; 0: any is enough. The time
    between the reads is not counted: the caller needs it, for example for slow storage. Not thread-safe.
    """

    def __init__(self, seconds: float, min_speed: float = MIN_SPEED) -> None:
        self._limit = seconds
        self._min_speed = min_speed
        self._seconds = 0.0
        self._bytes = 0

    @property
    def left(self) -> float:
        """The seconds that the next read may last."""
        return max(0.0, self._limit - self._seconds)

    def read(self, call: Callable[[], int]) -> int:
        """Return the number of bytes that ``call`` has read; 0 at the end. Raises like ``count``."""
        began = time.monotonic()
        count = call()
        if count:
            self.count(count, time.monotonic() - began)
        return count

    def count(self, count: int, seconds: float) -> None:
        """Add bytes that arrived within ``seconds``. Raises ``Slow`` if they are too slow."""
        self._bytes += count
        self._seconds += seconds
        if count and self._bytes >= self._min_speed * self._seconds:
            self._bytes, self._seconds = 0, 0.0
        elif self._seconds >= self._limit:
            raise Slow(self._bytes, self._seconds, self._min_speed)
