"""History of rounds, from which a planner (`planner.py`) decides whether to draft. Imports no PyTorch.

It schedules trials (drafts that seem not to pay, to update estimates) and plain rounds (without drafts), and pauses
sources (drafters or prompt lookup) that lose time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from paceline.plan.chances import Ratio
from paceline.plan.costs import RoundCosts, size_class
from paceline.types import COPYING

TRIAL_SHARE = 0.005
"""Share of each round's time that is added to the budget of trials (drafts that seem not to pay), while it is too small
for the next one."""
NEW_SHARE = 0.007
"""Share of each round's time that is saved for a trial on the next new request, whose text may suit the drafter
better."""
FIRST_TRIALS = 2.0
"""Initial time budget of trials (drafts that seem not to pay), in units of the time of a round without drafts; later
also the budget's limit, unless the next trial needs more."""
PLAIN_EVERY = 64
"""Maximum rounds with drafts between two rounds without drafts, which measure the present time of such a round."""
REST = 8
"""Maximum rounds in which no drafter with a network drafts, after its drafts did not pay; also at most three per row.
Even considering drafts takes time."""
PAUSE = 64
"""Length of a source's first pause, in rounds."""
LEAST_LOSS = 0.02
"""Minimum relative loss of tokens per second for which a source is paused."""
COMPARED, _CLIP, _GAIN_WEIGHT = 8, 0.3, 0.3
"""Number of latest rounds with drafts that are compared with a round without drafts; limit of the logarithm of their
relative speed; weight of the latest comparison."""
COLD = 3
"""Rounds that are not compared after all requests of a batch were replaced, the first included: memory and processor
are often cold, and these rounds are rarely without drafts."""
RECENT = 0.97
"""Factor on older rounds at each new round, in running averages."""


class Trials:
    """Time budget for trials: rounds that draft in order to update the estimates, although the drafts are expected to
    cost more time than they save. As long as the next trial would exceed the budget, each round adds a small share of
    its time to the budget."""

    def __init__(self, budget_s: float) -> None:
        self.budget_s = budget_s
        """Seconds that trials may cost at present."""
        self.wanted_s = 0.0
        """Budget, in seconds, that the next trial needs."""
        self.count = 0
        """Number of trials so far; it also selects the row for the next trial."""
        self._new_s = 0.0
        """Seconds that the next new request adds to the budget."""

    @property
    def is_affordable(self) -> bool:
        """True if the budget is large enough for the next trial."""
        return self.wanted_s <= self.budget_s

    def begin_request(self) -> None:
        """Increase the budget because a new request starts, whose text may suit the drafter better. The increase is a
        small share of the time of all rounds since the latest call, but at most what the next trial needs
        (`wanted_s`)."""
        self.budget_s, self._new_s = self.budget_s + self._new_s, 0.0

    def record(self, num_rows: int, num_tokens: int, seconds: float, plain_s: float, is_trial: bool) -> None:
        """Update the budget with a finished round: its numbers of rows and new tokens, and its seconds. `plain_s`:
        estimated seconds of the same round without drafts. `is_trial`: True if the round was a trial; the time that it
        lost compared with plain decoding is then subtracted."""
        self.budget_s = min(self.budget_s, max(FIRST_TRIALS * plain_s, self.wanted_s))
        if not self.is_affordable:
            self.budget_s += TRIAL_SHARE * seconds
        self._new_s = min(self._new_s + NEW_SHARE * seconds, self.wanted_s)
        if is_trial:  # one that paid for itself is free: a drafter that has become good is found soon
            lost_s = seconds - plain_s * num_tokens / num_rows
            # Without accepted drafts a trial costs at least `wanted_s`, by which hopeless ones become rarer.
            self.budget_s -= max(lost_s, 0.0) if num_tokens > num_rows else max(seconds - plain_s, self.wanted_s)


class PlainRounds:
    """Decides when to run a plain round (without drafts), in order to measure the present time of such a round. The
    first one of a batch size is due after 2 rounds with drafts, the next after 4, then 8, up to PLAIN_EVERY (64)."""

    def __init__(self) -> None:
        self._counts: dict[int, tuple[int, int]] = {}
        """Size class of the rows -> (rounds with drafts since the last plain one, their limit)."""

    def is_due(self, num_rows: int) -> bool:
        num_drafted, most = self._counts.get(size_class(num_rows), (0, 2))
        return num_drafted >= most

    def record(self, num_rows: int, *, is_plain: bool) -> None:
        num_drafted, most = self._counts.get(size_class(num_rows), (0, 2))
        if not is_plain:
            num_drafted += 1
        elif num_drafted:  # several plain rounds in a row count once
            num_drafted, most = 0, min(2 * most, PLAIN_EVERY)
        self._counts[size_class(num_rows)] = num_drafted, most

    def restart(self, num_rows: int) -> None:
        """Make plain rounds (without drafts) of `num_rows` rows frequent again: the next one is due after 2 rounds with
        drafts, the one after it 4 rounds later, and so on."""
        self._counts.pop(size_class(num_rows), None)


class Pauses:
    """Stops sources (drafters or prompt lookup) for a number of rounds if they lose time. It compares the tokens per
    second of rounds with drafts and of the plain round after them, so that wrong estimates of time or acceptance have
    no effect."""

    def __init__(self) -> None:
        self._latest: list[tuple[int, float]] = []
        """(tokens, seconds) of the rounds with drafts since the last plain one."""
        self._drafting: tuple[str, int] = ("", 0)
        """Sources of those rounds, joined by "+", and their number of rows."""
        self._gains: dict[tuple[str, int], tuple[float, int]] = {}
        """(sources, rows) -> (log of tokens per second with drafts over those without, number of comparisons)."""
        self._pauses: dict[str, tuple[int, int]] = {}
        """Source -> (rounds left in its pause, length of the next, doubled by each loss right after a pause)."""

    def record(self, num_rows: int, num_tokens: int, seconds: float, sources: set[str]) -> bool:
        """Add a finished round: its numbers of rows and new tokens, its wall-clock seconds and the sources of its
        drafts (empty: without drafts). Returns True if this round makes a source pause."""
        drafting = ("+".join(sorted(sources)), num_rows)
        if len(sources) == 1 or (sources and not sources & COPYING):  # several drafters of a pool count as one
            before = self._latest[1 - COMPARED :] if drafting == self._drafting else []
            self._latest, self._drafting = [*before, (num_tokens, seconds)], drafting
            return False
        joined, rows = self._drafting
        compared, self._latest = self._latest, []
        # A drafter mixed with prompt lookup: the gain could not be attributed, so the comparison is dropped.
        if sources or not compared or rows != num_rows:
            return False
        drafted_tokens, drafted_s = map(sum, zip(*compared, strict=True))
        gain = math.log(drafted_tokens * seconds / (drafted_s * num_tokens))
        known, count = self._gains.get((joined, rows), (0.0, 0))
        known += max(_GAIN_WEIGHT, 1.0 / (1 + count)) * (min(max(gain, -_CLIP), _CLIP) - known)
        self._gains[joined, rows] = known, count + 1
        if count < 2:
            return False
        # Not after a gain, whatever the average: the first comparisons contain rounds that touch memory first.
        loses = known < -LEAST_LOSS and gain < 0.0
        if loses:
            del self._gains[joined, rows]
        for source in joined.split("+"):
            _, length = self._pauses.pop(source, (0, PAUSE))  # without a loss, the next pause is short again
            if loses:
                self._pauses[source] = length, min(2 * length, 8 * PAUSE)
        return loses

    def next(self) -> set[str]:
        """Call this once before each round: every pause becomes one round shorter. Returns the sources that must not
        draft in the round, because they still pause."""
        self._pauses = {source: (max(left - 1, 0), length) for source, (left, length) in self._pauses.items()}
        return {source for source, (left, _) in self._pauses.items() if left}

    def forget(self, source: str) -> None:
        """Discard the statistics of a drafter that was replaced or removed."""
        self._gains = {key: gain for key, gain in self._gains.items() if source not in key[0].split("+")}
        self._pauses.pop(source, None)


@dataclass(slots=True)
class RoundHistory:
    """Statistics of past rounds, by which a planner decides whether the next round drafts. One object is for rounds of
    one type: all rows greedy, or some sampled (sampling takes additional time)."""

    costs: RoundCosts
    trials: Trials = field(init=False)
    plain: PlainRounds = field(default_factory=PlainRounds)
    pauses: Pauses = field(default_factory=Pauses)
    _rates: dict[int, Ratio] = field(default_factory=dict)
    """Number of rows -> tokens over seconds of recent rounds."""
    _rest: tuple[int, int] = (0, 0)
    """(rounds left to skip, batch size it applies to)"""
    _keys: set[int] = field(default_factory=set)
    """Keys of the latest round's rows."""
    _num_warm: int = 0
    """Number of rounds since the latest one in which all rows were new."""

    def __post_init__(self) -> None:
        self.trials = Trials(FIRST_TRIALS * self.costs.pass_s(1))

    def begin(self, keys: set[int]) -> None:
        """Start a round. `keys`: unique numbers of the sequences that decode (`Row.key`). A number that was not in the
        round before belongs to a new request, which increases the budget for trials."""
        if keys - self._keys:
            self.trials.begin_request()
        self._num_warm = self._num_warm + 1 if keys & self._keys else 0
        self._keys = keys

    def rate(self, num_rows: int) -> float:
        """Returns the speed of rounds with `num_rows` rows, in tokens per second: the average of recent ones, but at
        least the estimated speed of rounds without drafts."""
        plain, recent = num_rows / self.costs.pass_s(num_rows), self._rates.get(num_rows)
        return max(plain, recent.over / recent.under) if recent and recent.under else plain

    def record(
        self, num_rows: int, num_tokens: int, round_s: float, sources: set[str], is_trial: bool, has_chunk: bool
    ) -> None:
        """Add a finished round: its numbers of rows and new tokens, its wall-clock seconds and the sources of its
        drafts. `is_trial`: True if it drafted only to update the estimates. `has_chunk`: True if a prefill chunk ran in
        the same step."""
        seconds = round_s / self.costs.slowness
        self._rates.setdefault(num_rows, Ratio()).add(num_tokens, seconds, RECENT)
        self.trials.record(num_rows, num_tokens, seconds, self.costs.pass_s(num_rows), is_trial)
        self.plain.record(num_rows, is_plain=not sources)
        # `round_s`, not `seconds`: pauses must not depend on estimates, of which slowness is one.
        is_compared = not (is_trial or has_chunk) and self._num_warm >= COLD
        if is_compared and self.pauses.record(num_rows, num_tokens, round_s, sources):
            self.plain.restart(num_rows)

    def rest(self, num_rows: int) -> None:
        """Make drafters that run a network stop drafting for the next min(8, 3 * `num_rows`) rounds, as long as these
        have `num_rows` rows. Called when no draft seems worth its time: then even considering drafts would waste
        time."""
        self._rest = (min(REST, 3 * num_rows), num_rows)

    def rests(self, num_rows: int) -> bool:
        """True if drafters that run a network must not draft in this round of `num_rows` rows, because `rest` was
        called. Call it once per round: each call shortens the rest by one round."""
        left, resting_rows = self._rest
        self._rest = max(left - 1, 0), resting_rows
        return left > 0 and resting_rows == num_rows
