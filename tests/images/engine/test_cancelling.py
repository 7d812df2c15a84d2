"""A cancel of one's own below another."""

from __future__ import annotations

import threading
import time

import pytest

from cdi_worker import errors
from cdi_worker.images.engine import cancelling


def test_stop_heeds_both() -> None:
    above = threading.Event()
    stop = cancelling.Stop(above)
    assert not stop.wait(0.01)
    above.set()
    assert stop.wait(5)
    assert cancelling.Stop(above).is_set()
    own = cancelling.Stop(threading.Event())
    own.set()
    assert own.wait()


def test_its_own_can_be_taken_back() -> None:
    above = threading.Event()
    stop = cancelling.Stop(above)
    stop.set()
    stop.clear()
    assert not stop.is_set()
    above.set()
    stop.clear()
    assert stop.is_set()


def test_a_call_of_its_own_thread_is_as_if_made_here() -> None:
    never = threading.Event()
    assert cancelling.apart(lambda: threading.current_thread().name, never) == "apart"
    with pytest.raises(ZeroDivisionError):
        cancelling.apart(lambda: 1 // 0, never)


def test_a_call_that_does_not_end_is_left_behind() -> None:
    over, began = threading.Event(), time.monotonic()
    cancel = threading.Event()
    threading.Timer(0.3, cancel.set).start()
    with pytest.raises(errors.Cancelled):
        cancelling.apart(over.wait, cancel, grace=0.3)
    assert 0.6 <= time.monotonic() - began < 10
    over.set()


def test_a_call_that_is_about_to_end_is_waited_for() -> None:
    over, cancel = threading.Event(), threading.Event()
    cancel.set()
    threading.Timer(0.5, over.set).start()
    assert cancelling.apart(over.wait, cancel, grace=20)
