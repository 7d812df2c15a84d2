"""How a caller says that it wants no more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import Final, Protocol, TypeVar

from cdi_worker import errors

T = TypeVar("T")


class Cancel(Protocol):
    """The part of ``threading.Event`` that says whether to stop."""

    def is_set(self) -> bool: ...


class Never:
    """A cancel that nobody sets."""

    def is_set(self) -> bool:
        return False


NEVER: Final = Never()


class Always:
    """A cancel that is set."""

    def is_set(self) -> bool:
        return True


class Waitable(Cancel, Protocol):
    """More of ``threading.Event``."""

    def wait(self, timeout: float | None = None, /) -> bool: ...


class Stop:
    """A cancel of one's own that also heeds the one above."""

    #: How late the one above is noticed, in seconds.
    TURN = 0.2

    def __init__(self, above: Waitable) -> None:
        self._above = above
        self._own = threading.Event()

    def set(self) -> None:
        self._own.set()

    def clear(self) -> None:
        """Take ``set`` back; the one above stays as it is."""
        self._own.clear()

    def is_set(self) -> bool:
        return self._own.is_set() or self._above.is_set()

    def wait(self, timeout: float | None = None, /) -> bool:
        left = float("inf") if timeout is None else timeout
        while not self.is_set() and left > 0:
            self._own.wait(min(left, self.TURN))
            left -= self.TURN
        return self.is_set()


def apart(call: Callable[[], T], cancel: Cancel, grace: float = 2.0) -> T:
    """Return what ``call`` does, done in a thread of its own.

    For calls of libraries, where nothing ends a wait but time-outs. One that has not ended ``grace`` seconds
    after a cancel is left behind, and ``errors.Cancelled`` raised.
    """
    outcome: futures.Future[T] = futures.Future()

    def work() -> None:
        try:
            outcome.set_result(call())
        except BaseException as err:  # noqa: BLE001  (raised again in the thread that waits)
            outcome.set_exception(err)

    threading.Thread(target=work, name="apart", daemon=True).start()
    cancelled_at: float | None = None
    while not futures.wait([outcome], Stop.TURN).done:
        if cancel.is_set():
            cancelled_at = cancelled_at or time.monotonic()
            if time.monotonic() - cancelled_at >= grace:
                raise errors.Cancelled
    return outcome.result()
