"""A cancel ends every wait, once and with a reason; a part of an import can be ended alone."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable

import pytest

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from tests.support import processes

SOON = processes.PATIENCE


def started(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


# -- being set


def test_wait_ends_when_it_is_set() -> None:
    cancel = cancelling.Cancel()
    assert not cancel.wait(0.01)
    threading.Timer(0.1, cancel.set).start()
    assert cancel.wait(SOON)
    assert cancel.wait(0)
    with pytest.raises(errors.Cancelled):
        cancel.pause(SOON)


# -- callbacks


def test_callbacks_run_in_order_once_in_the_thread_that_sets() -> None:
    cancel = cancelling.Cancel()
    called: list[tuple[int, int]] = []
    for number in range(5):
        cancel.on_set(lambda number=number: called.append((number, threading.get_ident())))
    setter = started(cancel.set)
    setter.join()
    cancel.set()
    assert called == [(number, setter.ident) for number in range(5)]


def test_unregistered_callback_is_not_called() -> None:
    cancel = cancelling.Cancel()
    called: list[str] = []
    with cancel.on_set(lambda: called.append("block")) as registration:
        pass
    registration.close()
    cancel.on_set(lambda: called.append("stays"))
    cancel.set()
    assert called == ["stays"]
    assert not registration.was_called


def test_failing_callback_does_not_prevent_others(caplog: pytest.LogCaptureFixture) -> None:
    cancel = cancelling.Cancel()
    called: list[int] = []
    cancel.on_set(lambda: called.append(1))
    cancel.on_set(lambda: 1 // 0)
    cancel.on_set(lambda: called.append(2))
    cancel.set()
    cancel.on_set(lambda: 1 // 0)
    assert called == [1, 2]
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError] * 2


def test_callbacks_may_use_the_cancel() -> None:
    """They run with no lock held: they may register, unregister themselves and others, and set it again."""
    cancel = cancelling.Cancel()
    called: list[str] = []

    def act() -> None:
        first.close()
        second.close()
        cancel.set("again")
        cancel.on_set(lambda: called.append("registered within"))
        called.append("act")

    first = cancel.on_set(act)
    second = cancel.on_set(lambda: called.append("second"))
    started(cancel.set).join(SOON)
    assert called == ["registered within", "act"]
    assert cancel.reason == "cancelled", "another reason than the first"


def test_unregistering_waits_for_a_callback_that_runs() -> None:
    """Else the socket that it shuts down might be closed, and its number another file's."""
    cancel = cancelling.Cancel()
    begun, go_on = threading.Event(), threading.Event()
    ended: list[float] = []

    def slow() -> None:
        begun.set()
        assert go_on.wait(SOON)
        ended.append(time.monotonic())

    registration = cancel.on_set(slow)
    setting = started(cancel.set)
    assert begun.wait(SOON)
    closing = started(registration.close)
    closing.join(0.1)
    assert closing.is_alive()
    go_on.set()
    closing.join(SOON)
    assert ended
    setting.join()


def test_no_callback_is_missed() -> None:
    """However registering, setting and unregistering fall together, each callback runs once or never."""
    dice = random.Random(1)
    for _ in range(200):
        cancel = cancelling.Cancel()
        counts = [0] * 20
        ready = threading.Barrier(2)

        def register(cancel: cancelling.Cancel = cancel, counts: list[int] = counts) -> None:
            ready.wait()  # noqa: B023  (joined in the same round)
            for number in range(len(counts)):

                def count(number: int = number) -> None:
                    counts[number] += 1

                registration = cancel.on_set(count)
                if number % 2:
                    registration.close()

        thread = started(register)
        ready.wait()
        time.sleep(dice.random() / 20_000)
        cancel.set()
        thread.join()
        assert counts[::2] == [1] * 10
        assert set(counts[1::2]) <= {0, 1}


# -- ending a wait


def test_result_of_an_ended_wait_is_discarded() -> None:
    cancel = cancelling.Cancel()
    here, there = socket.socketpair()
    with here, there:
        received: list[bytes] = []

        def receive() -> None:
            with cancel.ending(lambda: here.shutdown(socket.SHUT_RDWR)):
                received.append(here.recv(1))

        threading.Timer(0.1, cancel.set).start()
        with pytest.raises(errors.Cancelled):
            receive()
        # It looks like the end of what the other end had to send.
        assert received == [b""]


def test_exception_of_an_ended_wait_is_the_cause() -> None:
    cancel = cancelling.Cancel()

    def wait() -> None:
        with cancel.ending(lambda: None):
            cancel.set()
            raise ConnectionResetError

    with pytest.raises(errors.Cancelled) as raised:
        wait()
    assert isinstance(raised.value.__cause__, ConnectionResetError)


def test_a_wait_that_another_callback_has_ended() -> None:
    """Such as a connection that several threads share."""
    cancel = cancelling.Cancel()
    closed = threading.Event()
    cancel.on_set(closed.set)
    cancel.on_set(lambda: time.sleep(0.2))

    def wait() -> None:
        with cancel.ending(lambda: None):
            assert closed.wait(SOON)
            raise ConnectionResetError

    threading.Timer(0.1, cancel.set).start()
    with pytest.raises(errors.Cancelled):
        wait()


def test_other_exception_is_raised_unchanged() -> None:
    with pytest.raises(ConnectionResetError), cancelling.Cancel().ending(lambda: None):
        raise ConnectionResetError


def test_wait_does_not_start_after_a_cancel() -> None:
    cancel = cancelling.Cancel()
    cancel.set()
    with pytest.raises(errors.Cancelled), cancel.ending(lambda: pytest.fail("nothing waits")):
        pytest.fail("it has begun")


# -- parts


def test_child_is_set_with_its_parent() -> None:
    parent = cancelling.Cancel()
    with parent.child() as child, child.child() as grandchild:
        parent.set("why")
        assert (child.reason, grandchild.reason) == ("why", "why")
    with parent.child() as late:
        assert late.is_set()


def test_failing_part_ends_only_its_own_waits() -> None:
    parent = cancelling.Cancel()
    ended: list[str] = []
    parent.on_set(lambda: ended.append("parent"))
    with contextlib.suppress(KeyError), parent.child() as child:
        child.on_set(lambda: ended.append("child"))
        raise KeyError
    assert ended == ["child"]
    assert child.reason == "KeyError"


def test_ended_waits_raise_the_failure_of_the_other_part() -> None:
    """Whichever thread ends first: the caller must not take a failure for a cancel."""
    failure = errors.NoRanges(url="u", reason="r")
    with cancelling.Cancel().child() as part:
        below = part.child()
        part.fail(failure)
        for wait in (part.check, below.check, lambda: part.pause(9), part.ending(print).__enter__):
            with pytest.raises(errors.NoRanges) as raised:
                wait()
            assert raised.value is failure
        below.close()


def test_cancelled_part_is_no_failure() -> None:
    part = cancelling.Cancel().child()
    part.fail(errors.Cancelled())
    with part, pytest.raises(errors.Cancelled):
        part.check()


def test_attempt_raises_the_failure_that_ended_it() -> None:
    def attempt() -> None:
        with cancelling.Reads(cancelling.Cancel()) as reads, reads.scope() as scope:
            scope.fail(errors.NoRanges(url="u", reason="r"))
            raise errors.Cancelled

    with pytest.raises(errors.NoRanges):
        attempt()


# -- the reads of a source


def test_cancel_of_the_caller_ends_reads() -> None:
    cancel = cancelling.Cancel()
    with cancelling.Reads(cancel) as reads:
        waits = started(lambda: reads.wait(60))
        with pytest.raises(errors.Cancelled), reads.ending(lambda: None):
            cancel.set("why")
        waits.join(SOON)
        assert not waits.is_alive()
        assert (reads.is_set(), reads.reason) == (True, "why")


def test_failed_attempt_ends_its_reads_only() -> None:
    cancel = cancelling.Cancel()
    ended: list[str] = []
    with cancelling.Reads(cancel) as reads:
        reads.on_set(lambda: ended.append("all attempts"))
        with contextlib.suppress(KeyError), reads.scope() as scope:
            reads.on_set(lambda: ended.append("first"))
            scope.set("failed")
            assert (reads.is_set(), reads.reason) == (True, "failed")
            reads.on_set(lambda: ended.append("too late"))
            raise KeyError
        assert ended == ["all attempts", "first", "too late"]
        assert not reads.is_set()
        with reads.scope(), reads.ending(lambda: None):
            pass
        assert not cancel.is_set()


def test_attempts_can_be_nested() -> None:
    cancel = cancelling.Cancel()
    with cancelling.Reads(cancel) as reads, reads.scope() as outer:
        with contextlib.suppress(KeyError), reads.scope():
            raise KeyError
        assert not reads.is_set()
        with reads.scope() as inner:
            outer.set()
            assert inner.is_set()
        assert reads.is_set()
    assert not reads.is_set()


# -- events of library callers


def test_event_is_adapted() -> None:
    event = threading.Event()
    with cancelling.adapt(event) as cancel:
        assert not cancel.is_set()
        event.set()
        assert cancel.wait(SOON)
    with cancelling.adapt(event) as cancel:
        assert cancel.wait(SOON)


def test_adapting_leaves_no_thread_and_takes_no_time() -> None:
    before = set(threading.enumerate())
    times = []
    for _ in range(5):
        began = time.monotonic()
        with cancelling.adapt(threading.Event()):
            pass
        times.append(time.monotonic() - began)
    assert set(threading.enumerate()) <= before
    assert min(times) < cancelling.TURN


# -- a thread of its own


def test_blocked_call_is_abandoned() -> None:
    over, closed = threading.Event(), threading.Event()
    cancel, began = cancelling.Cancel(), time.monotonic()
    threading.Timer(0.3, cancel.set).start()
    with pytest.raises(errors.Cancelled):
        cancelling.run_apart(over.wait, cancel, grace=0.3, late=closed.set)
    assert 0.6 <= time.monotonic() - began < SOON
    assert not closed.is_set()
    over.set()
    assert closed.wait(SOON)


def test_abandoned_call_that_fails_is_closed() -> None:
    over, closed, cancel = threading.Event(), threading.Event(), cancelling.Cancel()
    cancel.set()

    def fail() -> None:
        over.wait()
        raise KeyError

    with pytest.raises(errors.Cancelled):
        cancelling.run_apart(fail, cancel, grace=0, late=closed.set)
    over.set()
    assert closed.wait(SOON)


def test_call_about_to_end_is_waited_for() -> None:
    over, cancel = threading.Event(), cancelling.Cancel()
    cancel.set()
    threading.Timer(0.3, over.set).start()
    assert cancelling.run_apart(over.wait, cancel, grace=20, late=lambda: pytest.fail("in time"))


def test_call_may_have_a_time_limit() -> None:
    over, closed = threading.Event(), threading.Event()
    with pytest.raises(TimeoutError):
        cancelling.run_apart(over.wait, cancelling.NEVER, limit=0.1, late=closed.set)
    over.set()
    assert closed.wait(SOON)


def test_ended_waits_leave_nothing() -> None:
    cancel = cancelling.Cancel()
    pipe = os.eventfd(0)
    for _ in range(10):
        with cancel.ending(lambda: os.eventfd_write(pipe, 1)), cancel.child():
            pass
    os.close(pipe)
    assert not cancel._registered
    processes.wait_for(lambda: not any(one.name == "apart" for one in threading.enumerate()), "their end")


def test_pause_of_an_ended_attempt_ends() -> None:
    """Also if the scope of the attempt has ended before the waiting thread looks at it."""
    reads = cancelling.Reads(cancelling.Cancel())
    # What setting a scope does to its callbacks; the scope has ended when they return.
    threading.Timer(0.1, reads._wake).start()
    with pytest.raises(errors.Cancelled):
        reads.pause(3)


def test_call_abandoned_for_a_failed_attempt_is_cancelled() -> None:
    """Also if the scope of the attempt has ended before the waiting thread looks at it."""
    reads, over = cancelling.Reads(cancelling.Cancel()), threading.Event()

    def begin_and_end() -> None:
        # What setting a scope does to its callbacks; the scope has ended when they return.
        reads._wake()

    threading.Timer(0.1, begin_and_end).start()
    with pytest.raises(errors.Cancelled):
        cancelling.run_apart(lambda: over.wait(5), reads, grace=0)
    over.set()
