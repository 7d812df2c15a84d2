"""Cancel an import: a ``Cancel`` ends waits; calls that cannot be ended are abandoned in their own thread."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Final, NamedTuple, Protocol, Self, TypeVar

from cdi_worker import errors

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Poll interval in seconds, for events that cannot wake a thread. Every use says why.
TURN: Final = 0.2


class Registration:
    """A callback registered with ``Cancel.on_set``, until ``close`` or the end of the ``with`` block.

    After ``close`` the callback is not running and will not be called, so the object that it uses, such as a
    socket, may be closed. Do not call ``close`` while holding a lock that the callback takes.
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

    def check(self) -> None:
        """Raise ``Cancel.error()`` if the callback was called; ``Reads`` may have been reset since then."""
        if self.was_called or self._cancel.is_set():
            raise self._cancel.error()

    def close(self) -> None:
        """Unregister; wait for the callback if it is running in another thread. Idempotent."""
        self._cancel._forget(self)  # noqa: SLF001  (same module)
        # The caller often keeps this object, and the callback the caller: without this, the cycle would keep
        # all that they read in memory until Python's next garbage collection.
        self._callback = lambda: None

    def call(self) -> None:
        """Call the callback. A failure is logged, so that the other callbacks are still called."""
        try:
            self._callback()
        except Exception:
            log.exception("cancel callback failed")


class Wake(NamedTuple):
    """``fd``: a descriptor for ``poll``, readable once the cancel was set. ``check`` then raises."""

    fd: int
    check: Callable[[], None]


class Cancel:
    """A request to stop: set at most once, with a reason, and never cleared. Thread-safe.

    Threads do not poll it: they register a callback that wakes them. Callbacks run in the thread that calls
    ``set``, in the order of registration, and without a lock of this class. They must be short and must not
    wait. A signal handler must not call ``set``, because the interrupted thread may hold a lock that a
    callback takes; ``cdi_worker.importer.cli`` handles signals in a thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._registered: dict[Registration, None] = {}
        self._is_set = False
        #: How often it was set: ``Reads`` may be reset before a waiting thread runs again.
        self._times = 0
        self._reason = ""
        self._failure: Exception | None = None

    @property
    def failure(self) -> Exception | None:
        """The failure of another part of the work that set it; None if the caller set it."""
        return self._failure

    @property
    def reason(self) -> str:
        """Why it was set; empty if it is not set."""
        return self._reason

    def is_set(self) -> bool:
        return self._is_set

    def check(self) -> None:
        """Raise ``error()`` if it is set."""
        if self.is_set():
            raise self.error()

    def error(self) -> Exception:
        """Return what an ended wait raises: the failure that set it, else ``errors.Cancelled``.

        So the caller sees the failure and not its consequence, whichever thread ends first.
        """
        return self.failure or errors.Cancelled()

    def fail(self, error: BaseException) -> None:
        """Set it because a part of the work failed with ``error``."""
        cause = error if isinstance(error, Exception) and not isinstance(error, errors.Cancelled) else None
        self.set(type(error).__name__, cause)

    def set(self, reason: str = "cancelled", failure: Exception | None = None) -> None:
        """Set it and call all callbacks. Later calls have no effect."""
        with self._changed:
            if self._is_set:
                return
            self._is_set, self._reason, self._failure = True, reason, failure
        log.debug("cancel reason=%r", reason)
        self._wake()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, at most ``timeout`` seconds; return whether it is."""
        with self._changed:
            before = self._times
            return self._changed.wait_for(lambda: self.is_set() or self._times != before, timeout)

    def pause(self, seconds: float) -> None:
        """Sleep. Raises ``error()`` when it is set."""
        if self.wait(seconds):
            raise self.error()

    def on_set(self, callback: Callable[[], object]) -> Registration:
        """Call ``callback`` when it is set, or immediately if it is already set."""
        registration = Registration(self, callback)
        with self._lock:
            if not self.is_set():
                self._registered[registration] = None
                return registration
        registration.was_called = True
        registration.call()
        return registration

    def notifying(self, condition: threading.Condition) -> Registration:
        """Wake all threads that wait for ``condition`` when it is set."""

        def notify() -> None:
            with condition:
                condition.notify_all()

        return self.on_set(notify)

    @contextlib.contextmanager
    def ending(self, wake: Callable[[], object]) -> Iterator[None]:
        """Let ``wake`` end a wait in a ``with`` block, which then raises ``errors.Cancelled``.

        The result or error of the ended wait is ignored: a socket after shutdown looks like one that has
        received everything. If it is already set, entering the block raises ``errors.Cancelled``.
        """
        self.check()
        registration = self.on_set(wake)
        try:
            yield
        except BaseException as err:
            registration.close()
            # ``wake`` may not have been called yet: another callback may have ended this wait, for example by
            # closing its socket.
            if registration.was_called or self.is_set():
                raise self.error() from err
            raise
        registration.close()
        registration.check()

    def child(self) -> Child:
        """Return a cancel that is set with this one. Setting the child does not set this one."""
        return Child(self)

    def _forget(self, registration: Registration) -> None:
        with self._lock:
            if self._registered.pop(registration, registration) is not None:
                here = threading.get_ident()
                self._changed.wait_for(lambda: registration._caller in {None, here})  # noqa: SLF001  (same module)

    def _wake(self) -> None:
        """Wake all that wait, and call the callbacks, one after the other and without a lock."""
        with self._changed:
            self._times += 1
            self._changed.notify_all()
        while True:
            with self._changed:
                called = next(iter(self._registered), None)
                if called is None:
                    return
                del self._registered[called]
                called._caller, called.was_called = threading.get_ident(), True  # noqa: SLF001  (same module)
            called.call()
            with self._changed:
                called._caller = None  # noqa: SLF001  (same module)
                self._changed.notify_all()


class Child(Cancel):
    """A cancel for a part of the work: it is set with its parent, or if its ``with`` block raises."""

    def __init__(self, parent: Cancel) -> None:
        super().__init__()
        self._above = parent.on_set(lambda: self.set(parent.reason, parent.failure))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.fail(error)
        self.close()

    def close(self) -> None:
        """Detach from the parent, which no longer sets it."""
        self._above.close()


class Reads(Cancel):
    """The cancel of a source: it is set by the import's cancel, and by the ``scope`` of a failed attempt.

    A source is used for several attempts: if ranges fail, it is read again in order. A failed attempt sets
    its own ``scope``, and with it this cancel, until the block of the scope ends. For the next attempt it is
    not set.
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
    def failure(self) -> Exception | None:
        return self._innermost.failure

    @property
    def reason(self) -> str:
        return self._innermost.reason

    def is_set(self) -> bool:
        # Setting the import's cancel or an outer scope also sets the innermost scope.
        return self._innermost.is_set()

    def set(self, reason: str = "cancelled", failure: Exception | None = None) -> None:
        """Not supported: set the import's cancel or a scope instead."""
        raise AssertionError(reason)

    @contextlib.contextmanager
    def scope(self) -> Iterator[Child]:
        """Yield the cancel of one attempt. Its failure is raised in place of ``errors.Cancelled``."""
        around = self._innermost
        with around.child() as scope, scope.on_set(self._wake):
            self._innermost = scope
            try:
                yield scope
            except BaseException as err:
                # Before ``finally`` makes the outer cancel the innermost one again.
                scope.fail(err)
                if isinstance(err, errors.Cancelled) and scope.failure is not None:
                    raise scope.failure from err
                raise
            finally:
                self._innermost = around


class _Never(Cancel):
    def set(self, reason: str = "cancelled", failure: Exception | None = None) -> None:
        raise AssertionError(reason)


#: A cancel that is never set.
NEVER: Final[Cancel] = _Never()


class Event(Protocol):
    """The part of ``threading.Event`` that a library caller must provide."""

    def is_set(self) -> bool: ...


@contextlib.contextmanager
def adapt(event: Cancel | Event | None) -> Iterator[Cancel]:
    """Adapt the ``cancel`` argument of ``run`` and ``inspect`` to a ``Cancel``.

    ``threading.Event`` has no callbacks, so a thread polls it every ``TURN`` seconds.
    """
    if isinstance(event, Cancel):
        yield event
        return
    cancel = Cancel()
    if event is None:
        yield cancel
        return
    over = threading.Event()

    def watch() -> None:
        while not event.is_set():
            if over.wait(TURN):
                return
        cancel.set("the caller's event is set")

    watching = threading.Thread(target=watch, name="cancel", daemon=True)
    watching.start()
    try:
        yield cancel
    finally:
        over.set()
        watching.join()


@contextlib.contextmanager
def wake_on(cancel: Cancel) -> Iterator[Wake]:
    """Yield a descriptor that ends a ``poll`` when ``cancel`` is set."""
    wake = os.eventfd(0, os.EFD_CLOEXEC)
    try:
        with cancel.on_set(lambda: os.eventfd_write(wake, 1)) as ending:
            yield Wake(wake, ending.check)
    finally:
        os.close(wake)


def run_apart(
    call: Callable[[], T],
    cancel: Cancel,
    *,
    grace: float = 2.0,
    limit: float | None = None,
    late: Callable[[], object] = lambda: None,
) -> T:
    """Return the result of ``call``, which runs in its own thread and may be abandoned.

    For calls that cannot be ended: name resolution, and libraries that connect by themselves. A call that has
    not returned ``grace`` seconds after a cancel is abandoned and raises ``errors.Cancelled``; one that takes
    longer than ``limit`` seconds raises ``TimeoutError``. When an abandoned call returns or fails, its thread
    calls ``late``, to close what it has opened.
    """
    outcome: futures.Future[T] = futures.Future()
    turn = threading.Event()
    outcome.add_done_callback(lambda _: turn.set())

    def work() -> None:
        try:
            settle = functools.partial(outcome.set_result, call())
        except BaseException as err:  # noqa: BLE001  (raised again in the waiting thread)
            settle = functools.partial(outcome.set_exception, err)
        try:
            settle()
        except futures.InvalidStateError:
            late()

    threading.Thread(target=work, name="apart", daemon=True).start()
    with cancel.on_set(turn.set) as ending:
        turn.wait(limit)
    if is_cancelled := ending.was_called or cancel.is_set():
        futures.wait([outcome], grace)
    # cancel() fails if there is an outcome. Otherwise the thread gets InvalidStateError when it sets one.
    if not outcome.cancel():
        return outcome.result()
    if is_cancelled:
        raise cancel.error()
    raise TimeoutError(f"no answer within {limit} s")
