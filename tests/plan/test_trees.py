"""Trees of drafts: the likeliest paths, and what a round says of them."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from paceline.plan.chances import Chances
from paceline.plan.shares import FIRST_NODES, TREE_EVERY, TreeWorth, Want, grown
from paceline.plan.trees import LEAST_GAIN, MOST_NODES, Candidates, Growing, Outcome, Tree, drafter_probs, grow
from paceline.types import Offer


def candidates_of(chances_KM: list[list[float]], most: int = 64) -> Candidates:
    tokens_KM = [[100 * slot + rank for rank in range(len(chances))] for slot, chances in enumerate(chances_KM)]
    return Candidates(tokens_KM, [[math.log(chance) for chance in chances] for chances in chances_KM], most)


def paths_of(tree: Tree) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for parent, rank in zip(tree.parents, tree.ranks, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), rank))
    return paths


def product(chances_KM: list[list[float]], path: tuple[int, ...]) -> float:
    gain = 1.0
    for slot, rank in enumerate(path):
        gain *= chances_KM[slot][rank]
    return gain


@pytest.mark.parametrize("seed", range(20))
def test_the_nodes_are_the_likeliest_of_all_paths(seed: int) -> None:
    source = random.Random(seed)
    chances_KM = [sorted((source.random() for _ in range(3)), reverse=True) for _ in range(4)]
    every = [path for depth in range(1, 5) for path in itertools.product(range(3), repeat=depth)]
    best = sorted((product(chances_KM, path) for path in every), reverse=True)
    for most in (1, 2, 7, 30):
        tree = grow(candidates_of(chances_KM), drafter_probs, most)
        expected = [gain for gain in best[:most] if gain >= LEAST_GAIN]
        assert tree.gains == pytest.approx(expected)
        assert [product(chances_KM, path) for path in paths_of(tree)] == pytest.approx(tree.gains)
        assert len(set(paths_of(tree))) == len(tree.tokens)
        assert all(parent < node for node, parent in enumerate(tree.parents))
        assert tree.tokens == [100 * (len(path) - 1) + path[-1] for path in paths_of(tree)]


def test_one_candidate_a_slot_is_a_chain() -> None:
    chances_KM = [[0.9], [0.8], [0.7]]
    tree = grow(candidates_of(chances_KM), drafter_probs, 10)
    assert tree.parents == [-1, 0, 1] and tree.spine == [0, 1, 2] and tree.depth == 3
    assert tree.gains == pytest.approx([0.9, 0.72, 0.504])


def test_room_in_the_cache_and_an_empty_block_bound_a_tree() -> None:
    chances_KM = [[0.5, 0.4], [0.5, 0.4]]
    assert len(grow(candidates_of(chances_KM, most=3), drafter_probs, 10).tokens) == 3
    assert grow(candidates_of(chances_KM, most=0), drafter_probs, 10).tokens == []
    assert grow(candidates_of([]), drafter_probs, 10).depth == 0


def test_an_outcome_tells_the_spine_from_its_siblings() -> None:
    #   root - 0 (rank 0) - 2 (rank 0) - 4 (rank 1)
    #        \ 1 (rank 1) - 3 (rank 0)
    logprobs = [-0.5, -1.5, -0.6, -0.6, -1.7]
    tree = Tree([5, 6, 7, 7, 8], [-1, -1, 0, 1, 2], [0, 1, 0, 0, 1], [0.5, 0.3, 0.3, 0.2, 0.1], logprobs)
    assert tree.depths == [1, 1, 2, 2, 3] and tree.spine == [0, 2]
    along = Outcome(tree, [0, 2, 4])
    assert along.spine_accepted == 2 and along.siblings() == [(-1.5, False), (-1.7, True)]
    beside = Outcome(tree, [1, 3])
    assert beside.spine_accepted == 0 and beside.siblings() == [(-1.5, True)]
    assert Outcome(tree, []).siblings() == [(-1.5, False)]


def test_siblings_are_believed_as_often_as_they_stood() -> None:
    """A drafter that gives its second token half of its true chance is believed twice as much in the end, and never
    beyond what the first one leaves."""
    chances, source = Chances(1, 0.5), random.Random(1)
    logprobs_KM = [[-0.7, -2.3, -3.0]]  # 0.5, 0.1, 0.05
    tree = grow(Candidates([[1, 2, 3]], logprobs_KM), drafter_probs, 3)
    for _ in range(3000):
        drawn = source.random()
        kept = [0] if drawn < 0.5 else [1] if drawn < 0.7 else [2] if drawn < 0.8 else []
        chances.record_tree(Outcome(tree, kept), [-0.7])
    first, second, third = chances.of_candidates(0, logprobs_KM[0])
    assert (
        first == pytest.approx(0.5, abs=0.05)
        and second == pytest.approx(0.2, abs=0.04)
        and third == pytest.approx(0.1, abs=0.03)
    )
    assert sum(chances.of_candidates(0, [-0.05, -0.1, -0.2])) <= 1.0 + 1e-9


def test_candidates_may_depend_on_the_branch() -> None:
    """Behind token 1 another token is likely than behind token 2."""

    def behind(slot: int, before: int) -> tuple[list[int], list[float]]:
        likely = {1: (11, 0.9), 2: (22, 0.8)}[before]
        return [likely[0], 33], [math.log(likely[1]), math.log(0.05)]

    logprobs = [math.log(0.6), math.log(0.3)]
    tree = grow(Candidates([[1, 2], [11, 33]], [logprobs, [0.0, 0.0]], behind=behind), drafter_probs, 4)
    assert [tree.tokens[node] for node in range(4)] == [1, 11, 2, 22]
    assert tree.parents == [-1, 0, -1, 2]
    assert tree.gains == pytest.approx([0.6, 0.54, 0.3, 0.24])


@pytest.mark.parametrize("seed", range(5))
def test_a_tree_that_grows_in_steps_is_the_tree_grown_at_once(seed: int) -> None:
    source = random.Random(seed)
    chances_KM = [sorted((source.random() for _ in range(4)), reverse=True) for _ in range(5)]
    growing = Growing(candidates_of(chances_KM), drafter_probs)
    for most in (3, 3, 10, 40):
        assert growing.to(most) == grow(candidates_of(chances_KM), drafter_probs, most)
    assert not growing.is_whole
    assert len(growing.to(1000).tokens) == 64 and growing.is_whole, "as many as the cache has room for"


def test_only_trees_that_are_wanted_grow() -> None:
    flat = [[0.45] * 3] * 6  # over 300 nodes that are likely enough
    drafted = [
        Want(place, Offer("block", (0.45,) * 6), growing=Growing(candidates_of(flat, 200), drafter_probs))
        for place in range(2)
    ]
    sizes: list[list[int]] = []

    def share(wants: list[Want]) -> list[int]:
        sizes.append([len(want.gains) for want in wants])
        return [min(sizes[-1][0], 60), 5]

    assert grown(drafted, share) == [60, 5]
    assert sizes == [[FIRST_NODES] * 2, [2 * FIRST_NODES] * 2, [4 * FIRST_NODES] * 2, [MOST_NODES] * 2], (
        "60 of 96 are more than half"
    )
    sizes.clear()
    small = [Want(0, Offer("block", (0.33,)), growing=Growing(candidates_of(flat, 200), drafter_probs))]
    assert grown(small, lambda wants: [len(wants[0].gains) // 2]) == [FIRST_NODES // 2]
    assert grown([Want(0, Offer("chain", (0.9, 0.8)))], lambda wants: [len(wants[0].gains)]) == [2]


def test_trees_are_asked_for_where_they_bring_more_than_their_time() -> None:
    """At 400 tokens a second a row's tree takes 0.08 tokens of time."""
    worth = TreeWorth()
    for _ in range(50):
        assert worth.is_due, "nothing is known yet, or they pay"
        worth.record([0.1, 0.2], rate=400)
    for _ in range(50):
        worth.record([0.0], rate=400)
    assert not worth.is_due
    due = []
    for _ in range(4 * (TREE_EVERY + 1)):
        due.append(worth.is_due)
        worth.record([0.0] if due[-1] else [], rate=400)
    assert sum(due) == 4, "now and then they are tried"
    while not worth.is_due:
        worth.record([], rate=400)
    for _ in range(40):
        worth.record([0.5], rate=400)
    assert worth.is_due, "a machine, or a text, where they pay"
