"""Ending waits: a ``Cancel`` wakes whatever waits; a thread of its own is left behind where nothing can."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Final, Protocol, Self, TypeVar

from cdi_worker import errors

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds between two looks at what has no way to wake a thread. Every use says what that is.
TURN: Final = 0.2


class Registration:
    """A callback of ``Cancel.on_set``, until ``close`` or the end of the ``with`` block.

    Once ``close`` has returned, the callback is neither running in another thread nor will it run: what it
    wakes, such as a socket, may then be closed. Do not close it while holding a lock that the callback takes.
    """

    __slots__ = ("_callback", "_caller", "_cancel", "was_called")

    def __init__(self, cancel: Cancel, callback: Callable[[], object]) -> None:
        self._cancel = cancel
        self._callback = callback
        self._caller: int | None = None
        #: Whether the callback was called, or is being called now.
        self.was_called = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.close()

    def close(self) -> None:
        """Unregister, waiting for the callback if another thread is in it. Safe to call twice."""
        self._cancel._forget(self)  # noqa: SLF001  (two halves of one thing)

    def call(self) -> None:
        """Call the callback. Its failure is logged: others have to be woken all the same."""
        try:
            self._callback()
        except Exception:
            log.exception("a wait could not be ended")


class Ending(Registration):
    """A registration whose block ends with ``errors.Cancelled`` if the cancel was set within it."""

    __slots__ = ()

    def __enter__(self) -> Self:
        if self.was_called:
            raise errors.Cancelled
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()
        # It may be set without a call so far: what another callback has closed may have ended this wait.
        if self.was_called or self._cancel.is_set():
            raise errors.Cancelled from error


Made = TypeVar("Made", bound=Registration)


class Cancel:
    """Asks to stop: set at most once, for good, with a reason.

    Threads do not look at it in turns: they register how they are woken. Callbacks run in the thread that
    calls ``set``, in the order of registration and with no lock of ours held. They must be short and must not
    wait. A signal handler must not call ``set``, because the thread that it interrupts may hold a lock that a
    callback takes; ``cdi_worker.cli`` hands signals over to a thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._registered: dict[Registration, None] = {}
        self._is_set = False
        self._reason = ""

    @property
    def reason(self) -> str:
        """Why it was set; empty before."""
        return self._reason

    def is_set(self) -> bool:
        return self._is_set

    def check(self) -> None:
        """Raise ``errors.Cancelled`` if it is set."""
        if self.is_set():
            raise errors.Cancelled

    def set(self, reason: str = "cancelled") -> None:
        """Set it and call all callbacks. Only the first call counts."""
        with self._changed:
            if self._is_set:
                return
            self._is_set, self._reason = True, reason
        log.debug("cancel reason=%r", reason)
        self._wake()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, at most ``timeout`` seconds; return whether it is."""
        with self._changed:
            return self._changed.wait_for(self.is_set, timeout)

    def pause(self, seconds: float) -> None:
        """Sleep. Raises ``errors.Cancelled`` as soon as it is set."""
        if self.wait(seconds):
            raise errors.Cancelled

    def on_set(self, callback: Callable[[], object]) -> Registration:
        """Have ``callback`` called once it is set: here and now if it is already."""
        return self._register(Registration(self, callback))

    def ending(self, wake: Callable[[], object]) -> Ending:
        """Have ``wake`` end the wait of a ``with`` block, which then raises ``errors.Cancelled``.

        Whatever a wait that was ended returns or raises is not to be trusted: a socket that was shut down
        looks like one whose other end has sent everything. The block is not entered if it is set already.
        """
        made = Ending(self, wake)
        if self.is_set():
            made.was_called = True
            return made
        return self._register(made)

    def child(self) -> Child:
        """Return a cancel that is set together with this one, and alone without this one."""
        return Child(self)

    def _register(self, made: Made) -> Made:
        with self._lock:
            if not self.is_set():
                self._registered[made] = None
                return made
        made.was_called = True
        made.call()
        return made

    def _forget(self, made: Registration) -> None:
        with self._lock:
            if self._registered.pop(made, made) is not None:
                here = threading.get_ident()
                self._changed.wait_for(lambda: made._caller in {None, here})  # noqa: SLF001

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
        while (made := self._next()) is not None:
            made.call()
            with self._changed:
                made._caller = None  # noqa: SLF001
                self._changed.notify_all()

    def _next(self) -> Registration | None:
        with self._changed:
            made = next(iter(self._registered), None)
            if made is not None:
                del self._registered[made]
                made._caller, made.was_called = threading.get_ident(), True  # noqa: SLF001
            return made


class Child(Cancel):
    """A part of something larger. Its failure ends the part: leaving the ``with`` block by one sets it."""

    def __init__(self, parent: Cancel) -> None:
        super().__init__()
        self._above = parent.on_set(lambda: self.set(parent.reason))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is not None:
            self.set(kind.__name__)
        self.close()

    def close(self) -> None:
        """Let go of the parent, which then no longer sets it."""
        self._above.close()


class Reads(Cancel):
    """The cancel of a source: it ends the reads of the import, or of the attempt that has failed.

    A source outlives an attempt to import it: where ranges fail, it is read once more in order. So a source
    gets this cancel when it is made, and an attempt that fails sets its own ``scope``. Until that block ends,
    this one is set too; for the next attempt it is not.
    """

    def __init__(self, cancel: Cancel) -> None:
        super().__init__()
        self._innermost = cancel
        self._above = cancel.on_set(self._wake)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._above.close()

    @property
    def reason(self) -> str:
        return self._innermost.reason

    def is_set(self) -> bool:
        # A scope is set with the one around it, and that with the parent.
        return self._innermost.is_set()

    def set(self, reason: str = "cancelled") -> None:
        """Refuse: that is for the caller, who sets the cancel above, and for a scope."""
        raise AssertionError(reason)

    @contextlib.contextmanager
    def scope(self) -> Iterator[Child]:
        """Yield the cancel of one attempt."""
        around = self._innermost
        with around.child() as scope, scope.on_set(self._wake):
            self._innermost = scope
            try:
                yield scope
            except BaseException as err:
                # While this is still the cancel of all reads.
                scope.set(type(err).__name__)
                raise
            finally:
                self._innermost = around


class _Never(Cancel):
    def set(self, reason: str = "cancelled") -> None:
        raise AssertionError(reason)


#: A cancel that nobody sets.
NEVER: Final[Cancel] = _Never()


class Event(Protocol):
    """The part of ``threading.Event`` that library callers need to provide."""

    def is_set(self) -> bool: ...


@contextlib.contextmanager
def adapted(given: Cancel | Event | None) -> Iterator[Cancel]:
    """Yield what a library caller gave to ``run`` or ``inspect`` as a ``Cancel``.

    An event wakes only those who wait for it and calls nothing back: a thread looks at it every ``TURN``.
    """
    if isinstance(given, Cancel):
        yield given
        return
    made = Cancel()
    if given is None:
        yield made
        return
    over = threading.Event()

    def watch() -> None:
        while not given.is_set():
            if over.wait(TURN):
                return
        made.set("the caller's event is set")

    watching = threading.Thread(target=watch, name="cancel", daemon=True)
    watching.start()
    try:
        yield made
    finally:
        over.set()
        watching.join()


@contextlib.contextmanager
def woken(cancel: Cancel) -> Iterator[int]:
    """Yield a descriptor for ``poll``: it can be read once ``cancel`` is set."""
    wake = os.eventfd(0, os.EFD_CLOEXEC)
    try:
        with cancel.on_set(lambda: os.eventfd_write(wake, 1)):
            yield wake
    finally:
        os.close(wake)


def apart(
    call: Callable[[], T],
    cancel: Cancel,
    *,
    grace: float = 2.0,
    limit: float | None = None,
    late: Callable[[], object] = lambda: None,
) -> T:
    """Return the result of ``call``, made in a thread of its own, which may be left behind.

    For what nothing can wake: name resolution, and libraries that connect and wait by themselves. A call that
    has not ended ``grace`` seconds after a cancel is left behind with ``errors.Cancelled``, one that takes
    longer than ``limit`` seconds with ``TimeoutError``. When it ends at last, well or not, ``late`` is called
    in its thread, to close what it has opened.
    """
    outcome: futures.Future[T] = futures.Future()
    turn = threading.Event()
    outcome.add_done_callback(lambda _: turn.set())

    def work() -> None:
        try:
            settle = functools.partial(outcome.set_result, call())
        except BaseException as err:  # noqa: BLE001  (raised again in the thread that waits)
            settle = functools.partial(outcome.set_exception, err)
        try:
            settle()
        except futures.InvalidStateError:
            late()

    threading.Thread(target=work, name="apart", daemon=True).start()
    with cancel.on_set(turn.set):
        turn.wait(limit)
    if cancel.is_set():
        futures.wait([outcome], grace)
    # Refused once there is an outcome; else there will be none any more, and the thread learns of it.
    if not outcome.cancel():
        return outcome.result()
    cancel.check()
    raise TimeoutError(f"no answer within {limit} s")
