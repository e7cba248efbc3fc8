"""Estimates of the chance that a draft is accepted, by source, draft position and confidence. Imports no PyTorch.

A source is a drafter or prompt lookup. A slot is a draft position in the round, from 0. A drafter's confidence at a
slot is the log-probability of its top token there. A planner (`planner.py`) updates the estimates after each round.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.plan.trees import Outcome

PRIORS = {"greedy": 0.75, "sampled": 0.5, "seeded": 0.5, "lossy": 0.75, "lossy sampled": 0.5}
"""Initial acceptance chance of the first draft, by the row's kind: how its tokens are chosen, and whether its rule is
lossy."""
_PRIOR_WEIGHT = 4.0
"""Weight of a slot's prior, in tries. The prior of a later slot is the estimate of the slot before it."""
_KEEP = 0.98
"""Factor applied to a slot's older counts after each round: about the latest 50 tries count."""
_CONFIDENCE_EDGES = tuple(math.log(share) for share in (0.05, 0.12, 0.22, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96, 0.985))
"""Bounds of the confidence buckets, as log-probabilities."""
_SIBLING_WEIGHT = 4.0
"""Weight, in tokens, of the drafter's own probabilities for tokens other than its top one."""
_WATCH_KEEP, _SURPRISE, _DOUBT = 0.9, 4.0, 0.2
"""If the latest 10 or so rounds deviate by more than _SURPRISE standard deviations, older counts are scaled by
_DOUBT."""
_BUCKET_WEIGHT, _CELL_WEIGHT, _BUCKET_KEEP = 4.0, 12.0, 0.995
"""Weight of a slot's average in the estimate of a confidence bucket; weight of that in the estimate of the bucket at
one slot; factor applied to older counts of both."""


@dataclass(slots=True)
class Ratio:
    """Quotient of two sums in which older values count less, such as drafts accepted over drafts tried."""

    over: float = 0.0
    under: float = 0.0

    def add(self, over: float, under: float, keep: float) -> None:
        self.over, self.under = keep * self.over + over, keep * self.under + under

    def near(self, prior: float, weight: float) -> float:
        """Returns the quotient, drawn towards `prior` as long as little was counted: it is computed with `weight` added
        to its denominator, and prior * weight to its numerator."""
        return (weight * prior + self.over) / (weight + self.under)


class Chances:
    """Estimated acceptance chance of one drafter's drafts at each slot (draft position), given that all earlier drafts
    of the round are accepted. Updated after each round."""

    def __init__(self, num_slots: int, prior: float) -> None:
        self._prior = prior
        self._tallies = [Ratio() for _ in range(num_slots)]
        self.average = [prior] * num_slots
        """Acceptance chance at each slot, averaged over all confidences."""
        self._buckets: dict[int, Ratio] = {}
        """Accepted over tried, by confidence bucket."""
        self._cells: dict[tuple[int, int], Ratio] = {}
        """Accepted over tried, by slot and confidence bucket."""
        self._sibling_truth = Ratio()
        """Siblings accepted over those expected to be, by the drafter's own probabilities."""
        self._sibling_factor = 1.0
        self._excess = self._variance = 0.0
        """Accepted drafts of recent rounds beyond the expected number, and the variance of that."""

    def extend(self, num_slots: int) -> None:
        """Add slots until there are `num_slots`, for a drafter that drafts further than before. New slots start with
        the chance of the last existing one."""
        more = num_slots - len(self.average)
        self._tallies += [Ratio() for _ in range(more)]
        self.average += self.average[-1:] * more

    def of(self, confidence: Sequence[float]) -> list[float]:
        """Estimates the acceptance chance of the next round's draft at each slot (draft position). `confidence`: the
        drafter's log-probability of its top token at each slot."""
        return [self._chance(slot, _bucket_of(logprob)) for slot, logprob in enumerate(confidence)]

    def _chance(self, slot: int, bucket: int) -> float:
        ratio = self._buckets.get(bucket)
        chance = ratio.near(self.average[slot], _BUCKET_WEIGHT) if ratio else self.average[slot]
        cell = self._cells.get((slot, bucket))
        return cell.near(chance, _CELL_WEIGHT) if cell else chance

    def of_candidates(self, slot: int, logprobs: Sequence[float]) -> list[float]:
        """Estimates the acceptance chance of each candidate token of a slot (draft position), non-increasing.
        `logprobs`: the candidates' log-probabilities in the drafter, the largest first."""
        chances = [self._chance(slot, _bucket_of(logprobs[0]))]
        left = 1.0 - chances[0]
        for logprob in logprobs[1:]:
            # A slot's chances sum up to 1 at most; by rounding, `left` may be just below 0.
            chances.append(max(min(math.exp(logprob) * self._sibling_factor, chances[-1], left), 0.0))
            left -= chances[-1]
        return chances

    def record_tree(self, outcome: Outcome, confidence: Sequence[float] | None) -> None:
        """Update the estimates with one row's verified draft tree (`outcome`). The path of top tokens counts like a
        chain in `record`. The other tested nodes update a factor, by which the drafter's probabilities of lower-ranked
        tokens are corrected. `confidence`: the drafter's log-probability of its top token at each slot; None if
        unknown."""
        self.record(len(outcome.tree.spine), outcome.spine_accepted, confidence)
        siblings = outcome.siblings()
        expected = sum(math.exp(logprob) for logprob, _ in siblings)
        self._sibling_truth.add(sum(is_accepted for _, is_accepted in siblings), expected, _BUCKET_KEEP)
        self._sibling_factor = self._sibling_truth.near(1.0, _SIBLING_WEIGHT)

    def record(self, num_checked: int, num_accepted: int, confidence: Sequence[float] | None = None) -> None:
        """Update the estimates with one row's drafts, of which the first `num_checked` were verified and the first
        `num_accepted` accepted. `confidence`: the drafter's log-probability of its top token at each slot, verified or
        not; None if unknown.

        If all verified drafts were accepted, drafts that were not verified are counted too, with their estimated
        chances (only with `confidence`). The planner skips drafts that are not promising; without counting these, the
        estimates would become too high.
        """
        chances = self.of(confidence[: len(self.average)]) if confidence is not None else []
        self._detect_shift((chances or self.average)[:num_checked], num_accepted)
        num_tried = min(num_accepted + 1, num_checked, len(self.average))
        for tally in self._tallies[num_tried:]:
            tally.add(0.0, 0.0, _KEEP)  # a slot that is no longer reached drifts towards the one before it
        for slot in range(num_tried):
            accepted = float(slot < num_accepted)
            self._tallies[slot].add(accepted, 1.0, _KEEP)
            if slot < len(chances) and confidence is not None:
                bucket = _bucket_of(confidence[slot])
                self._buckets.setdefault(bucket, Ratio()).add(accepted, 1.0, _BUCKET_KEEP)
                self._cells.setdefault((slot, bucket), Ratio()).add(accepted, 1.0, _BUCKET_KEEP)
        if num_accepted == num_checked:
            for slot in range(num_checked, len(chances)):
                self._tallies[slot].add(chances[slot], 1.0, 1.0)  # older counts were faded above
        chance = self._prior
        for slot, tally in enumerate(self._tallies):
            chance = self.average[slot] = tally.near(chance, _PRIOR_WEIGHT)

    def _detect_shift(self, chances: Sequence[float], num_accepted: int) -> None:
        """Discount all counts if recent outcomes are statistically implausible: text or drafter changed."""
        gain, expected, squares = 1.0, 0.0, 0.0
        for slot, chance in enumerate(chances):
            # N accepted drafts: E[N] = sum of P(N > k), E[N^2] = sum of (2k + 1) P(N > k); `gain` is P(N > slot).
            gain *= chance
            expected += gain
            squares += (2 * slot + 1) * gain
        self._excess = _WATCH_KEEP * self._excess + num_accepted - expected
        self._variance = _WATCH_KEEP**2 * self._variance + squares - expected**2
        # The 1.0: without it, one rejection of a nearly certain draft (variance near 0) would discard all counts.
        if abs(self._excess) > _SURPRISE * math.sqrt(self._variance + 1.0):
            for tally in (*self._tallies, *self._buckets.values(), *self._cells.values()):
                tally.add(0.0, 0.0, _DOUBT)
            self._excess = self._variance = 0.0


def _bucket_of(logprob: float) -> int:
    return bisect_left(_CONFIDENCE_EDGES, logprob)


@dataclass(slots=True)
class Calibration(Ratio):
    """Correction factor on the acceptance chances that a source, such as prompt lookup, predicts for its own drafts:
    drafts accepted divided by drafts predicted to be accepted."""

    over: float = 4.0
    under: float = 4.0

    def apply(self, chances: tuple[float, ...]) -> tuple[float, ...]:
        factor = self.near(1.0, 4.0)
        return tuple(min(chance * factor, 0.99) for chance in chances)
