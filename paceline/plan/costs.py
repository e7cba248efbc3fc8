"""Costs that a planner (`planner.py`) learns from rounds. No PyTorch.

`RoundCosts` holds seconds of target passes by their number of positions, and of drafting; `RoundRecord` whether drafts
were worth their time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

from paceline.plan.chances import Ratio
from paceline.types import LOOKUP, RoundStats

TRIAL_SHARE = 0.005
"""Share of the time that may go into drafts that do not seem to pay, to see whether they do by now; what is saved is enough
for one trial."""
NEW_SHARE = 0.007
"""Share of the time that is saved for a trial when a request begins: its text may be one that the drafter knows."""
FIRST_TRIALS = 2.0
"""Time that trials may take at the beginning, in rounds without drafts."""
PLAIN_EVERY = 64
"""A round without drafts now and then, to know what one takes; more often at the beginning."""
REST = 8
"""Rounds in which computed drafts that were not worth it are not weighed again, three a row at most: weighing takes time."""
DISAPPOINTED = 64
"""Rounds without any drafts after those with drafts brought fewer tokens per second than the plain ones between them: what is
believed of their cost or their chances is wrong then."""
LEAST_LOSS = 0.02
"""Share of tokens per second that drafts must lose to be taken for that."""
_BESIDE, _CLIP, _GAIN_WEIGHT = 8, 0.3, 0.3
"""Latest rounds with drafts that a plain one is compared with; most that one comparison says (logarithm); its weight."""
RECENT = 0.97
"""What is left of older rounds in the rate of recent ones with each new one."""


class PassCosts:
    """Seconds of a target pass by its number of positions: straight lines between measured points."""

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        """`points`: (positions, seconds), positions ascending, at least one."""
        assert points
        rising, least = [], math.inf
        for size, seconds in reversed(points):  # a smaller pass never takes more: that would be another program's doing
            least = min(least, seconds)
            rising.append((size, least))
        self._points = rising[::-1] if len(rising) > 1 else [rising[0], (2 * rising[0][0], 2 * rising[0][1])]
        self._known: list[float] = []

    def seconds(self, num_positions: int) -> float:
        while len(self._known) <= num_positions:
            self._known.append(self._at(len(self._known)))
        return self._known[num_positions]

    def _at(self, num_positions: int) -> float:
        pairs = list(pairwise(self._points))
        (left, low), (right, high) = next((pair for pair in pairs if num_positions <= pair[1][0]), pairs[-1])
        return max(low + (high - low) * (num_positions - left) / (right - left), 1e-9)


@dataclass(slots=True)
class RoundCosts:
    """What rounds of one kind take, in seconds of the machine as it was when `passes` were measured.

    `slowness` follows the machine's pace, which changes within seconds; a factor for each size of pass corrects the measured
    table, from neighbouring rounds of different sizes, which ran at the same pace.
    """

    passes: PassCosts
    slowness: float = 1.0
    """How much longer than measured passes take now, what the host does in a round included."""
    _num_seen: int = 0
    _factors: dict[int, tuple[float, int]] = field(default_factory=dict)
    """By class of size: how far the table is out beside other sizes, and how often that was seen."""
    _pass_s: dict[int, float] = field(default_factory=dict)
    """By positions, until the factors change."""
    _draft_s: dict[tuple[str, int], float] = field(default_factory=dict)
    """By source and number of rows that draft."""
    _has_drafted: set[str] = field(default_factory=set)
    _latest: tuple[int | None, float] = (None, 0.0)
    """Size class of the latest round, and its time over the table's."""

    def pass_s(self, num_positions: int) -> float:
        """Seconds of a round without its drafting."""
        known = self._pass_s.get(num_positions)
        if known is None:
            factor = self._factor(_size_class(num_positions))
            known = self._pass_s[num_positions] = self.passes.seconds(num_positions) * factor
        return known

    def _factor(self, size: int) -> float:
        """That of this size; between known sizes in proportion, beyond them that of the nearest."""
        if size in self._factors or not self._factors:
            return self._factors.get(size, (1.0, 0))[0]
        below = max((each for each in self._factors if each < size), default=None)
        above = min((each for each in self._factors if each > size), default=None)
        if below is None or above is None:
            return self._factors[below if above is None else above][0]  # pyright: ignore[reportArgumentType]
        low, high = self._factors[below][0], self._factors[above][0]
        return low * (high / low) ** ((size - below) / (above - below))

    def drafting_s(self, source: str, num_rows: int) -> float:
        """Seconds of drafting for so many rows; scaled from the nearest number that is known, 0 before the first."""
        if num_rows == 0:
            return 0.0
        known = self._draft_s.get((source, num_rows))
        if known is not None:
            return known
        numbers = [rows for name, rows in self._draft_s if name == source]
        if not numbers:
            return 0.0
        nearest = min(numbers, key=lambda rows: abs(rows - num_rows))
        return self._draft_s[source, nearest] * max(1.0 + 0.5 * (num_rows - nearest) / nearest, 0.5)

    def record(self, num_positions: int, pass_s: float) -> None:
        """A round: its pass and host work."""
        size, measured = _size_class(num_positions), pass_s / self.passes.seconds(num_positions)
        ratio = measured / (self._factor(size) * self.slowness)
        if self._num_seen == 0:
            self.slowness, ratio = max(measured, 1e-6), 1.0
        self.slowness *= 1.0 + max(0.1, 1.0 / (1 + self._num_seen)) * (min(max(ratio, 0.5), 2.0) - 1.0)
        if size != self._latest[0]:
            self._compare(size, measured)
        self._latest = size, measured
        self._num_seen += 1

    def drafted(self, source: str, num_rows: int, draft_s: float) -> None:
        """A source that had to compute drafted for so many rows of the round that was just recorded."""
        spent = draft_s / self.slowness
        if source not in self._has_drafted:  # the first draft touches memory for the first time: no measure
            self._has_drafted.add(source)
            return
        known = self._draft_s.get((source, num_rows))
        self._draft_s[source, num_rows] = spent if not known else known + 0.1 * (min(spent, 4 * known) - known)

    def _compare(self, size: int, measured: float) -> None:
        """Correct two sizes by how neighbouring rounds of theirs compare. What the first comparisons say counts whole, later
        ones move a little, and one that is far off no more than others."""
        before, measured_before = self._latest
        if before is None:
            return
        self._pass_s.clear()
        off = math.log(measured * self._factor(before) / (measured_before * self._factor(size)))
        num_seen = min(self._factors.get(each, (1.0, 0))[1] for each in (size, before))
        most = max(0.3, 3.0 / (1 + num_seen))
        step = 0.5 * min(max(off, -most), most) * max(0.06, 1.0 / (1 + num_seen))
        for each, by in ((size, step), (before, -step)):
            self._factors[each] = self._factor(each) * math.exp(by), self._factors.get(each, (1.0, 0))[1] + 1


def drafting_by(stats: RoundStats, rows_by: Mapping[str, int]) -> dict[str, float]:
    """Returns the seconds of a round's drafting by source, given how many rows each source computed drafts for: its own
    seconds, and its rows' share of those that no source took, such as to weigh drafts and to cut them."""
    shared_s = max(stats.draft_s - sum(stats.source_s.values()), 0.0)
    num_rows = sum(rows_by.values())
    return {source: stats.source_s.get(source, 0.0) + shared_s * rows / num_rows for source, rows in rows_by.items()}


@lru_cache(maxsize=4096)
def _size_class(num_positions: int) -> int:
    """Two classes for each doubling."""
    return round(2 * math.log2(max(num_positions, 1)))


@dataclass(slots=True)
class RoundRecord:
    """What was learned of rounds whose rows are all greedy, or of the others: to draw tokens takes its own time."""

    costs: RoundCosts
    rates: dict[int, Ratio] = field(default_factory=dict)
    """By number of rows."""
    trial_s: float = field(init=False)
    """Seconds that trials may still take."""
    wanted_s: float = 0.0
    """Seconds that the next trial would take."""
    new_s: float = 0.0
    """Seconds that the next new request adds to `trial_s`."""
    _keys: set[int] = field(default_factory=set)
    """Of the rows of the latest round."""
    turn: int = 0
    """Whose turn the next trial is."""
    _drafted: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By class of size of the rows: rounds with drafts since the last one without, and how many there may be."""
    _rest: tuple[int, int] = (0, 0)
    """Rounds left, and of how many rows."""
    _latest: list[tuple[int, float]] = field(default_factory=list)
    """Tokens and seconds of the rounds with drafts since the last one without."""
    _drafting: tuple[str, int] = ("", 0)
    """Whose drafts those rounds had, joined by "+", and how many rows."""
    _gains: dict[tuple[str, int], tuple[float, int]] = field(default_factory=dict)
    """By sources and number of rows: logarithm of the tokens per second with drafts over those without, each from rounds that
    followed one another, so that no estimate and no pace of the machine is in it; and how many comparisons that is."""
    _pauses: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By source: rounds that it still drafts nothing in, and how long its next pause is: twice as long each time that drafts
    disappoint right after one."""

    def __post_init__(self) -> None:
        self.trial_s = FIRST_TRIALS * self.costs.pass_s(1)

    def rate(self, num_rows: int) -> float:
        """Tokens per second that rounds of so many rows reach anyway."""
        plain, recent = num_rows / self.costs.pass_s(num_rows), self.rates.get(num_rows)
        return max(plain, recent.over / recent.under) if recent and recent.under else plain

    def record(self, num_rows: int, num_tokens: int, seconds: float, is_trial: bool) -> None:
        """A round: tokens it brought, seconds it took on the machine as it was measured."""
        self.rates.setdefault(num_rows, Ratio()).add(num_tokens, seconds, RECENT)
        plain_s = self.costs.pass_s(num_rows)
        self.trial_s = min(self.trial_s, max(FIRST_TRIALS * plain_s, self.wanted_s))
        if self.trial_s < self.wanted_s:
            self.trial_s += TRIAL_SHARE * seconds
        self.new_s = min(self.new_s + NEW_SHARE * seconds, self.wanted_s)
        if is_trial:  # one that paid for itself costs nothing: a drafter that is good by now is soon known
            lost_s = seconds - plain_s * num_tokens / num_rows
            self.trial_s -= max(lost_s, 0.0) if num_tokens > num_rows else max(seconds - plain_s, self.wanted_s)

    def begin(self, keys: set[int]) -> None:
        """A round of the rows with these keys: one that is new adds what was saved for it to the allowance of trials."""
        if keys - self._keys:
            self.trial_s, self.new_s = self.trial_s + self.new_s, 0.0
        self._keys = keys

    def compare(self, num_rows: int, num_tokens: int, seconds: float, sources: set[str]) -> None:
        """A round as it was, in seconds of now, with drafts of these sources: see whether those have been worth their time, and
        pause them where they were not."""
        drafting = ("+".join(sorted(sources)), num_rows)
        if len(sources) == 1 or (sources and LOOKUP not in sources):  # several members of a pool are taken together
            self._latest = [*(self._latest[1 - _BESIDE :] if drafting == self._drafting else []), (num_tokens, seconds)]
            self._drafting = drafting
            return
        joined, rows = self._drafting
        beside, self._latest = self._latest, []
        if sources or not beside or rows != num_rows:
            return
        gain = math.log(sum(tokens for tokens, _ in beside) * seconds / (sum(spent for _, spent in beside) * num_tokens))
        known, count = self._gains.get((joined, rows), (0.0, 0))
        known += max(_GAIN_WEIGHT, 1.0 / (1 + count)) * (min(max(gain, -_CLIP), _CLIP) - known)
        self._gains[joined, rows] = known, count + 1
        disappoints = known < -LEAST_LOSS
        if count < 2:
            return
        if disappoints:
            del self._gains[joined, rows]
            self._drafted.pop(_size_class(num_rows), None)
        for source in joined.split("+"):
            _, pause = self._pauses.pop(source, (0, DISAPPOINTED))
            if disappoints:
                self._pauses[source] = pause, min(2 * pause, 8 * DISAPPOINTED)

    def paused(self) -> set[str]:
        """Sources that draft nothing in this round, because their latest drafts disappointed."""
        self._pauses = {source: (max(left - 1, 0), length) for source, (left, length) in self._pauses.items()}
        return {source for source, (left, _) in self._pauses.items() if left}

    def forget(self, source: str) -> None:
        """As Planner.forget."""
        self._gains = {key: gain for key, gain in self._gains.items() if source not in key[0].split("+")}
        self._pauses.pop(source, None)

    def needs_plain(self, num_rows: int) -> bool:
        """Whether it is time for a round without drafts: without some, nobody knows what one takes by now."""
        num_drafted, most = self._drafted.get(_size_class(num_rows), (0, 2))
        return num_drafted >= most

    def drafted(self, num_rows: int, *, any_checked: bool) -> None:
        """A round with drafts or without; those without may come more and more rarely."""
        num_drafted, most = self._drafted.get(_size_class(num_rows), (0, 2))
        if any_checked:
            num_drafted += 1
        elif num_drafted:
            num_drafted, most = 0, min(2 * most, PLAIN_EVERY)
        self._drafted[_size_class(num_rows)] = num_drafted, most

    def rest(self, num_rows: int) -> None:
        """Computed drafts were not worth their time for so many rows."""
        self._rest = (min(REST, 3 * num_rows), num_rows)

    def rests(self, num_rows: int) -> bool:
        """Whether they need not be weighed in this round."""
        left, resting_rows = self._rest
        self._rest = max(left - 1, 0), resting_rows
        return left > 0 and resting_rows == num_rows
