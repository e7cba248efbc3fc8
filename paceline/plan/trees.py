"""Draft trees: several continuations of a text that one target pass verifies. Imports no PyTorch.

A slot is a draft position, from 0. A block drafter returns the most probable tokens of each slot, whatever the other
slots hold; a drafter that reads its own drafts returns them for each path that it tried. A tree is built best first:
the next node is always the most probable continuation (DDTree, 2604.12989, section 3; EAGLE-2, 2406.16858, section
4.2), so the tree has the paths with the largest products of probabilities. The target samples its own token after each
node, with the noise of that position. The path that these tokens follow is accepted: the text equals plain decoding's,
whatever the tree.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

MOST_NODES = 128
"""Maximum nodes of one row's tree."""
LEAST_GAIN = 0.005
"""Minimum chance of a tree node to be accepted; less probable nodes are not in the tree."""
NONE_OF_THEM = -1
"""Rank that is reported for a token that is not among a slot's candidates."""
Likely = tuple[list[int], list[float]]
"""The top tokens of one slot (draft position), most probable first, and their log-probabilities."""


@dataclass(slots=True)
class Candidates:
    """Most probable tokens of a drafter at each of K slots (draft positions), M per slot, from which a draft tree is
    built."""

    tokens_KM: list[list[int]]
    """Token ids. If candidates depend on earlier drafts: those after the top tokens of all earlier slots."""
    logprobs_KM: list[list[float]]
    most: int = MOST_NODES
    """Maximum nodes of the tree: the smallest of 128 (MOST_NODES), the free positions in the row's cache, and the
    request's `max_drafted`."""
    behind: Callable[[int, int], Likely] | None = None
    """Function (slot, token drafted at the previous slot) -> candidates, if they depend on that token."""
    branches: dict[tuple[int, ...], Likely] | None = None
    """For a drafter that drafts token by token: path of drafted tokens -> candidates of the next slot. A path that is
    not a key has no candidates."""

    def at(self, path: Sequence[int]) -> Likely:
        """Returns (token ids, log-probabilities) of the candidates at the slot that follows the drafted tokens
        `path`."""
        if self.branches is not None:
            return self.branches.get(tuple(path), ([], []))
        slot = len(path)
        if self.behind is None or not slot:
            return self.tokens_KM[slot], self.logprobs_KM[slot]
        return self.behind(slot, path[-1])


@dataclass(slots=True)
class Tree:
    """A draft tree. Parents come before their children, so the first n nodes are a tree too, for any n."""

    tokens: list[int]
    parents: list[int]
    """Index of each node's parent; -1 for nodes that follow the anchor (the last committed token)."""
    ranks: list[int]
    """Rank of each node among its slot's candidates; 0 is the most probable."""
    gains: list[float]
    """Chance that a node and all nodes above it on its path are accepted: the expected tokens that it adds."""
    logprobs: list[float]
    """Log-probability of each node in the drafter, given its parent."""

    def first(self, count: int) -> Tree:
        """Returns the tree that consists of the first `count` nodes, as a copy."""
        tokens, parents, ranks = self.tokens[:count], self.parents[:count], self.ranks[:count]
        return Tree(tokens, parents, ranks, self.gains[:count], self.logprobs[:count])

    @property
    def depths(self) -> list[int]:
        """Depth of each node; nodes that follow the last committed token have depth 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    @property
    def depth(self) -> int:
        """Number of nodes on the longest path."""
        return max(self.depths, default=0)

    def path(self, node: int) -> list[int]:
        """Returns the tokens on the path from the first slot to this node; empty for node -1 (the last committed
        token)."""
        tokens: list[int] = []
        while node >= 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    @property
    def spine(self) -> list[int]:
        """Indices of the nodes on the path of top tokens: the most probable token of the first slot, then the most
        probable one after it, and so on until the tree ends."""
        spine = [-1]
        for node, (parent, rank) in enumerate(zip(self.parents, self.ranks, strict=True)):
            if rank == 0 and parent == spine[-1]:
                spine.append(node)
        return spine[1:]

    def children(self) -> dict[tuple[int, int], int]:
        """Returns a lookup table of the nodes: (index of the parent or -1, token id) -> index of the node."""
        return {
            (parent, token): node for node, (parent, token) in enumerate(zip(self.parents, self.tokens, strict=True))
        }


Weigh = Callable[[int, list[float]], list[float]]
"""Function (slot, log-probabilities of its candidates) -> acceptance chance of each if all earlier drafts are accepted,
non-increasing."""


def drafter_probs(slot: int, logprobs: list[float]) -> list[float]:
    """Returns the drafter's own probabilities, exp(logprobs), as estimates of the acceptance chances. To be passed to
    `grow` as `weigh`; `slot` is ignored."""
    return [math.exp(logprob) for logprob in logprobs]


class Growing:
    """A draft tree that grows node by node, each time by the candidate most likely to be accepted."""

    def __init__(self, candidates: Candidates, weigh: Weigh) -> None:
        self.tree = Tree([], [], [], [], [])
        self._candidates, self._weigh = candidates, weigh
        self._known: dict[tuple[int, int], tuple[list[int], list[float], list[float]]] = {}
        self._frontier: list[tuple[float, int, int, int, float]] = []
        """Heap of (negative gain of the node, parent, slot, rank, gain of the parent)."""
        self._push(0, 0, -1, 1.0)

    @property
    def is_whole(self) -> bool:
        """True if the tree cannot grow: it has `Candidates.most` nodes, or every further node has a chance below 0.005
        (LEAST_GAIN) to be accepted."""
        return (
            len(self.tree.tokens) >= self._candidates.most or not self._frontier or -self._frontier[0][0] < LEAST_GAIN
        )

    def to(self, most: int) -> Tree:
        """Grows the tree until it has `most` nodes or cannot grow further. Returns `self.tree` itself, not a copy, so
        that later calls change the returned tree."""
        tree = self.tree
        while len(tree.tokens) < most and not self.is_whole:
            negative, parent, slot, rank, parent_gain = heapq.heappop(self._frontier)
            tokens, logprobs, _ = self._at(slot, parent)
            tree.tokens.append(tokens[rank])
            tree.parents.append(parent)
            tree.ranks.append(rank)
            tree.gains.append(-negative)
            tree.logprobs.append(logprobs[rank])
            # The next sibling and the first child: all other candidates are at most as probable as one in the heap.
            self._push(slot, rank + 1, parent, parent_gain)
            self._push(slot + 1, 0, len(tree.tokens) - 1, -negative)
        return tree

    def _at(self, slot: int, parent: int) -> tuple[list[int], list[float], list[float]]:
        """Returns the candidates of a slot after a node, their log-probabilities and chances."""
        candidates = self._candidates
        # Nodes with the same token before them share candidates; without `behind` all nodes of a slot do.
        if candidates.branches is None:
            key = slot, self.tree.tokens[parent] if parent >= 0 and candidates.behind else -1
        else:
            key = slot, parent
        if key not in self._known:
            tokens, logprobs = candidates.at(self.tree.path(parent))
            self._known[key] = tokens, logprobs, self._weigh(slot, logprobs) if tokens else []
        return self._known[key]

    def _push(self, slot: int, rank: int, parent: int, parent_gain: float) -> None:
        """Add the candidate of this rank to the frontier, if there is one."""
        if slot < len(self._candidates.tokens_KM) and rank < len(chances := self._at(slot, parent)[2]):
            # Of equal gains the older parent comes first: the tree is the same in every run.
            heapq.heappush(self._frontier, (-parent_gain * chances[rank], parent, slot, rank, parent_gain))


def grow(candidates: Candidates, weigh: Weigh, most: int) -> Tree:
    """Builds the draft tree of the nodes that are most likely to be accepted, at most `most`. Nodes with a chance below
    0.005 (LEAST_GAIN) are left out.

    `weigh`: function (slot, log-probabilities of the candidates) -> acceptance chance of each candidate if all earlier
    drafts are accepted, such as `drafter_probs`.
    """
    return Growing(candidates, weigh).to(most)


@dataclass(slots=True)
class Outcome:
    """A verified draft tree, and the indices of its accepted nodes: one path that begins after the last committed
    token, empty if no draft was accepted."""

    tree: Tree
    accepted: list[int]

    @property
    def spine_accepted(self) -> int:
        """Number of accepted nodes on the path of top tokens."""
        count = 0
        for node, accepted in zip(self.tree.spine, self.accepted, strict=False):
            if node != accepted:
                break
            count += 1
        return count

    def siblings(self) -> list[tuple[float, bool]]:
        """Returns (log-probability in the drafter, True if accepted) of each tested node that is not its slot's top
        token. A node was tested if its parent was accepted, or if it follows the last committed token."""
        accepted, tree = {-1, *self.accepted}, self.tree
        return [
            (tree.logprobs[node], node in accepted)
            for node, (parent, rank) in enumerate(zip(tree.parents, tree.ranks, strict=True))
            if rank and parent in accepted
        ]


class TargetRanks(NamedTuple):
    """Result of comparing the tokens that the target generated in one round with a drafter's candidates, of which rank
    0 is the most probable one of its slot."""

    num_first: int
    """Number of leading slots at which the target's token was the top candidate."""
    rank: int | None
    """Rank of the target's token at the slot after those. NONE_OF_THEM: not a candidate. None: no token or slot is
    left."""


def target_ranks(candidates: Candidates, tokens: Sequence[int]) -> TargetRanks:
    """Compares the tokens that the target generated in one round with the drafter's candidates: counts the leading
    slots at which the top candidate was right, and finds the rank of the target's token at the slot after them."""
    for slot, token in enumerate(tokens[: len(candidates.tokens_KM)]):
        likely = candidates.at(tokens[:slot])[0]  # never empty: `tokens[:slot]` are top tokens
        if likely[0] != token:
            return TargetRanks(slot, likely.index(token) if token in likely else NONE_OF_THEM)
    return TargetRanks(min(len(tokens), len(candidates.tokens_KM)), None)
