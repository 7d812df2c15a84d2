"""The latency of a server in bytes: bandwidth times time to first byte, which is what a request costs.

Some servers work for each request: they hash a password, sign a token, look something up. Then they send
fast. The fetch engine sends them fewer and longer requests.
"""

from __future__ import annotations

import math
import threading
from typing import Final

from cdi_worker.images import kernel

#: Highest cost, in bytes.
MOST: Final = 256 << 20
#: After so many bytes, earlier measurements count half, so that a change of the network shows.
_MEMORY: Final = 64 << 20
#: Latency in seconds below which a server counts as local, and bytes per second of a fast connection. A few
#: fast connections to a local server are enough: more threads only wait for each other.
_NEAR: Final = 0.005
_FAST: Final = 100e6
#: Total lateness in seconds that is ignored: new connections and our own threads delay the first answers.
_SLACK: Final = 0.2


class Pace:
    """The measured answers of one server. Thread-safe.

    For the length of requests, the quickest answer counts. Others wait for this machine, for a new
    connection, or for a proxy that reads the whole range before it sends the first byte: longer requests
    would be wrong there. For the number of connections, late answers count too.
    """

    def __init__(self) -> None:
        # One receives while another writes, and each CPU has one.
        self._few = max(2, round(kernel.processors()))
        self._lock = threading.Lock()
        self._wait = math.inf
        self._late = 0.0
        self._bytes = 0.0
        self._seconds = 0.0

    def answered(self, seconds: float) -> None:
        """Report a request whose first bytes arrived after so many seconds."""
        with self._lock:
            self._wait = min(self._wait, seconds)
            self._late += max(0.0, seconds - _NEAR)

    def received(self, count: int, seconds: float) -> None:
        """Report bytes after the first ones, and the seconds that one connection needed for them."""
        with self._lock:
            if self._bytes > _MEMORY:
                self._bytes, self._seconds, self._late = self._bytes / 2, self._seconds / 2, self._late / 2
            self._bytes += count
            self._seconds += seconds

    def read(self, count: int, seconds: float) -> None:
        """Report a read of which only the whole time is known: it counts as latency and as transfer."""
        self.answered(seconds)
        self.received(count, seconds)

    @property
    def cost(self) -> int:
        """The bytes that one connection receives in the time before an answer; 0: not measured."""
        return 0 if math.isinf(self._wait) else self.within(self._wait)

    def within(self, seconds: float) -> int:
        """Return the bytes that one connection receives in that time; 0: not measured."""
        with self._lock:
            if not self._bytes or not self._seconds:
                return 0
            return int(min(seconds * self._bytes / self._seconds, MOST))

    def enough(self, most: int) -> int:
        """Return how many of ``most`` connections to use: a few, if the server is near and fast.

        The time of late answers counts as time to receive: perhaps only the first bytes were in a cache.
        """
        with self._lock:
            is_fast = self._bytes >= (self._seconds + max(0.0, self._late - _SLACK)) * _FAST
            return min(most, self._few) if self._wait <= _NEAR and is_fast else most
