"""Predicts the speed-up of draft trees from measured marginals: acceptance chances by draft position and candidate
rank.

speed-up(tree of n) = E[tokens of n] * round(0) / round(tree of n), where round(tree of n) = target pass of n + 1
positions + drafting + host. A chain is a draft without branches. A block drafter's pass covers all draft positions and
costs the same for any tree; a drafter that drafts token by token is assumed to need as many passes as the tree is deep.
E[tokens of n] is `Marginals.expected`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import ConfigError
from paceline.plan.marginals import Expected
from paceline.plan.trees import MOST_NODES
from paceline.simulate.costs.rounds import StepCosts
from paceline.simulate.speedup import Load, Prediction

BEST = "best"


@dataclass(frozen=True, slots=True)
class TreePoint:
    """Predicted acceptance length and speed if each sequence gets a draft tree of `nodes` drafts in every round."""

    nodes: int
    tokens_per_round: float
    speedup: float
    tokens_per_s: float | None
    """Tokens per second of all sequences together; None if times have no unit."""
    round_s: float
    over_chain: float
    """Tokens per second relative to the best chain (drafts without branches)."""


@dataclass(frozen=True, slots=True)
class TreePrediction:
    """Predictions of draft trees for one load: of the best tree size, and of the requested sizes. Each prediction
    includes the comparison with the best chain (drafts without branches)."""

    batch: int
    best_nodes: int
    """Drafts of the tree with the highest speed-up, the smallest if several are equal; 0: plain decoding is faster than
    any tree."""
    best: TreePoint
    points: list[TreePoint]
    """Predictions for the requested numbers of drafts."""


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parses numbers of drafts per tree: "8,32" gives (8, 32); "best" gives (), which requests only the best size.
    Raises ConfigError for any other text, and for sizes outside 1 to MOST_NODES."""
    if text.strip() == BEST:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and 1 <= int(part) <= MOST_NODES for part in parts):
        raise ConfigError(
            f"--tree {text!r} is no size of a tree: write {BEST}, 32, or 8,16,32, each between 1 and {MOST_NODES}"
        )
    return tuple(dict.fromkeys(int(part) for part in parts))


def predict_trees(
    costs: StepCosts,
    expected: Sequence[Expected],
    load: Load,
    chain: Prediction,
    sizes: Sequence[int],
    has_unit: bool = True,
) -> TreePrediction:
    """Predicts draft trees of the best size and of the requested `sizes` (numbers of drafts) for one load.
    `expected[n]`: acceptance length and depth (drafts on the longest path) of trees with n drafts. `chain`: prediction
    of chains (drafts without branches) for the same load. `has_unit`: True if costs are in seconds; otherwise tokens
    per second are None."""

    def point(nodes: int) -> TreePoint:
        tokens, depth = expected[nodes]
        draft_s = costs.draft_s(load.batch, max(math.ceil(depth), 1), load.context) if nodes else 0.0
        round_s = costs.verify_s(load.batch, nodes + 1, load.context) + draft_s + costs.host_s
        speedup = tokens * chain.plain_round_s / round_s
        rate = load.batch * tokens / round_s if has_unit else None
        return TreePoint(nodes, tokens, speedup, rate, round_s, speedup / chain.speedup)

    best = max(map(point, range(len(expected))), key=lambda each: (each.speedup, -each.nodes))
    return TreePrediction(load.batch, best.nodes, best, [point(nodes) for nodes in sizes])
