"""When the retries of a failing source end."""

from __future__ import annotations

import time

import pytest

from cdi_worker import errors
from cdi_worker.images.engine import cancelling, retry
from tests.support import processes


def busy(seconds: float | None) -> errors.Transient:
    return errors.Transient(url="http://a/disk", reason="server answers 429", retry_after=seconds)


def patience(limit: float, longest: float) -> retry.Patience:
    return retry.Patience(limit, cancelling.Cancel(), longest=longest)


def wait_often(waiting: retry.Patience, seconds: float) -> None:
    for _ in range(100):
        waiting.wait(busy(seconds), 7)


def test_server_that_always_asks_to_wait_is_given_up() -> None:
    """Each wait is honoured, and yet the total is limited."""
    waiting, started = patience(0.3, 1.0), time.monotonic()
    with pytest.raises(errors.TransferFailed, match="no data for 1 s, and the server asks to wait 0 s"):
        wait_often(waiting, 0.4)
    assert 0.8 <= time.monotonic() - started < 3 * 0.4


def test_waits_the_server_asked_for_are_added_to_the_limit() -> None:
    waiting, started = patience(0.3, 10), time.monotonic()
    for _ in range(2):
        waiting.wait(busy(0.4), 0)
    assert time.monotonic() - started >= 0.8


def test_no_wait_does_not_extend_the_limit() -> None:
    waiting, started = patience(0.3, 60), time.monotonic()
    with pytest.raises(errors.TransferFailed, match=r"429; no data for 0 s$"):
        wait_often(waiting, 0.0)
    assert time.monotonic() - started < processes.PATIENCE


def test_too_long_a_wait_fails_at_once() -> None:
    started = time.monotonic()
    with pytest.raises(errors.TransferFailed) as caught:
        patience(180, retry.LONGEST_SILENCE).wait(busy(3600), 4096)
    assert str(caught.value) == (
        "http://a/disk: transfer failed at byte 4096: server answers 429; no data for 0 s, "
        "and the server asks to wait 3600 s (at most 600 s in total)"
    )
    assert time.monotonic() - started < processes.PATIENCE


def test_data_restarts_the_limit() -> None:
    waiting = patience(0.3, 0.5)
    for _ in range(4):
        waiting.wait(busy(0.4), 0)
        waiting.progress(1 << 20, "http://a/disk", 0)


def test_connection_that_was_silent_for_the_limit_is_replaced_once() -> None:
    """The time-out of one connection may be as long as the limit."""
    waiting = patience(0.3, 10)
    time.sleep(0.4)
    waiting.wait(busy(None), 0)
    time.sleep(0.4)
    with pytest.raises(errors.TransferFailed, match="no data for"):
        waiting.wait(busy(None), 0)
    waiting.progress(1 << 20, "http://a/disk", 0)
    time.sleep(0.4)
    waiting.wait(busy(None), 0)


def test_progress_of_another_connection_counts() -> None:
    shared = retry.Shared()
    mine, other = (retry.Patience(0.5, cancelling.NEVER, shared=shared) for _ in range(2))
    ended = time.monotonic() + 1.5
    while time.monotonic() < ended:
        other.progress(1 << 20, "http://a/disk", 0)
        mine.wait(busy(None), 0)
    with pytest.raises(errors.TransferFailed, match="no data for"):
        wait_often(mine, 0.0)


def trickle(waiting: retry.Patience) -> None:
    for _ in range(100):
        time.sleep(0.02)
        waiting.progress(1, "http://a/disk", 0)


def test_bytes_below_the_floor_do_not_restart_the_limit() -> None:
    waiting = retry.Patience(0.2, cancelling.NEVER, min_speed=1000)
    with pytest.raises(
        errors.TransferFailed, match=r"in 0 s, less than 1000 B per second; accept less \(min_speed\)"
    ):
        trickle(waiting)


def test_peer_below_the_floor_is_given_up() -> None:
    meter = retry.SpeedMeter(10, min_speed=1000)
    for _ in range(100):
        meter.count(1000, 1)
    for _ in range(9):
        meter.count(999, 1)
    with pytest.raises(TimeoutError, match=r"only 9990 bytes in 10 s, less than 1000 B per second"):
        meter.count(999, 1)


def test_peer_that_becomes_fast_again_is_kept() -> None:
    meter = retry.SpeedMeter(10, min_speed=1000)
    for _ in range(9):
        meter.count(1, 1)
    meter.count(1 << 20, 1)
    assert meter.left == 10
