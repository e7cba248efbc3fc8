"""Tokens are held back for no longer than the interval, firsts and ends not at all, and nothing is lost or turned
around."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest

from paceline.serve.worker.ticket import Addressed, Outbox


def event(name: object) -> Addressed:
    return cast(Any, ("ticket", name))


class Arrived:
    """Texts sent, one list for each flush."""

    def __init__(self, interval_s: float) -> None:
        self.flushes: list[list[Any]] = []
        self.outbox = Outbox(lambda events: self.flushes.append([name for _, name in events]), interval_s)


def test_rounds_travel_together_while_another_fits_into_the_interval() -> None:
    arrived = Arrived(0.016)
    for number in range(7):
        arrived.outbox.put([event(number)], 0.006 * number, 0.006, is_urgent=False)
    assert arrived.flushes == [[0, 1, 2], [3, 4, 5]]
    arrived.outbox.put([event("last")], 0.042, 0.006, is_urgent=True)
    assert arrived.flushes[2:] == [[6, "last"]]


@pytest.mark.parametrize(("interval_s", "step_s"), [(0.0, 0.006), (0.016, 0.02)])
def test_each_goes_at_once_when_rounds_are_long_or_nothing_may_wait(interval_s: float, step_s: float) -> None:
    arrived = Arrived(interval_s)
    for number in range(3):
        arrived.outbox.put([event(number)], step_s * number, step_s, is_urgent=False)
    assert arrived.flushes == [[0], [1], [2]]


def test_an_error_comes_after_what_was_held() -> None:
    arrived = Arrived(1.0)
    arrived.outbox.put([event("held")], 0.0, 0.001, is_urgent=False)
    arrived.outbox.send([event("error")])
    arrived.outbox.flush()
    assert arrived.flushes == [["held", "error"]]


def test_nothing_waits_longer_than_the_interval_and_a_round_that_was_longer_than_expected() -> None:
    luck, now, arrived = random.Random(0), 0.0, Arrived(0.016)
    ended: dict[int, float] = {}
    waited: list[float] = []
    for number in range(500):
        step_s = luck.choice([0.003, 0.005, 0.007])
        now += step_s
        ended[number] = now
        before = len(arrived.flushes)
        arrived.outbox.put([event(number)], now, step_s, is_urgent=luck.random() < 0.1)
        waited += [now - ended[each] for flush in arrived.flushes[before:] for each in flush]
    arrived.outbox.flush()
    assert [each for flush in arrived.flushes for each in flush] == list(range(500))
    assert max(waited) <= 0.016 + 0.004
    assert len(arrived.flushes) < 300
