"""The rules that decide which drafts stand: pure functions of tensors and tokens, which `engine/round.py` calls.

Four keep the target's distribution for any drafter: match, rejection, block, and auto, which picks one of them.

- `match`: draw the target's own token at each position (`model/sampling/race.py`); a draft stands while it is that
  token. The text is the one that plain decoding gives with the same seed. At temperature 0 the draw is the most likely
  token (Stern et al. 1811.03115, section 3).
- `rejection` (Leviathan et al. 2211.17192, algorithm 1; Chen et al. 2302.01318, algorithm 2): draft x stands with probability
  min(1, target(x) / draft(x)); the first that falls is replaced by a token drawn from the residual max(target - draft, 0).
- `block` (Sun et al. 2403.10444, algorithm 2): decides on the drafts together and keeps as many as rejection or more. With
  x_1 .. x_K drafted, pi_0 = 1 and pi_i = min(pi_{i-1} * target(x_i) / draft(x_i), 1), the first i drafts stand with
  probability pi_i. That is reached through independent draws eta_i and
      h_i = R_i / (R_i + 1 - pi_i),  R_i = sum over x of max(pi_i * target(x) - draft(x), 0) after x_1 .. x_i,  h_K = pi_K:
  num_accepted is the largest i with eta_i < h_i (0 if none), and the next token comes from max(pi_i * target - draft, 0) after
  x_1 .. x_i, or from the target when all K stand. Row i of the tensors is the distribution after x_1 .. x_i.

Rejection and block are exact if the drafts were drawn from the probabilities given for them. `mocked` is not lossless: it
measures speed at an acceptance that no drafter has yet. Nor are the rules of `verify/lossy.py`, which a request asks for.
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
from paceline.rng import ACCEPT, RESIDUAL, SAMPLE, Noise, uniform
from paceline.types import Sequence as Request


class RowVerdict(NamedTuple):
    """How many drafts of a row stand, and the target's token after them (not counted as accepted)."""

    num_accepted: int
    next_token: int


@dataclass(frozen=True, slots=True)
class Uniforms:
    """The numbers in [0, 1) one row may use in one round; `paceline.rng` says why they are keyed as they are."""

    seed: int
    anchor_position: int
    """Place of the last committed token in prompt + answer: `len(seq.tokens) - 1`."""

    @classmethod
    def of(cls, seq: Request) -> Uniforms:
        return cls(seq.seed, len(seq.tokens) - 1)

    def sample(self, slot: int) -> float:
        """Draws a token at slot's absolute position."""
        return uniform(self.seed, SAMPLE, self.anchor_position + slot + 1)

    def noise(self, slot: int) -> Noise:
        """Draws the target's own token at slot's absolute position: plain decoding uses the same numbers there."""
        return Noise(self.seed, self.anchor_position + slot + 1)

    def accept(self, slot: int) -> float:
        """Decides on draft number `slot`."""
        return uniform(self.seed, ACCEPT, self.anchor_position, slot)

    def residual(self, slot: int) -> float:
        """Draws the token that replaces draft number `slot`."""
        return uniform(self.seed, RESIDUAL, self.anchor_position, slot)


@dataclass(frozen=True, slots=True)
class CheckedRow:
    """What a rule sees of one row: its K drafts, and the target's distributions at the J = K+1 checked positions."""

    draft_tokens: list[int]
    draft_probs_KV: Tensor | None
    """What each draft was drawn from; None means the drafts are certain (a one-hot proposal)."""
    uniforms: Uniforms
    draw: Callable[[int], int]
    """The target's own token at a slot: the one that plain decoding with this seed takes there."""
    target_probs: Callable[[], Tensor]
    """Computes the target's distributions, [J, V]: row i where draft i stands, row K after all drafts."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A way to decide which drafts stand."""

    name: str
    verify: Callable[[CheckedRow], RowVerdict]
    lossless: bool
    """Whether the answers are distributed as plain decoding's, for any drafter. Every figure that a rule makes carries it."""
    needs_probs: bool
    """Whether it uses what the drafts were drawn from; a rule that does not takes all drafts as certain."""
    draws: bool = False
    """Whether it holds certain drafts against the target's own draws, so that a drafter may guess with their numbers."""
    takes_trees: bool = False
    """Whether it can judge trees: along the target's own draws, or along `walk`."""
    walk: Callable[[Tree, Uniforms], list[int]] | None = None
    """Which nodes of a tree stand, root to leaf, of a rule that does not ask the target."""
    survives: Callable[[Uniforms], int] | None = None
    """How many drafts of a chain stand, as far as there are so many, of a rule that looks at no token."""


def match_prefix(draft_tokens: list[int], draw: Callable[[int], int]) -> RowVerdict:
    """`draw(slot)` is the target's own token at a slot; asked in order, and no further than the first mismatch."""
    for slot, drafted in enumerate(draft_tokens):
        token = draw(slot)
        if token != drafted:
            return RowVerdict(slot, token)
    return RowVerdict(len(draft_tokens), draw(len(draft_tokens)))


def match(row: CheckedRow) -> RowVerdict:
    """A draft x stands with probability target(x): for certain drafts as often as with `rejection`."""
    return match_prefix(row.draft_tokens, row.draw)


def auto(row: CheckedRow) -> RowVerdict:
    """Certain drafts by `match` (the same text as without a drafter), sampled ones by `block` (the most accepted)."""
    return match(row) if row.draft_probs_KV is None else block(row)


def rejection(row: CheckedRow) -> RowVerdict:
    """Reads whole distributions only where the next token is drawn."""
    target_probs_JV, num_drafted = row.target_probs(), len(row.draft_tokens)
    for slot, chance in enumerate(accept_probs(row.draft_tokens, row.draft_probs_KV, target_probs_JV)):
        if not row.uniforms.accept(slot) < chance:  # so put, a chance that is NaN rejects
            return RowVerdict(slot, draw_residual(row, slot, target_probs_JV))
    return RowVerdict(num_drafted, row.draw(num_drafted))


def block(row: CheckedRow) -> RowVerdict:
    """Looks for the largest standing prefix from the end, so that whole distributions are read only down to it."""
    target_probs_JV, num_drafted = row.target_probs(), len(row.draft_tokens)
    probs_J = prefix_probs(row.draft_tokens, row.draft_probs_KV, target_probs_JV)
    if num_drafted == 0 or row.uniforms.accept(num_drafted - 1) < probs_J[num_drafted]:
        return RowVerdict(num_drafted, row.draw(num_drafted))
    for num_accepted in range(num_drafted - 1, 0, -1):
        prefix_prob = probs_J[num_accepted]
        if prefix_prob == 0.0:
            continue
        weights_V = residual_after(row, num_accepted, target_probs_JV, prefix_prob)
        if row.uniforms.accept(num_accepted - 1) < stop_prob(prefix_prob, float(weights_V.sum())):
            return RowVerdict(num_accepted, _draw_residual(row, num_accepted, weights_V, target_probs_JV))
    return RowVerdict(0, _draw_residual(row, 0, residual_after(row, 0, target_probs_JV), target_probs_JV))


def drafted_probs(draft_tokens: list[int], probs_KV: Tensor | None) -> list[float]:
    """Probability of each drafted token in its row: K numbers, without touching the rest of the rows; None is one-hot."""
    if probs_KV is None:
        return [1.0] * len(draft_tokens)
    ids_K1 = torch.tensor(draft_tokens, dtype=torch.int64, device=probs_KV.device).unsqueeze(-1)
    return probs_KV[: len(draft_tokens)].gather(-1, ids_K1).flatten().tolist()


def accept_probs(draft_tokens: list[int], draft_probs_KV: Tensor | None, target_probs_JV: Tensor) -> list[float]:
    """Probability with which each draft stands, given that those before it do: min(1, target / draft), K numbers."""
    pairs = zip(drafted_probs(draft_tokens, target_probs_JV), drafted_probs(draft_tokens, draft_probs_KV), strict=True)
    return [_at_most_one(target, draft) for target, draft in pairs]


def prefix_probs(draft_tokens: list[int], draft_probs_KV: Tensor | None, target_probs_JV: Tensor) -> list[float]:
    """pi_0 .. pi_K: the probability that at least i drafts stand, given the drafts; J numbers."""
    probs_J = [1.0]
    targets, drafts = drafted_probs(draft_tokens, target_probs_JV), drafted_probs(draft_tokens, draft_probs_KV)
    for target, draft in zip(targets, drafts, strict=True):
        probs_J.append(_at_most_one(probs_J[-1] * target, draft))
    return probs_J


def _at_most_one(target: float, draft: float) -> float:
    """min(1, target / draft). A draft of probability 0 cannot have been drawn: any answer is exact, a division is not."""
    if draft <= 0:
        return 0.0
    return 1.0 if target >= draft else target / draft


def stop_prob(prefix_prob: float, residual_mass: float) -> float:
    """h_i, the probability that i drafts stand given that no longer prefix does, for i < K; `residual_mass` is R_i."""
    if prefix_prob == 1.0:
        return 1.0  # also where R_i is 0: then every longer prefix stands as surely and h_i is never asked for
    return residual_mass / (residual_mass + 1.0 - prefix_prob)


def residual_after(row: CheckedRow, num_accepted: int, target_probs_JV: Tensor, prefix_prob: float = 1.0) -> Tensor:
    """Unnormalised max(prefix_prob * target - draft, 0) after the first drafts, [V]."""
    weights_V = target_probs_JV[num_accepted] * prefix_prob
    if row.draft_probs_KV is not None:
        return weights_V.sub_(row.draft_probs_KV[num_accepted]).clamp_(min=0.0)
    weights_V[row.draft_tokens[num_accepted]] = 0.0  # prefix_prob * target is never above 1
    return weights_V


def draw_residual(row: CheckedRow, num_accepted: int, target_probs_JV: Tensor) -> int:
    """The token in the place of the draft that `rejection` refused: of the residual max(target - draft, 0)."""
    return _draw_residual(row, num_accepted, residual_after(row, num_accepted, target_probs_JV), target_probs_JV)


def _draw_residual(row: CheckedRow, num_accepted: int, weights_V: Tensor, target_probs_JV: Tensor) -> int:
    """A token of the residual; of the target where rounding left nothing of it (both distributions are then the same)."""
    has_mass = float(weights_V.sum()) > 0
    return sample(weights_V if has_mass else target_probs_JV[num_accepted], row.uniforms.residual(num_accepted))


_RULES = (
    Rule("auto", auto, lossless=True, needs_probs=True, draws=True, takes_trees=True),
    Rule("match", match, lossless=True, needs_probs=False, draws=True, takes_trees=True),
    Rule("rejection", rejection, lossless=True, needs_probs=True),
    Rule("block", block, lossless=True, needs_probs=True),
)
RULES = {rule.name: rule for rule in _RULES}
"""Those of `paceline.config.RULES`. A new rule is a function and a line here."""


MOCKED = "mocked"
"""Name of the rule that is made here."""


def mocked(kept: float | Sequence[float] | Marginals) -> Rule:
    """Accepts drafts whatever the target says, never more than were drafted.

    A number: `kept` - 1 drafts of a round on average, in rounds as equal as they can be. A survival curve: at least i
    drafts in a share kept[i - 1] of the rounds, drawn for each row and round by the row's own number, as the simulated
    server does (`simulate/server/server.py`). Marginals: a chain by the curve of each slot's likeliest token; of a tree
    a path that stands by the tree's own gains, so that a round keeps 1 + their sum on average. Whoever grows trees
    grows them by these marginals (`marginals.MockedPlanner`). Raises ConfigError for a number below 1, and for a curve
    that is none.
    """
    if isinstance(kept, Marginals):
        return replace(mocked(kept.survival), takes_trees=True, walk=_walk)
    survives = _drawn(tuple(kept)) if isinstance(kept, Sequence) else _even(kept)

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
