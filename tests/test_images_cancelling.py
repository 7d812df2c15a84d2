"""A cancel of one's own below another."""

from __future__ import annotations

import threading

from images import cancelling


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
