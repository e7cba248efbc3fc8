"""Rules that decide which drafts are accepted: pure functions of tensors and tokens, called by `engine/round.py`.

Four keep the target's distribution for any drafter: match, rejection, block, and auto, which selects one of them.

- `match`: sample the target's own token at each position (`model/sampling/race.py`); a draft is accepted if it equals
  that token. The text equals plain decoding's with the same seed. At temperature 0 the sample is the most probable
  token (Stern et al. 1811.03115, section 3).
- `rejection` (Leviathan et al. 2211.17192, algorithm 1; Chen et al. 2302.01318, algorithm 2): draft x is accepted with
  probability min(1, target(x) / draft(x)); the first rejected one is replaced by a token sampled from the residual
  max(target - draft, 0).
- `block` (Sun et al. 2403.10444, algorithm 2): decides on the drafts together and accepts on average at least as many
  as rejection. With x_1 .. x_K drafted, pi_0 = 1 and pi_i = min(pi_{i-1} * target(x_i) / draft(x_i), 1), the first i
  drafts are accepted with probability pi_i. Independent random numbers eta_i give this with
      h_i = R_i / (R_i + 1 - pi_i) for i < K,  R_i = sum over x of max(pi_i * target(x) - draft(x), 0) after x_1 .. x_i,
      h_K = pi_K:
  num_accepted is the largest i with eta_i < h_i (0 if none), and the next token is sampled from max(pi_i * target -
  draft, 0) after x_1 .. x_i, or from the target if all K are accepted. Row i of the tensors is the distribution after
  x_1 .. x_i.

Rejection and block are exact if the drafts were sampled from the given probabilities. `mocked` is not lossless: it
measures speed at an acceptance that no drafter has yet. The rules of `verify/lossy.py`, which a request may select, are
not lossless either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.errors import ConfigError
from paceline.model.sampling.logits import sample
from paceline.plan.marginals import Marginals, path_that_stands
from paceline.plan.trees import Tree
from paceline.rng import ACCEPT, RESIDUAL, Noise, uniform
from paceline.types import Sequence as Request


class RowVerdict(NamedTuple):
    """Result of judging one row: the number of accepted drafts, and the token after them."""

    num_accepted: int
    next_token: int


@dataclass(frozen=True, slots=True)
class Uniforms:
    """Random numbers that decide the verification of one row in one round. They depend only on the seed, the positions
    of token and draft, and the type of decision (see `paceline.rng`). A request repeated with its seed gets the same
    ones."""

    seed: int
    anchor_position: int
    """Index of the last committed token in prompt + answer: `len(seq.tokens) - 1`."""

    @classmethod
    def of(cls, seq: Request) -> Uniforms:
        return cls(seq.seed, len(seq.tokens) - 1)

    def noise(self, slot: int) -> Noise:
        """Returns the random numbers with which the target samples its own token at this slot (draft position), the
        same as in plain decoding."""
        return Noise(self.seed, self.anchor_position + slot + 1)

    def accept(self, slot: int) -> float:
        """Returns the random number in [0, 1) that decides whether the draft at this slot (draft position) is
        accepted."""
        return uniform(self.seed, ACCEPT, self.anchor_position, slot)

    def residual(self, slot: int) -> float:
        """Returns the random number in [0, 1) with which the token that replaces a rejected draft at this slot (draft
        position) is sampled."""
        return uniform(self.seed, RESIDUAL, self.anchor_position, slot)


@dataclass(frozen=True, slots=True)
class CheckedRow:
    """A rule's input for one row: K drafts, and the target's distributions at the J = K+1 verified positions."""

    draft_tokens: list[int]
    draft_probs_KV: Tensor | None
    """The distribution that each draft was sampled from, [K, V]. None: the drafts are certain (deterministic)."""
    uniforms: Uniforms
    draw: Callable[[int], int]
    """Function from a slot (draft position) to the target's own token there, as in plain decoding with this seed."""
    target_probs: Callable[[], Tensor]
    """Function that returns the target's distributions, [J, V]: row i before draft i, row K after all drafts."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A verification rule: the function `verify`, with its name and properties."""

    name: str
    verify: Callable[[CheckedRow], RowVerdict]
    lossless: bool
    """True if answers have plain decoding's distribution, with any drafter."""
    needs_probs: bool
    """True if the rule uses the drafts' distributions; otherwise it treats all drafts as certain (probability 1).
    Certain drafts of sampled rows are judged by `match` instead, if the rule is lossless and uses distributions."""
    draws: bool = False
    """True if certain drafts are compared with the target's own samples. Drafters that know the request's sampling
    noise may then predict these samples."""
    takes_trees: bool = False
    """True if the rule can judge draft trees, by the target's own samples or by `walk`."""
    walk: Callable[[Tree, Uniforms], list[int]] | None = None
    """Function that returns the accepted nodes of a tree, root to leaf, for a rule that ignores the target's tokens."""
    survives: Callable[[Uniforms], int] | None = None
    """Function that returns the number of accepted drafts, not limited by the number of drafts, for a rule that ignores
    the target's tokens."""


def match_prefix(draft_tokens: list[int], draw: Callable[[int], int]) -> RowVerdict:
    """Accepts the leading drafts that equal the target's own tokens.

    `draw`: function of the caller (draft position, from 0) -> the target's own token at this position. It is called in
    order, until a token differs from its draft; if all drafts are accepted, also for the position after them.
    """
    for slot, drafted in enumerate(draft_tokens):
        token = draw(slot)
        if token != drafted:
            return RowVerdict(slot, token)
    return RowVerdict(len(draft_tokens), draw(len(draft_tokens)))


def match(row: CheckedRow) -> RowVerdict:
    """Accepts the leading drafts that equal the target's own sampled tokens."""
    return match_prefix(row.draft_tokens, row.draw)


def auto(row: CheckedRow) -> RowVerdict:
    """Judges certain (deterministic) drafts by `match`, and sampled drafts by `block`. `match` gives the same text as
    plain decoding; `block` accepts on average at least as many sampled drafts as `rejection`."""
    return match(row) if row.draft_probs_KV is None else block(row)


def rejection(row: CheckedRow) -> RowVerdict:
    """Judges drafts by rejection sampling: one after the other, until one is rejected."""
    target_probs_JV, num_drafted = row.target_probs(), len(row.draft_tokens)
    for slot, chance in enumerate(accept_probs(row.draft_tokens, row.draft_probs_KV, target_probs_JV)):
        if not row.uniforms.accept(slot) < chance:  # so put, a chance that is NaN rejects
            return RowVerdict(slot, draw_residual(row, slot, target_probs_JV))
    return RowVerdict(num_drafted, row.draw(num_drafted))


def block(row: CheckedRow) -> RowVerdict:
    """Judges all drafts of a row together, by block verification: tests all K drafts first, then the first K - 1 and so
    on, and accepts the first of these prefixes that passes."""
    target_probs_JV, num_drafted = row.target_probs(), len(row.draft_tokens)
    probs_J = prefix_probs(row.draft_tokens, row.draft_probs_KV, target_probs_JV)
    # eta_i is `accept(i - 1)`, the random number of the i-th draft's slot.
    if num_drafted == 0 or row.uniforms.accept(num_drafted - 1) < probs_J[num_drafted]:
        return RowVerdict(num_drafted, row.draw(num_drafted))
    for num_accepted in range(num_drafted - 1, 0, -1):
        prefix_prob = probs_J[num_accepted]
        if prefix_prob == 0.0:
            continue
        weights_V = residual_after(row, num_accepted, target_probs_JV, prefix_prob)
        if row.uniforms.accept(num_accepted - 1) < stop_prob(prefix_prob, float(weights_V.sum())):
            return RowVerdict(num_accepted, _draw_residual(row, num_accepted, weights_V, target_probs_JV))
    return RowVerdict(0, draw_residual(row, 0, target_probs_JV))


def drafted_probs(draft_tokens: list[int], probs_KV: Tensor | None) -> list[float]:
    """Returns for each drafted token its probability in `probs_KV`, whose row i is the distribution at draft position
    i. None means certain drafts: all get 1.0."""
    if probs_KV is None:
        return [1.0] * len(draft_tokens)
    ids_K1 = torch.tensor(draft_tokens, dtype=torch.int64, device=probs_KV.device).unsqueeze(-1)
    return probs_KV[: len(draft_tokens)].gather(-1, ids_K1).flatten().tolist()


def accept_probs(draft_tokens: list[int], draft_probs_KV: Tensor | None, target_probs_JV: Tensor) -> list[float]:
    """Returns for each of the K drafts the probability that rejection sampling accepts it if all earlier drafts were
    accepted: min(1, target probability / draft probability). `draft_probs_KV`: distributions that the drafts were
    sampled from; None: certain drafts, of probability 1. `target_probs_JV`: the target's distributions at the verified
    positions, of which the first K are read."""
    pairs = zip(drafted_probs(draft_tokens, target_probs_JV), drafted_probs(draft_tokens, draft_probs_KV), strict=True)
    return [_at_most_one(target, draft) for target, draft in pairs]


def prefix_probs(draft_tokens: list[int], draft_probs_KV: Tensor | None, target_probs_JV: Tensor) -> list[float]:
    """Returns [pi_0, ..., pi_K]: pi_i is the probability that block verification accepts at least i drafts, given the
    first i of a row's K drafts. `draft_probs_KV`: as in `CheckedRow`. `target_probs_JV`: the target's distributions at
    the J = K + 1 verified positions."""
    probs_J = [1.0]
    targets, drafts = drafted_probs(draft_tokens, target_probs_JV), drafted_probs(draft_tokens, draft_probs_KV)
    for target, draft in zip(targets, drafts, strict=True):
        probs_J.append(_at_most_one(probs_J[-1] * target, draft))
    return probs_J


def _at_most_one(target: float, draft: float) -> float:
    """Returns min(1, target / draft); 0 for a draft of probability 0, which cannot have been sampled."""
    if draft <= 0:
        return 0.0
    return 1.0 if target >= draft else target / draft


def stop_prob(prefix_prob: float, residual_mass: float) -> float:
    """Returns the probability h_i (module's docstring) that block verification accepts exactly i of K drafts, given
    that it accepts at most i, for i < K.

    `prefix_prob`: pi_i, from `prefix_probs`. `residual_mass`: sum of the weights that `residual_after` returns for i
    accepted drafts.
    """
    if prefix_prob == 1.0:
        return 1.0  # also if R_i is 0: then every longer prefix is accepted too, and h_i is not needed
    return residual_mass / (residual_mass + 1.0 - prefix_prob)


def residual_after(row: CheckedRow, num_accepted: int, target_probs_JV: Tensor, prefix_prob: float = 1.0) -> Tensor:
    """Returns the weights [V] from which the next token is sampled if exactly `num_accepted` drafts are accepted and
    the next is rejected: max(prefix_prob * target - draft, 0), not normalised. `prefix_prob`: 1 for rejection sampling;
    entry `num_accepted` of `prefix_probs` for block verification."""
    weights_V = target_probs_JV[num_accepted] * prefix_prob  # a copy, which may be changed in place
    if row.draft_probs_KV is not None:
        return weights_V.sub_(row.draft_probs_KV[num_accepted]).clamp_(min=0.0)
    weights_V[row.draft_tokens[num_accepted]] = 0.0  # prefix_prob * target is never above 1
    return weights_V


def draw_residual(row: CheckedRow, num_accepted: int, target_probs_JV: Tensor) -> int:
    """Samples the token that replaces the first rejected draft, in rejection sampling. Its weights are max(target -
    draft, 0) at the rejected draft's position. `num_accepted`: number of drafts before it."""
    return _draw_residual(row, num_accepted, residual_after(row, num_accepted, target_probs_JV), target_probs_JV)


def _draw_residual(row: CheckedRow, num_accepted: int, weights_V: Tensor, target_probs_JV: Tensor) -> int:
    """Samples a token from the residual, or from the target if rounding left no residual (they are equal then)."""
    has_mass = float(weights_V.sum()) > 0
    return sample(weights_V if has_mass else target_probs_JV[num_accepted], row.uniforms.residual(num_accepted))


_RULES = (
    Rule("auto", auto, lossless=True, needs_probs=True, draws=True, takes_trees=True),
    Rule("match", match, lossless=True, needs_probs=False, draws=True, takes_trees=True),
    Rule("rejection", rejection, lossless=True, needs_probs=True),
    Rule("block", block, lossless=True, needs_probs=True),
)
RULES = {rule.name: rule for rule in _RULES}
"""The lossless rules by name, as in `paceline.config.RULES`."""


MOCKED = "mocked"
"""Name of the rule returned by `mocked`."""


def mocked(acceptance: float | Sequence[float] | Marginals) -> Rule:
    """Returns a verification rule for benchmarks: it accepts as many drafts as `acceptance` prescribes, whatever the
    target's tokens are. `acceptance` is one of three:

    - A number: the average tokens per round, including the bonus token, spread as evenly as possible over the rounds.
    - A survival curve: acceptance[i - 1] is the share of rounds in which at least i drafts are accepted. A random
      number decides for each row and round.
    - Marginals: the probability that a candidate is right, by draft position and rank. In a chain, the top candidates'
      survival curve decides. In a tree, a random path is accepted: each node is on it with the probability in
      `Tree.gains`. If the tree was grown by the same marginals (`marginals.MockedPlanner`), a round has 1 + sum(gains)
      tokens on average.

    Raises ConfigError for a number below 1, and for an invalid curve.
    """
    if isinstance(acceptance, Marginals):
        return replace(mocked(acceptance.survival), takes_trees=True, walk=_walk)
    survives = _drawn(tuple(acceptance)) if isinstance(acceptance, Sequence) else _even(acceptance)

    def verify(row: CheckedRow) -> RowVerdict:
        num_accepted = min(len(row.draft_tokens), survives(row.uniforms))
        return RowVerdict(num_accepted, row.draw(num_accepted))

    return Rule(MOCKED, verify, lossless=False, needs_probs=False, survives=survives)


def _walk(tree: Tree, uniforms: Uniforms) -> list[int]:
    return path_that_stands(tree.parents, tree.gains, [uniforms.accept(slot) for slot in range(tree.depth)])


def _even(tokens_per_round: float) -> Callable[[Uniforms], int]:
    if not (math.isfinite(tokens_per_round) and tokens_per_round >= 1):
        raise ConfigError(f"tokens_per_round counts the bonus token, give at least 1 (got {tokens_per_round})")
    return lambda uniforms: _num_tokens(uniforms.anchor_position, tokens_per_round) - 1


def _drawn(survival: tuple[float, ...]) -> Callable[[Uniforms], int]:
    if not all(0 <= later <= sooner <= 1 for sooner, later in pairwise((1.0, *survival))):  # also NaN
        raise ConfigError(f"a survival curve falls, between 1 and 0, as in 0.8, 0.6, 0.4 (got {survival})")

    def draw(uniforms: Uniforms) -> int:
        luck = uniforms.accept(0)
        return sum(luck < share for share in survival)

    return draw


def _num_tokens(anchor_position: int, tokens_per_round: float) -> int:
    # Error diffusion without state: round n of an ideal sequence covers positions floor(n t) up to floor((n + 1) t);
    # find n from the position. A sequence that starts in the middle of a round stays that far behind.
    round_index = math.ceil((anchor_position + 1) / tokens_per_round) - 1
    return math.floor((round_index + 1) * tokens_per_round) - math.floor(round_index * tokens_per_round)
