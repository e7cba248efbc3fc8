"""Trees of drafts: several continuations that one pass checks together. No PyTorch.

A block drafter says for every slot which tokens are likely there, whatever the other slots hold; one that reads its own drafts
says it behind each path that it tried. A tree takes the paths that are likeliest to stand, best first: the next node is always
the likeliest of what could follow (DDTree, 2604.12989, section 3; EAGLE-2, 2406.16858, section 4.2; the paths are then those
with the largest products). The target's own token is drawn at each node, with the number of its position, and the path that
these draws follow stands: the text is plain decoding's, whatever the tree.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

MOST_NODES = 128
"""Of one row's tree."""
LEAST_GAIN = 0.005
"""Chance to stand below which a node is left out."""
NONE_OF_THEM = -1
"""Rank of a token that is not among a slot's candidates."""


Likely = tuple[list[int], list[float]]
"""Tokens of a slot, the likeliest first, and their log-probabilities."""


@dataclass(slots=True)
class Candidates:
    """What a drafter holds likely at each of K slots: M tokens, the likeliest first, and their log-probabilities."""

    tokens_KM: list[list[int]]
    """Of a slot where what is likely depends on the slots before it: behind the likeliest tokens of all of them."""
    logprobs_KM: list[list[float]]
    most: int = MOST_NODES
    """Nodes at most: as many as the row's cache has room for."""
    behind: Callable[[int, int], Likely] | None = None
    """What is likely at a slot, counted from 0, behind a token at the slot before it, of a drafter for which that differs."""
    branches: dict[tuple[int, ...], Likely] | None = None
    """What is likely behind each path of drafts, of a drafter that reads them: nothing is known behind other paths."""

    def at(self, path: Sequence[int]) -> Likely:
        """Of the slot behind these tokens of the slots before it."""
        if self.branches is not None:
            return self.branches.get(tuple(path), ([], []))
        slot = len(path)
        if self.behind is None or not slot:
            return self.tokens_KM[slot], self.logprobs_KM[slot]
        return self.behind(slot, path[-1])


@dataclass(slots=True)
class Tree:
    """Nodes in an order in which parents come first, and any first few of them are a tree too."""

    tokens: list[int]
    parents: list[int]
    """Place of each node's parent, -1 of those that follow the anchor."""
    ranks: list[int]
    """Which of its slot's candidates each node is; 0 is the likeliest."""
    gains: list[float]
    """Chance that each stands, all before it included: what it adds to the tokens expected of the round."""
    logprobs: list[float]
    """What its drafter gives each, behind its parent."""

    def first(self, count: int) -> Tree:
        tokens, parents, ranks = self.tokens[:count], self.parents[:count], self.ranks[:count]
        return Tree(tokens, parents, ranks, self.gains[:count], self.logprobs[:count])

    @property
    def depths(self) -> list[int]:
        """How many nodes each path has."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    @property
    def depth(self) -> int:
        """Nodes of the longest path."""
        return max(self.depths, default=0)

    def path(self, node: int) -> list[int]:
        """Tokens from the first slot to this node; none for -1."""
        tokens: list[int] = []
        while node >= 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    @property
    def spine(self) -> list[int]:
        """The path of each slot's likeliest token, as far as it is in the tree."""
        spine = [-1]
        for node, (parent, rank) in enumerate(zip(self.parents, self.ranks, strict=True)):
            if rank == 0 and parent == spine[-1]:
                spine.append(node)
        return spine[1:]

    def children(self) -> dict[tuple[int, int], int]:
        """Node by its parent and its token."""
        return {(parent, token): node for node, (parent, token) in enumerate(zip(self.parents, self.tokens, strict=True))}


Weigh = Callable[[int, list[float]], list[float]]
"""Chances that a slot's candidates stand if what is before it does, told from their log-probabilities; they do not rise."""


def as_told(slot: int, logprobs: list[float]) -> list[float]:
    """The drafter's own probabilities."""
    return [math.exp(logprob) for logprob in logprobs]


class Growing:
    """A tree that grows as far as it is asked to: likeliest nodes first, but none whose chance is below LEAST_GAIN."""

    def __init__(self, candidates: Candidates, weigh: Weigh) -> None:
        self.tree = Tree([], [], [], [], [])
        self._candidates, self._weigh = candidates, weigh
        self._known: dict[tuple[int, int], tuple[list[int], list[float], list[float]]] = {}
        self._waiting: list[tuple[float, int, int, int, float]] = []
        """Chance of the node, negative; its parent, slot and rank; chance of the parent."""
        self._offer(0, 0, -1, 1.0)

    @property
    def is_whole(self) -> bool:
        """Whether it can grow no further."""
        return len(self.tree.tokens) >= self._candidates.most or not self._waiting or -self._waiting[0][0] < LEAST_GAIN

    def to(self, most: int) -> Tree:
        """The tree of the `most` likeliest nodes, or of fewer when it is whole."""
        tree = self.tree
        while len(tree.tokens) < most and not self.is_whole:
            negative, parent, slot, rank, kept = heapq.heappop(self._waiting)
            tokens, logprobs, _ = self._at(slot, parent)
            tree.tokens.append(tokens[rank])
            tree.parents.append(parent)
            tree.ranks.append(rank)
            tree.gains.append(-negative)
            tree.logprobs.append(logprobs[rank])
            self._offer(slot, rank + 1, parent, kept)
            self._offer(slot + 1, 0, len(tree.tokens) - 1, -negative)
        return tree

    def _at(self, slot: int, parent: int) -> tuple[list[int], list[float], list[float]]:
        """Tokens of a slot behind a node, their log-probabilities and chances."""
        candidates = self._candidates
        if candidates.branches is None:
            key = slot, self.tree.tokens[parent] if parent >= 0 and candidates.behind else -1
        else:
            key = slot, parent
        if key not in self._known:
            tokens, logprobs = candidates.at(self.tree.path(parent))
            self._known[key] = tokens, logprobs, self._weigh(slot, logprobs) if tokens else []
        return self._known[key]

    def _offer(self, slot: int, rank: int, parent: int, kept: float) -> None:
        """Let a candidate wait for its turn, if there is one of this rank."""
        if slot < len(self._candidates.tokens_KM) and rank < len(chances := self._at(slot, parent)[2]):
            heapq.heappush(self._waiting, (-kept * chances[rank], parent, slot, rank, kept))


def grow(candidates: Candidates, weigh: Weigh, most: int) -> Tree:
    """The `most` likeliest nodes, but none whose chance is below LEAST_GAIN."""
    return Growing(candidates, weigh).to(most)


@dataclass(slots=True)
class Outcome:
    """What became of a tree: which nodes stood, root to leaf."""

    tree: Tree
    kept: list[int]

    @property
    def spine_kept(self) -> int:
        """Nodes of the spine that stood."""
        count = 0
        for node, kept in zip(self.tree.spine, self.kept, strict=False):
            if node != kept:
                break
            count += 1
        return count

    def siblings(self) -> list[tuple[float, bool]]:
        """Of the nodes behind what stood that are not their slot's likeliest: the log-probability that the drafter gave each,
        and whether it stood."""
        reached, stood, tree = {-1, *self.kept}, set(self.kept), self.tree
        return [
            (tree.logprobs[node], node in stood)
            for node, (parent, rank) in enumerate(zip(tree.parents, tree.ranks, strict=True))
            if rank and parent in reached
        ]


class Said(NamedTuple):
    """What the target said in a round, beside its drafter's candidates."""

    num_first: int
    """Slots, from the first on, at which it said the likeliest token."""
    rank: int | None
    """Which candidate it said at the next slot, NONE_OF_THEM, or None where it said no more or there is no such slot."""


def said_of(candidates: Candidates, tokens: Sequence[int]) -> Said:
    """`tokens`: what the target said behind the anchor, as far as it is known."""
    for slot, token in enumerate(tokens[: len(candidates.tokens_KM)]):
        likely = candidates.at(tokens[:slot])[0]
        if likely[0] != token:
            return Said(slot, likely.index(token) if token in likely else NONE_OF_THEM)
    return Said(min(len(tokens), len(candidates.tokens_KM)), None)
