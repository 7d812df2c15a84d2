"""The cost of requests, from the times of answers."""

from __future__ import annotations

import pytest

from cdi_worker.images import kernel
from cdi_worker.images.engine import pace

MIB = 1 << 20
#: The seconds until an answer, or bytes and the seconds that they took.
Event = float | tuple[int, float]
NEAR: tuple[Event, ...] = (0.001, (MIB, 0.001))


def measured(*events: Event) -> pace.Pace:
    made = pace.Pace()
    for event in events:
        if isinstance(event, tuple):
            made.received(*event)
        else:
            made.answered(event)
    return made


@pytest.mark.parametrize(
    ("events", "cost"),
    [
        pytest.param([], 0, id="no-answer"),
        pytest.param([(MIB, 0.1)], 0, id="bytes-without-an-answer"),
        pytest.param([3.0], 0, id="answer-without-bytes"),
        pytest.param([3.0, (100, 0.0)], 0, id="bytes-in-no-time"),
        pytest.param([(MIB, 0.1), 0.2], 2 * MIB, id="answer"),
        # A busy machine, a handshake and a proxy that reads the range first delay the others.
        pytest.param([(10 * MIB, 1.0), 2.0, 0.5, 0.1, 4.0, 1.0], MIB, id="quickest-answer"),
        pytest.param([1000.0, (1 << 40, 1e-6)], pace.MOST, id="limit"),
    ],
)
def test_cost_is_what_would_arrive_before_an_answer(events: list[Event], cost: int) -> None:
    assert measured(*events).cost == cost


def test_bytes_within_a_time_are_those_of_one_connection() -> None:
    assert measured((MIB, 0.5)).within(0.25) == MIB // 2
    assert measured(0.05).within(0.25) == 0
    assert measured((1 << 40, 1e-6)).within(0.25) == pace.MOST


def test_cost_follows_the_network() -> None:
    made = measured(1.0, (200 * MIB, 1.0))
    assert made.cost == 200 * MIB
    # On average of all, it would be 3 MiB then.
    for _ in range(100):
        made.received(MIB, 1.0)
    assert made.cost < 2 * MIB


@pytest.mark.parametrize(
    ("events", "all_connections"),
    [
        pytest.param((), True, id="unknown"),
        pytest.param(NEAR, False, id="near"),
        pytest.param((*NEAR, *[0.004, (MIB, 0.009)] * 500), False, id="near-again-and-again"),
        pytest.param((0.02, (MIB, 0.001)), True, id="distant"),
        # Its first bytes were at hand, as in a cache.
        pytest.param((*NEAR, *[0.4, (16 * MIB, 0.01)] * 2), True, id="quick-at-first"),
        # It may send the first bytes fast.
        pytest.param((*NEAR, (MIB, 0.1)), True, id="limits-each-connection"),
        pytest.param((*NEAR, *[0.012, (4 * MIB, 0.01)] * 20), False, id="delayed-by-our-own-threads"),
    ],
)
def test_server_that_is_not_near_and_fast_gets_all_connections(
    events: tuple[Event, ...], all_connections: bool
) -> None:
    assert (measured(*events).enough(1000) == 1000) is all_connections


def test_few_connections_to_a_server_that_is_near_and_fast_are_enough() -> None:
    made = measured(*NEAR)
    assert made.enough(1000) == max(2, round(kernel.processors()))
    assert made.enough(1) == 1
