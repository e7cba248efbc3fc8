"""How many tokens to draft: those that bring more tokens per second, none when none do.

Costs: seconds of a target pass by its number of tokens, measured when the engine starts and corrected by what rounds take;
seconds of drafting, kept up as it happens; rounds with a sampled request apart, since drawing and judging take their time.
Gains: for each draft the chance that it stands, from the drafts of the same place in earlier rounds, greedy and sampled
requests apart, corrected by how this sequence's own drafts fared. All of it is known before a round's tokens are, so that the
choice changes nothing of what is said (a lossless rule keeps the target's distribution for any number of drafts).
A sampled request with a seed is left alone: which of the many equally right texts it gets depends on the number of drafts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from collections.abc import Sequence as ReadSequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

from paceline.draft.lookup_first import MOST_FREE
from paceline.model.target import ForwardBatch, Target
from paceline.types import Batch, RoundStats, Sequence

PRIOR = 0.75
"""Chance that a greedy request's first draft stands, of which nothing is known."""
SAMPLED_PRIOR = 0.5
"""The same of a sampled request: drafts that were drawn stand less often."""
_PRIOR_WEIGHT = 4.0
"""How many tries of a place its prior counts for; behind the first place it is the chance of the place before."""
_KEEP = 0.98
"""What is left of a place's tries with each new one."""
_REST_KEEP = 0.998
"""And with each round in which the place was not tried: what was found not to pay is worth another try some day."""
_LEAST_TURNS, _TURNS = 3, 12
_FORGET = 0.999
_REST = 8
_PLAIN_EVERY = 64
"""A round without drafts now and then, to know what one takes."""
_MOST_KNOWN = 1000
"""Sequences whose own drafts are kept in mind: those that are done are forgotten when there are more."""
_LEAST_GAIN = 0.01
"""Chance to stand of a draft that is looked at: to weigh those behind it takes longer than they are worth."""
_OWN_WEIGHT = 6.0
"""How many tried drafts of its own a sequence needs to count as much as all others."""


class PassCosts:
    """Seconds of a target pass by its number of tokens: straight lines between measured points."""

    def __init__(self, points: ReadSequence[tuple[int, float]]) -> None:
        """`points`: (tokens, seconds), tokens ascending, at least two."""
        assert len(points) >= 2
        self._points = list(points)
        self._known: list[float] = []

    def seconds(self, num_tokens: int) -> float:
        while len(self._known) <= num_tokens:
            self._known.append(self._at(len(self._known)))
        return self._known[num_tokens]

    def _at(self, num_tokens: int) -> float:
        pairs = list(pairwise(self._points))
        (left, low), (right, high) = next((pair for pair in pairs if num_tokens <= pair[1][0]), pairs[-1])
        return max(low + (high - low) * (num_tokens - left) / (right - left), 1e-9)

    @classmethod
    def measure(cls, target: Target, most: int, budget_s: float = 0.5) -> PassCosts:
        """Time passes of 1, 2, 4, ... up to `most` tokens on free rows; larger ones are extrapolated when time runs out.

        Sizes take turns and the fastest of each counts: the machine changes its pace, and other programs disturb. A few turns
        may take four times the budget: a table of single measurements would say what else ran, not what passes cost.
        """
        began, best = time.perf_counter(), dict[int, float]()
        sizes = [1 << power for power in range(max(most.bit_length(), 2))]
        for place, size in enumerate(sizes * _TURNS):
            spent = time.perf_counter() - began
            if len(best) >= 2 and spent > (budget_s if place >= _LEAST_TURNS * len(sizes) else 4 * budget_s):
                break
            best[size] = min(best.get(size, float("inf")), _pass_seconds(target, size))
        points = sorted(best.items())
        least = float("inf")
        for index in range(len(points) - 1, -1, -1):  # a smaller pass never takes more: that would be another program's doing
            least = min(least, points[index][1])
            points[index] = points[index][0], least
        return cls(points)


def _pass_seconds(target: Target, num_tokens: int) -> float:
    row = target.cache.allocate()
    assert row is not None, "pass costs are measured before any request"
    count = min(num_tokens, target.cache.max_len)
    batch = ForwardBatch([row], [0], [count], [0] * count, only_argmax=True)
    started = time.perf_counter()
    target.forward(batch).best_T()
    spent = time.perf_counter() - started
    target.cache.rollback([row], [0])
    target.cache.free(row)
    return spent * num_tokens / count


class _Places:
    """Chances that a draft stands, given that those before it do, by its place in the draft."""

    def __init__(self, num_places: int, prior: float) -> None:
        self._prior = prior
        self._tried, self._stood = [0.0] * num_places, [0.0] * num_places
        self.chances = [prior] * num_places

    def record(self, num_drafted: int, num_accepted: int) -> None:
        """What became of one request's drafts in a round; places that it had no draft for rest."""
        chance = self._prior
        for place in range(len(self.chances)):
            if place <= num_accepted and place < num_drafted:
                self._tried[place] = _KEEP * self._tried[place] + 1.0
                self._stood[place] = _KEEP * self._stood[place] + (place < num_accepted)
            elif place >= num_drafted:
                self._tried[place] *= _REST_KEEP
                self._stood[place] *= _REST_KEEP
            chance = (_PRIOR_WEIGHT * chance + self._stood[place]) / (_PRIOR_WEIGHT + self._tried[place])
            self.chances[place] = chance


@dataclass(slots=True)
class _Own:
    """A sequence's own drafts, old ones fading: how many were tried, stood, and were expected to stand."""

    stood: float = 0.0
    expected: float = 0.0

    def factor(self) -> float:
        return (_OWN_WEIGHT * PRIOR + self.stood) / (_OWN_WEIGHT * PRIOR + self.expected)


@dataclass(slots=True)
class _Pace:
    """What rounds of one kind take, in seconds of the machine as it was when `costs` were measured."""

    costs: PassCosts
    slowness: float = 1.0
    """How much longer than measured passes take now, judging included."""
    _num_seen: int = 0
    _factors: dict[int, tuple[float, float]] = field(default_factory=dict)
    """By size of the pass: how far the measured cost is out beside those of other sizes, and how often that was seen."""
    _pass_s: dict[int, float] = field(default_factory=dict)
    """By tokens, until the factors change."""
    _draft_s: dict[int, float] = field(default_factory=dict)
    """By the number of rows that draft."""
    _is_warm: bool = False
    _latest: tuple[int | None, float] = (None, 0.0)
    """Size of the latest round's pass, and its time over the measured one."""
    _num_drafted: int = 0
    """Rounds with drafts since the last one without."""
    _plain_every: int = 8

    @property
    def wants_plain(self) -> bool:
        return self._num_drafted >= self._plain_every

    def pass_s(self, num_tokens: int) -> float:
        known = self._pass_s.get(num_tokens)
        if known is None:
            known = self._pass_s[num_tokens] = self.costs.seconds(num_tokens) * self._factor(_size_class(num_tokens))
        return known

    def _factor(self, size: int) -> float:
        """Known for this size, else that of the nearest that is."""
        if size not in self._factors and self._factors:
            size = min(self._factors, key=lambda known: abs(known - size))
        return self._factors[size][0] if self._factors else 1.0

    def drafting_s(self, num_rows: int) -> float:
        """Known for this many rows, else scaled from the nearest number that is."""
        known = self._draft_s.get(num_rows)
        if known is not None:
            return known
        if not self._draft_s:
            return 0.0  # drafts once, and then it is known
        nearest = min(self._draft_s, key=lambda rows: abs(rows - num_rows))
        return self._draft_s[nearest] * (1.0 + 0.5 * (num_rows - nearest) / nearest)

    def best_of(self, num_rows: int, gains: list[tuple[float, bool, Sequence]]) -> tuple[float, int]:
        """Tokens per second of a round with the best number of these drafts of one sequence and no others, and that number;
        zeros of none."""
        best, number, expected, spent = 0.0, 0, float(num_rows), 0.0
        for count, (gain, begins, _) in enumerate(gains, start=1):
            expected += gain
            spent += self.drafting_s(1) if begins else 0.0
            if (rate := expected / (self.pass_s(num_rows + count) + spent)) > best:
                best, number = rate, count
        return best, number

    def record(self, num_tokens: int, verify_s: float, num_drafting: int, draft_s: float, is_plain: bool | None = None) -> None:
        """A round: its pass, and its drafts if any had to be made. One that was disturbed moves the estimates by little.

        `is_plain`: nothing was drafted, not even what was at hand; by default that nothing had to be made.
        """
        self._pass_s.clear()
        size, measured = _size_class(num_tokens), verify_s / self.costs.seconds(num_tokens)
        ratio = measured / (self._factor(size) * self.slowness)
        if self._num_seen == 0:
            self.slowness, ratio = max(measured, 1e-6), 1.0
        self.slowness *= 1.0 + max(0.1, 1.0 / (1 + self._num_seen)) * (min(max(ratio, 0.5), 2.0) - 1.0)
        if size != self._latest[0]:
            self._compare(size, measured)
        self._latest = size, measured
        self._num_seen += 1
        if num_drafting == 0 and is_plain is False:
            return
        if num_drafting == 0 and self._num_drafted:
            self._plain_every = min(2 * self._plain_every, _PLAIN_EVERY)
        self._num_drafted = self._num_drafted + 1 if num_drafting else 0
        if num_drafting == 0:  # what was found too dear is worth another try some day
            self._draft_s = {rows: _FORGET * spent for rows, spent in self._draft_s.items()}
            for each, (factor, num_seen) in self._factors.items():
                if each > size:
                    self._factors[each] = 1.0 + _FORGET * (factor - 1.0), _FORGET * num_seen
            return
        spent = draft_s / self.slowness
        if not self._is_warm:  # the first draft touches memory for the first time
            self._is_warm, spent = True, 0.0
        known = self._draft_s.get(num_drafting)
        self._draft_s[num_drafting] = spent if not known else known + 0.1 * (min(spent, 4 * known) - known)

    def _compare(self, size: int, measured: float) -> None:
        """Two rounds in a row of different sizes ran on the same machine: what sets them apart is what the table has wrong.

        Each moves a step, however far they are apart: the middle of what was seen counts, not what was disturbed.
        """
        before, measured_before = self._latest
        if before is not None:
            is_dearer = measured * self._factor(before) > measured_before * self._factor(size)
            for each, sign in ((size, 1.0 if is_dearer else -1.0), (before, -1.0 if is_dearer else 1.0)):
                num_seen = self._factors[each][1] if each in self._factors else 0.0
                step = sign * max(0.005, 0.1 / (1.0 + 0.3 * num_seen))
                self._factors[each] = self._factor(each) * (1.0 + step), num_seen + 1.0


@lru_cache(maxsize=4096)
def _size_class(num_tokens: int) -> int:
    """Two classes for each doubling."""
    return round(2 * math.log2(max(num_tokens, 1)))


def _gains_at_hand(seq: Sequence, chance: float) -> list[tuple[float, bool, Sequence]]:
    """As `DraftLengths._gains`, of drafts that cost nothing to make."""
    if not chance:
        return []
    most = MOST_FREE if seq.params.max_drafted is None else min(MOST_FREE, seq.params.max_drafted)
    kept, gains = chance, []
    for _ in range(min(most, seq.num_remaining - 1)):
        if kept < _LEAST_GAIN:
            break
        gains.append((kept, False, seq))
        kept *= chance
    return gains


def _gain(gained: tuple[float, bool, Sequence]) -> float:
    return gained[0]


@dataclass(slots=True)
class DraftLengths:
    """Chooses every sequence's `max_drafted` of a round. One per drafter: what was learned serves all its sequences."""

    costs: PassCosts
    most: int
    """Drafts per round at most: the drafter's own limit."""
    _greedy: _Places = field(init=False)
    _sampled: _Places = field(init=False)
    _greedy_pace: _Pace = field(init=False)
    _sampled_pace: _Pace = field(init=False)
    """Of rounds with a sampled request: their drafts are drawn, their logits made probabilities, which takes its time."""
    _own: dict[int, _Own] = field(default_factory=dict)
    _rest: int = 0
    """Rounds of `_rest_rows` rows in which no drafts are made: to choose in a full batch takes longer than it is worth."""
    _rest_rows: int = 0

    def __post_init__(self) -> None:
        self._greedy, self._sampled = _Places(self.most, PRIOR), _Places(self.most, SAMPLED_PRIOR)
        self._greedy_pace, self._sampled_pace = _Pace(self.costs), _Pace(self.costs)

    def choose(
        self,
        batch: Batch,
        num_joining: int = 0,
        free_chance: Callable[[Sequence], float] | None = None,
        most_s: float = math.inf,
    ) -> None:
        """Set `max_drafted` of each sequence to what makes the batch produce the most tokens per second, and `takes_free`
        where drafts at hand (`Drafter.free_chance`) promise more for their time than those that must be made.

        Rows that are about to join count as if they were there: what a row must do before its first draft would not pay.
        Drafts do not make the round longer than `most_s`.
        """
        free = [seq for seq in batch.sequences if seq.params.is_greedy or seq.params.seed is None]
        num_rows = len(batch) + num_joining
        pace = self._pace_of(batch)
        is_resting = self._rest > 0 and self._rest_rows == num_rows
        if pace.wants_plain:
            self._rest = max(self._rest - 1, 0)
            for seq in free:
                seq.max_drafted, seq.takes_free = 0, False
            return
        gains: list[tuple[float, bool, Sequence]] = []
        plain_rate = num_rows / pace.pass_s(num_rows)
        for seq in free:
            made = [] if is_resting else self._gains(seq)
            at_hand = _gains_at_hand(seq, free_chance(seq)) if free_chance else []
            rate, number = pace.best_of(num_rows, at_hand)
            seq.takes_free = number > 0 and rate > max(plain_rate, pace.best_of(num_rows, made)[0])
            gains += at_hand[:number] if seq.takes_free else made
        if len(free) > 1:
            gains.sort(key=_gain, reverse=True)
        num_tokens = num_rows + self.most * (len(batch) - len(free))
        num_drafting = len(batch) - len(free)
        expected, best = float(num_rows), 0
        best_rate = num_rows / (pace.pass_s(num_tokens) + (pace.drafting_s(num_drafting) if num_drafting else 0.0))
        for count, (gain, begins, _) in enumerate(gains, start=1):
            expected += gain
            num_drafting += begins
            round_s = pace.pass_s(num_tokens + count) + pace.drafting_s(num_drafting)
            if round_s * pace.slowness > most_s:
                break
            rate = expected / round_s
            if rate > best_rate:
                best_rate, best = rate, count
        pays = any(begins for _, begins, _ in gains[:best])
        self._rest = self._rest - 1 if is_resting else _REST if num_rows > 1 and not pays else 0
        self._rest_rows = num_rows
        for seq in free:
            seq.max_drafted = 0
        for _, _, seq in gains[:best]:
            seq.max_drafted = (seq.max_drafted or 0) + 1

    def _gains(self, seq: Sequence) -> list[tuple[float, bool, Sequence]]:
        """Chance that each draft is kept, falling; whether it is the one for which the drafter must begin."""
        places, own = self._of(seq), self._own.get(seq.request_id)
        factor = own.factor() if own else 1.0
        kept, gains = 1.0, []
        most = self.most if seq.params.max_drafted is None else min(self.most, seq.params.max_drafted)
        for chance in places.chances[: max(min(most, seq.num_remaining - 1), 0)]:
            kept *= min(chance * factor, 0.995)
            if kept < _LEAST_GAIN:
                break
            gains.append((kept, not gains, seq))
        return gains

    def _of(self, seq: Sequence) -> _Places:
        return self._greedy if seq.params.is_greedy else self._sampled

    def _pace_of(self, batch: Batch) -> _Pace:
        return self._greedy_pace if all(seq.params.is_greedy for seq in batch.sequences) else self._sampled_pace

    def record(self, batch: Batch, stats: RoundStats) -> None:
        """Learn from a round: how long it took, which drafts stood."""
        num_tokens = len(batch) + sum(stats.num_drafted_B)
        pairs = zip(batch.sequences, stats.num_drafted_B, strict=True)
        num_drafting = sum(num_drafted > 0 and not seq.takes_free for seq, num_drafted in pairs)
        self._pace_of(batch).record(num_tokens, stats.verify_s, num_drafting, stats.draft_s, num_tokens == len(batch))
        if len(self._own) > _MOST_KNOWN:
            alive = {seq.request_id for seq in batch.sequences}
            self._own = {number: own for number, own in self._own.items() if number in alive}
        for seq, num_drafted, num_accepted in zip(batch.sequences, stats.num_drafted_B, stats.num_accepted_B, strict=True):
            if seq.takes_free:
                continue
            places = self._of(seq)
            if num_drafted:
                own = self._own.setdefault(seq.request_id, _Own())
                own.stood = 0.95 * own.stood + min(num_accepted, num_drafted)
                own.expected = 0.95 * own.expected + sum(places.chances[: min(num_accepted + 1, num_drafted)])
            places.record(num_drafted, num_accepted)
