"""History of rounds, from which a planner (`planner.py`) decides whether to draft: trials, rounds without drafts, and
pauses of drafters that lose time. Imports no PyTorch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from paceline.plan.chances import Ratio
from paceline.plan.costs import RoundCosts, size_class
from paceline.types import LOOKUP

TRIAL_SHARE = 0.005
"""Share of the time added to the budget of trials, while that is too small for one trial."""
NEW_SHARE = 0.007
"""Share of the time saved for a trial at the next new request, whose text may suit the drafter better."""
FIRST_TRIALS = 2.0
"""Initial budget of trials, in rounds without drafts."""
PLAIN_EVERY = 64
"""A round without drafts at least every 64 rounds, to measure one; more often at the beginning."""
REST = 8
"""Rounds in which computed drafts are not considered again after they were not worth their time, at most three per row:
considering them takes time."""
PAUSE = 64
"""Rounds in which a source is paused after its drafts brought fewer tokens per second than plain rounds."""
LEAST_LOSS = 0.02
"""Relative loss of tokens per second from which drafts are paused."""
COMPARED, _CLIP, _GAIN_WEIGHT = 8, 0.3, 0.3
"""Latest rounds with drafts that a plain one is compared with; limit of one comparison's logarithm; its weight."""
RECENT = 0.97
"""Discount factor per round of a running rate."""


class Trials:
    """Time budget of trials: rounds with drafts that seem not to pay, run to update the estimates."""

    def __init__(self, budget_s: float) -> None:
        self.budget_s = budget_s
        """Seconds that trials may still take."""
        self.wanted_s = 0.0
        """Seconds of the next trial."""
        self.count = 0
        """Trials so far; rows take turns."""
        self._new_s = 0.0
        """Seconds that the next new request adds to the budget."""
        self._keys = set[int]()
        """Keys of the latest round's rows."""

    @property
    def is_affordable(self) -> bool:
        """True if the budget covers the next trial."""
        return self.wanted_s <= self.budget_s

    def begin(self, keys: set[int]) -> None:
        """Start a round of the rows with these keys; a new one adds the seconds saved for it to the budget."""
        if keys - self._keys:
            self.budget_s, self._new_s = self.budget_s + self._new_s, 0.0
        self._keys = keys

    def record(self, num_rows: int, num_tokens: int, seconds: float, plain_s: float, is_trial: bool) -> None:
        """Record a round and the tokens it brought; `plain_s`: seconds of the same round without drafts."""
        self.budget_s = min(self.budget_s, max(FIRST_TRIALS * plain_s, self.wanted_s))
        if not self.is_affordable:
            self.budget_s += TRIAL_SHARE * seconds
        self._new_s = min(self._new_s + NEW_SHARE * seconds, self.wanted_s)
        if is_trial:  # one that paid for itself is free: a drafter that has become good is found soon
            lost_s = seconds - plain_s * num_tokens / num_rows
            self.budget_s -= max(lost_s, 0.0) if num_tokens > num_rows else max(seconds - plain_s, self.wanted_s)


class PlainRounds:
    """Schedules rounds without drafts, which show what such a round takes at present: ever more rarely, by batch
    size."""

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
        elif num_drafted:
            num_drafted, most = 0, min(2 * most, PLAIN_EVERY)
        self._counts[size_class(num_rows)] = num_drafted, most

    def restart(self, num_rows: int) -> None:
        """Schedule plain rounds of this size as often as at the beginning."""
        self._counts.pop(size_class(num_rows), None)


class Pauses:
    """Pauses sources whose drafts lose time: compares rounds with drafts with the plain ones that follow them, which
    depends neither on estimates nor on the speed of the machine."""

    def __init__(self) -> None:
        self._latest: list[tuple[int, float]] = []
        """(tokens, seconds) of the rounds with drafts since the last plain one."""
        self._drafting: tuple[str, int] = ("", 0)
        """Sources of those rounds, joined by "+", and their number of rows."""
        self._gains: dict[tuple[str, int], tuple[float, int]] = {}
        """(sources, rows) -> (log of tokens per second with drafts over those without, number of comparisons)."""
        self._pauses: dict[str, tuple[int, int]] = {}
        """Source -> (rounds left in its pause, length of the next one, which doubles with each loss right after a
        pause)."""

    def record(self, num_rows: int, num_tokens: int, seconds: float, sources: set[str]) -> bool:
        """Record a round, in wall-clock seconds, and the sources of its drafts. Returns True if they are paused now."""
        drafting = ("+".join(sorted(sources)), num_rows)
        if len(sources) == 1 or (sources and LOOKUP not in sources):  # several drafters of a pool count as one
            self._latest = [
                *(self._latest[1 - COMPARED :] if drafting == self._drafting else []),
                (num_tokens, seconds),
            ]
            self._drafting = drafting
            return False
        joined, rows = self._drafting
        compared, self._latest = self._latest, []
        if sources or not compared or rows != num_rows:
            return False
        gain = math.log(
            sum(tokens for tokens, _ in compared) * seconds / (sum(spent for _, spent in compared) * num_tokens)
        )
        known, count = self._gains.get((joined, rows), (0.0, 0))
        known += max(_GAIN_WEIGHT, 1.0 / (1 + count)) * (min(max(gain, -_CLIP), _CLIP) - known)
        self._gains[joined, rows] = known, count + 1
        if count < 2:
            return False
        loses = known < -LEAST_LOSS
        if loses:
            del self._gains[joined, rows]
        for source in joined.split("+"):
            _, length = self._pauses.pop(source, (0, PAUSE))
            if loses:
                self._pauses[source] = length, min(2 * length, 8 * PAUSE)
        return loses

    def next(self) -> set[str]:
        """Returns the sources that are paused in the next round, and counts that round."""
        self._pauses = {source: (max(left - 1, 0), length) for source, (left, length) in self._pauses.items()}
        return {source for source, (left, _) in self._pauses.items() if left}

    def forget(self, source: str) -> None:
        """Discard the statistics of a source whose drafter was replaced."""
        self._gains = {key: gain for key, gain in self._gains.items() if source not in key[0].split("+")}
        self._pauses.pop(source, None)


@dataclass(slots=True)
class RoundHistory:
    """Rounds of one type: all rows greedy, or not (sampling takes additional time)."""

    costs: RoundCosts
    trials: Trials = field(init=False)
    plain: PlainRounds = field(default_factory=PlainRounds)
    pauses: Pauses = field(default_factory=Pauses)
    _rates: dict[int, Ratio] = field(default_factory=dict)
    """Number of rows -> tokens over seconds of recent rounds."""
    _rest: tuple[int, int] = (0, 0)
    """(rounds left to skip, batch size it applies to)"""

    def __post_init__(self) -> None:
        self.trials = Trials(FIRST_TRIALS * self.costs.pass_s(1))

    def rate(self, num_rows: int) -> float:
        """Returns the tokens per second of recent rounds of `num_rows` rows, but at least those of plain decoding."""
        plain, recent = num_rows / self.costs.pass_s(num_rows), self._rates.get(num_rows)
        return max(plain, recent.over / recent.under) if recent and recent.under else plain

    def record(
        self, num_rows: int, num_tokens: int, round_s: float, sources: set[str], is_trial: bool, has_chunk: bool
    ) -> None:
        """Record a round: its tokens, wall-clock seconds, the sources of its drafts, and whether a prefill chunk ran
        too."""
        seconds = round_s / self.costs.slowness
        self._rates.setdefault(num_rows, Ratio()).add(num_tokens, seconds, RECENT)
        self.trials.record(num_rows, num_tokens, seconds, self.costs.pass_s(num_rows), is_trial)
        self.plain.record(num_rows, is_plain=not sources)
        if not (is_trial or has_chunk) and self.pauses.record(num_rows, num_tokens, round_s, sources):
            self.plain.restart(num_rows)

    def rest(self, num_rows: int) -> None:
        """Skip computed drafts in the next rounds of `num_rows` rows: they were not worth their time."""
        self._rest = (min(REST, 3 * num_rows), num_rows)

    def rests(self, num_rows: int) -> bool:
        """True if computed drafts are skipped in this round."""
        left, resting_rows = self._rest
        self._rest = max(left - 1, 0), resting_rows
        return left > 0 and resting_rows == num_rows
