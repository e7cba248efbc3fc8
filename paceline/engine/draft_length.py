"""How many tokens to draft: those that bring more tokens per second, none when none do.

Costs: seconds of a target pass by its number of tokens, measured once when the engine starts, and seconds of drafting, kept
up as it happens. Gains: for each draft the chance that it stands, from the drafts of the same place in earlier rounds, greedy
and sampled requests apart, corrected by how this sequence's own drafts fared. All of it is known before a round's tokens are,
so that the choice changes nothing of what is said (a lossless rule keeps the target's distribution for any number of drafts).
A sampled request with a seed is left alone: which of the many equally right texts it gets depends on the number of drafts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as ReadSequence
from dataclasses import dataclass, field
from itertools import pairwise

from paceline.model.target import ForwardBatch, Target
from paceline.types import Batch, RoundStats, Sequence

PRIOR = 0.75
"""Chance that a draft stands, of which nothing is known; also where a place drifts that was not tried for long."""
_FADE = 0.02
_DRIFT = 0.004
_TURNS = 12
_FORGET = 0.999
_REST = 8
_MOST_KNOWN = 1000
"""Sequences whose own drafts are kept in mind: those that are done are forgotten when there are more."""
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

        Sizes take turns and the fastest of each counts: the machine changes its pace, and other programs disturb.
        """
        began, best = time.perf_counter(), dict[int, float]()
        sizes = [1 << power for power in range(max(most.bit_length(), 2))]
        for size in sizes * _TURNS:
            if len(best) >= 2 and time.perf_counter() - began > budget_s:
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


@dataclass(slots=True)
class _Places:
    """Chances that a draft stands, given that those before it do, by its place in the draft."""

    chances: list[float]

    def record(self, num_drafted: int, num_accepted: int) -> None:
        for place in range(len(self.chances)):
            if place < num_accepted:
                self.chances[place] += _FADE * (1.0 - self.chances[place])
            elif place == num_accepted and place < num_drafted:
                self.chances[place] -= _FADE * self.chances[place]
            elif place >= num_drafted:
                self.chances[place] += _DRIFT * (PRIOR - self.chances[place])

    def rest(self) -> None:
        """A round without drafts."""
        self.chances = [chance + _DRIFT * (PRIOR - chance) for chance in self.chances]


@dataclass(slots=True)
class _Own:
    """A sequence's own drafts, old ones fading: how many were tried, stood, and were expected to stand."""

    stood: float = 0.0
    expected: float = 0.0

    def factor(self) -> float:
        return (_OWN_WEIGHT * PRIOR + self.stood) / (_OWN_WEIGHT * PRIOR + self.expected)


def _gain(pair: tuple[float, Sequence]) -> float:
    return pair[0]


@dataclass(slots=True)
class DraftLengths:
    """Chooses every sequence's `max_drafted` of a round. One per engine."""

    costs: PassCosts
    most: int
    """Drafts per round at most: the drafter's own limit."""
    _greedy: _Places = field(init=False)
    _sampled: _Places = field(init=False)
    _own: dict[int, _Own] = field(default_factory=dict)
    _draft_s: dict[int, float] = field(default_factory=dict)
    """By the number of rows that draft, in seconds of the machine as it was when `costs` were measured."""
    _slowness: float = 1.0
    _is_warm: bool = False
    _rest: int = 0
    """Rounds of `_rest_rows` rows that need no new choice: in a full batch it takes longer than it is worth."""
    _rest_rows: int = 0

    def __post_init__(self) -> None:
        self._greedy, self._sampled = _Places([PRIOR] * self.most), _Places([PRIOR] * self.most)

    def choose(self, batch: Batch, num_joining: int = 0) -> None:
        """Set `max_drafted` of each sequence to what makes the batch produce the most tokens per second.

        Rows that are about to join count as if they were there: what a row must do before its first draft would not pay.
        """
        free = [seq for seq in batch.sequences if seq.params.is_greedy or seq.params.seed is None]
        num_rows = len(batch) + num_joining
        if self._rest and self._rest_rows == num_rows:
            self._rest -= 1
            for seq in free:
                seq.max_drafted = 0
            return
        gains = [(gain, seq) for seq in free for gain in self._gains(seq)]
        if len(free) > 1:
            gains.sort(key=_gain, reverse=True)
        num_tokens = num_rows + self.most * (len(batch) - len(free))
        drafting_s = self._drafting_s(len(batch))
        expected, best_rate, best = float(num_rows), num_rows / self.costs.seconds(num_tokens), 0
        for count, (gain, _) in enumerate(gains, start=1):
            expected += gain
            rate = expected / (self.costs.seconds(num_tokens + count) + drafting_s)
            if rate > best_rate:
                best_rate, best = rate, count
        self._rest, self._rest_rows = (_REST if best == 0 and num_rows > 1 else 0), num_rows
        for seq in free:
            seq.max_drafted = 0
        for _, seq in gains[:best]:
            seq.max_drafted = (seq.max_drafted or 0) + 1

    def _gains(self, seq: Sequence) -> list[float]:
        """Chance that each draft is kept, falling."""
        places, own = self._of(seq), self._own.get(seq.request_id)
        factor = own.factor() if own else 1.0
        kept, gains = 1.0, []
        most = self.most if seq.params.max_drafted is None else min(self.most, seq.params.max_drafted)
        for chance in places.chances[: min(most, seq.num_remaining - 1)]:
            kept *= min(chance * factor, 0.995)
            gains.append(kept)
        return gains

    def _of(self, seq: Sequence) -> _Places:
        return self._greedy if seq.params.is_greedy else self._sampled

    def _drafting_s(self, num_rows: int) -> float:
        """Known for this many rows, else scaled from the nearest number that is."""
        known = self._draft_s.get(num_rows)
        if known is not None:
            return known
        if not self._draft_s:
            return 0.0  # drafts once, and then it is known
        nearest = min(self._draft_s, key=lambda rows: abs(rows - num_rows))
        return self._draft_s[nearest] * (1.0 + 0.5 * (num_rows - nearest) / nearest)

    def record(self, batch: Batch, stats: RoundStats) -> None:
        """Learn from a round: how long it took, which drafts stood."""
        num_rows, num_tokens = len(batch), len(batch) + sum(stats.num_drafted_B)
        self._slowness += 0.1 * (min(max(stats.verify_s / self.costs.seconds(num_tokens), 0.2), 5.0) - self._slowness)
        if not any(stats.num_drafted_B):  # what was found too dear is worth another try some day
            self._draft_s = {rows: _FORGET * spent for rows, spent in self._draft_s.items()}
            self._greedy.rest()
            self._sampled.rest()
            return
        spent = stats.draft_s / self._slowness
        if not self._is_warm:  # the first draft touches memory for the first time
            self._is_warm, spent = True, 0.0
        known = self._draft_s.get(num_rows)
        self._draft_s[num_rows] = spent if not known else known + 0.1 * (min(spent, 4 * known) - known)
        if len(self._own) > _MOST_KNOWN:
            alive = {seq.request_id for seq in batch.sequences}
            self._own = {number: own for number, own in self._own.items() if number in alive}
        for seq, num_drafted, num_accepted in zip(batch.sequences, stats.num_drafted_B, stats.num_accepted_B, strict=True):
            places, own = self._of(seq), self._own.setdefault(seq.request_id, _Own())
            tried = min(num_accepted + 1, num_drafted)
            own.stood = 0.95 * own.stood + min(num_accepted, num_drafted)
            own.expected = 0.95 * own.expected + sum(places.chances[:tried])
            places.record(num_drafted, num_accepted)
