"""The cost of requests, from the times of answers."""

from __future__ import annotations

from cdi_worker.images import kernel
from cdi_worker.images.engine import pace

MIB = 1 << 20


def test_cost_is_unknown_before_an_answer() -> None:
    made = pace.Pace()
    assert made.cost == 0
    made.received(MIB, 0.1)
    assert made.cost == 0
    made.answered(0.2)
    assert made.cost == 2 * MIB


def test_answer_without_bytes_has_no_cost() -> None:
    made = pace.Pace()
    made.answered(3.0)
    assert made.cost == 0
    made.received(100, 0.0)
    assert made.cost == 0


def test_quickest_answer_counts() -> None:
    """A busy machine, a handshake and a proxy that reads the range first delay the others."""
    made = pace.Pace()
    made.received(10 * MIB, 1.0)
    for seconds in (2.0, 0.5, 0.1, 4.0, 1.0):
        made.answered(seconds)
    assert made.cost == MIB


def test_cost_has_a_limit() -> None:
    made = pace.Pace()
    made.answered(1000.0)
    made.received(1 << 40, 1e-6)
    assert made.cost == pace.MOST


def test_cost_follows_the_network() -> None:
    made = pace.Pace()
    made.answered(1.0)
    made.received(100 * MIB, 1.0)
    assert made.cost == 100 * MIB
    for _ in range(400):
        made.received(MIB, 1.0)
    assert made.cost < 2 * MIB


def near() -> pace.Pace:
    made = pace.Pace()
    made.answered(0.001)
    made.received(MIB, 0.001)
    return made


def test_few_connections_to_a_server_that_is_near_and_fast_are_enough() -> None:
    made = near()
    assert made.enough(1000) == max(2, round(kernel.processors()))
    assert made.enough(1) == 1


def test_server_of_unknown_speed_gets_all_connections() -> None:
    assert pace.Pace().enough(1000) == 1000


def test_distant_server_gets_all_connections() -> None:
    made = pace.Pace()
    made.answered(0.02)
    made.received(MIB, 0.001)
    assert made.enough(1000) == 1000


def test_server_whose_first_answer_alone_is_quick_gets_all_connections() -> None:
    """Its first bytes were at hand, as in a cache."""
    made = near()
    for _ in range(2):
        made.answered(0.4)
        made.received(16 * MIB, 0.01)
    assert made.enough(1000) == 1000


def test_answers_that_our_own_threads_delay_change_nothing() -> None:
    made = near()
    for _ in range(20):
        made.answered(0.012)
        made.received(4 * MIB, 0.01)
    assert made.enough(1000) < 1000


def test_server_that_limits_each_connection_gets_all() -> None:
    """It may send the first bytes fast."""
    made = near()
    made.received(MIB, 0.1)
    assert made.enough(1000) == 1000
