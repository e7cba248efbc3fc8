"""Tests whether a server is worse with a new drafter than before: more failed requests, or lower acceptance length, by
more than chance.

fall(2.71, 3.02, log_variance=4e-4, most=0.05)                   # "2.71 tokens a round, 3.02 before"
more_failures(Failures(3, 9000), Failures(9, 40), most=0.02)     # "9 of 40 requests ended in an error, 0.03% before"
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.loop.adapt.traffic.hours import Sums

LEAST_REQUESTS, LEAST_FAILED = 20, 3
"""Minimum numbers of finished and of failed requests for a verdict."""
LEVEL = 1e-3
"""False-alarm probability of one test. A probation (trial period of a new drafter) makes about sixty tests."""
FALL_ERRORS = 3.5
"""Standard errors by which acceptance length must be lower than before, in addition to the allowed share: with a normal
error, sixty tests then have a false alarm in at most 1.4% of probations."""
PRIOR_FAILED, PRIOR_REQUESTS = 1, 100
"""Counts added to the requests before the swap, as a prior: a server without data is assumed to fail one request in a
hundred."""


@dataclass(frozen=True, slots=True)
class Failures:
    """Numbers of failed and of all finished requests."""

    failed: float
    requests: float

    @property
    def share(self) -> float:
        return self.failed / self.requests if self.requests > 0 else 0.0


def fall(
    now: float, before: float, log_variance: float, most: float, source: str = "", where: str = "before"
) -> str | None:
    """Tests if acceptance length fell from `before` to `now` by more than the share `most` (0.05: 5%), and by more than
    chance explains (3.5 standard errors). If so, returns a message such as "2.71 tokens a round, 3.02 before"; else
    None.

    `log_variance`: squared standard error of log(now / before). `source`, `where`: words for the message. `source`
    follows "tokens a round", `where` replaces "before"."""
    is_less = now < (1 - most) * before and math.log(before / now) > FALL_ERRORS * math.sqrt(log_variance)
    return f"{now:.2f} tokens a round{source}, {before:.2f} {where}" if is_less else None


def variance_of_readings(sums: Sums, requests: float) -> float:
    """Squared standard error of the log of an acceptance length that was computed from a server's counters. Counters
    give only totals over all requests between two readings, so each interval between readings counts as one request in
    `sums`. `requests`: number of requests that ended in all intervals together."""
    return sums.log_variance_of(max(requests / max(sums.requests, 1), 1.0))


def more_failures(before: Failures, now: Failures, most: float, where: str = "before") -> str | None:
    """Tests if the share of failed requests (0 to 1) rose by more than `most`, and by more than chance explains. If so,
    returns a message with both shares; else None. Always returns None if `now` has fewer than 20 requests or 3
    failures. `where`: words for the message that describe `before`, such as "before" or "on the other servers"."""
    if now.requests < LEAST_REQUESTS or now.failed < LEAST_FAILED or now.share - before.share <= most:
        return None
    if chance_of(before, now) >= LEVEL:
        return None
    known = f"{before.share:.2%} {where}" if before.requests else f"nothing is known of {where}"
    return f"{now.failed:g} of {now.requests:g} requests ended in an error, {known}"


def chance_of(before: Failures, now: Failures) -> float:
    """Probability that at least `now.failed` of `now.requests` requests fail if the failure rate is still that of
    `before`: one-sided exact test of Fisher (1934).

    The test adds 100 requests, one of them failed, to `before`: a server without earlier data is assumed to fail 1%."""
    newer, older = round(now.requests), round(max(before.requests, 0)) + PRIOR_REQUESTS
    failed = round(now.failed) + round(max(before.failed, 0)) + PRIOR_FAILED
    whole = _log_choose(newer + older, failed)
    most = min(failed, newer)
    return math.fsum(
        math.exp(_log_choose(newer, number) + _log_choose(older, failed - number) - whole)
        for number in range(round(now.failed), most + 1)
        if failed - number <= older
    )


def _log_choose(number: int, chosen: int) -> float:
    return math.lgamma(number + 1) - math.lgamma(chosen + 1) - math.lgamma(number - chosen + 1)
