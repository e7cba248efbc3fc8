"""Marginals: what a round says beside a drafter's candidates, what trees keep by it, and rounds that are mocked by
them."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest
from doubles import ByteTokenizer, FakeTarget, TreeDrafter
from engine_runs import run
from simulated_rounds import FLAT

from paceline.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.round import RuleJudge
from paceline.errors import ConfigError
from paceline.plan import marginals as module
from paceline.plan.marginals import Marginals, MockedPlanner, Tally, path_that_stands
from paceline.plan.planner import AdaptivePlanner, FixedPlanner
from paceline.plan.trees import NONE_OF_THEM, Candidates, TargetRanks, grow, target_ranks
from paceline.types import SamplingParams, Sequence
from paceline.verify.rules import MOCKED, mocked

THREE = Marginals(((0.7, 0.12, 0.05), (0.6, 0.2, 0.05), (0.65, 0.1, 0.05)))


def test_what_a_round_says_beside_the_candidates() -> None:
    candidates = Candidates([[5, 6, 7], [8, 9, 3], [4, 2, 1]], [[0.0] * 3] * 3)
    assert target_ranks(candidates, [6]) == TargetRanks(0, 1)
    assert target_ranks(candidates, [5, 3]) == TargetRanks(1, 2)
    assert target_ranks(candidates, [5, 8, 99]) == TargetRanks(2, NONE_OF_THEM)
    assert target_ranks(candidates, [5, 8]) == TargetRanks(2, None), "the answer ended"
    assert target_ranks(candidates, [5, 8, 4, 77]) == TargetRanks(3, None), "the whole block stood"
    assert target_ranks(Candidates([], []), [5]) == TargetRanks(0, None)


def test_candidates_that_depend_on_the_token_before() -> None:
    candidates = Candidates(
        [[1, 2], [0, 0]], [[0.0] * 2] * 2, behind=lambda slot, before: ([10 * before, 7], [0.0, -1.0])
    )
    assert target_ranks(candidates, [1, 10, 5]) == TargetRanks(2, None)
    assert target_ranks(candidates, [1, 7]) == TargetRanks(1, 1)


def test_counts_become_chances() -> None:
    tally = Tally()
    for observed, times in (
        (TargetRanks(2, None), 400),
        (TargetRanks(1, 1), 100),
        (TargetRanks(0, 1), 300),
        (TargetRanks(0, NONE_OF_THEM), 200),
    ):
        for _ in range(times):
            tally.add(observed)
    assert tally.tried == [1000, 500] and tally.stood == [[500, 300], [400, 100]] and tally.num_rounds == 1000
    marginals = Marginals.of(tally)
    assert marginals.num_rounds == 1000 and len(marginals.chances_KM) == 2
    assert marginals.chances_KM[0] == pytest.approx((0.5, 0.3), abs=0.01)
    assert marginals.chances_KM[1] == pytest.approx((0.8, 0.2), abs=0.02)
    assert Tally.of({"tried": tally.tried, "stood": tally.stood}) == tally


def test_a_slot_that_few_rounds_reached_leans_on_the_others() -> None:
    marginals = Marginals.of(Tally([1000, 2], [[800, 100], [0, 0, 2]]))
    assert 0.6 < marginals.chances_KM[1][0] < 0.8, "two rounds do not say that it never stands"
    assert marginals.chances_KM[1][2] > marginals.chances_KM[0][2]
    assert all(sum(own) <= 1 for own in marginals.chances_KM)


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        [],
        {},
        {"tried": [], "stood": []},
        {"tried": [2], "stood": [[3]]},
        {"tried": [2], "stood": [[1], [1]]},
        {"tried": [2], "stood": [[-1]]},
        {"tried": [2.5], "stood": [[1]]},
        {"tried": [2], "stood": [["1"]]},
    ],
)
def test_what_is_no_count_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="--speculate tree:32"):
        Tally.of(wrong)


@pytest.mark.parametrize("wrong", [(), ((),), ((0.7, 0.4),), ((1.1,),), ((-0.1,),), ((math.nan,),)])
def test_what_is_no_chance_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="marginals"):
        Marginals(wrong)


def test_one_candidate_a_slot_is_a_chain() -> None:
    """The chances of a round differ, and so do the trees; their mean is the survival curve's."""
    chain = Marginals(((0.7,), (0.6,), (0.65,)))
    expected = chain.expected(5)
    assert chain.survival == pytest.approx((0.7, 0.42, 0.273))
    for count in range(4):
        assert expected[count].tokens == pytest.approx(1 + sum(chain.survival[:count]), rel=0.02)
    assert expected[5] == expected[3] and 2 < expected[3].depth <= 3


@pytest.mark.slow
def test_more_drafts_bring_more_and_the_same_seed_the_same() -> None:
    curve = THREE.expected(20)
    gains = [after.tokens - before.tokens for before, after in itertools.pairwise(curve)]
    assert curve[0] == (1.0, 0.0) and all(gain >= 0 for gain in gains)
    assert all(after <= before + 1e-9 for before, after in itertools.pairwise(gains)), "the best come first"
    assert curve == THREE.expected(20) and curve[8] == THREE.expected(8)[8]
    assert (
        THREE.expected(8)[8].tokens > Marginals(tuple(own[:1] for own in THREE.chances_KM)).expected(8)[8].tokens + 0.2
    )


@pytest.mark.slow
def test_a_drafter_that_is_always_as_sure_grows_one_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONCENTRATION", 1e6)
    fixed = THREE.expected(6)[6].tokens
    names = [list(range(3))] * 3
    one = grow(Candidates(names, [[0.0] * 3] * 3), lambda slot, _: list(THREE.chances_KM[slot]), 6)
    assert fixed == pytest.approx(1 + sum(one.gains), rel=0.003)


def test_other_chances_of_the_likeliest_keep_the_shares_of_the_rest() -> None:
    changed = THREE.with_firsts([0.9, 0.5])
    assert changed.firsts == [0.9, 0.5]
    (_, *one), (_, *other) = changed.chances_KM
    assert [5 * each for each in one] == pytest.approx(other)
    assert sum(one) == pytest.approx(0.1 * (0.17 + 0.25 + 0.15) / (0.3 + 0.4 + 0.35))
    assert Marginals(((1.0,),)).with_firsts([0.4]).chances_KM == ((0.4,),)


@pytest.mark.slow
def test_a_path_stands_by_its_gains() -> None:
    tree = grow(Candidates([[0, 1, 2]] * 3, [[0.0] * 3] * 3), lambda slot, _: list(THREE.chances_KM[slot]), 12)
    luck, counts, rounds = random.Random(3), [0] * 12, 40_000
    for _ in range(rounds):
        kept = path_that_stands(tree.parents, tree.gains, [luck.random() for _ in range(tree.depth)])
        assert [tree.parents[node] for node in kept] == [-1, *kept][: len(kept)]
        for node in kept:
            counts[node] += 1
    assert [count / rounds for count in counts] == pytest.approx(tree.gains, abs=0.01)
    assert path_that_stands([], [], []) == [] and path_that_stands(tree.parents, tree.gains, [0.0] * 3)[0] == 0


def mocked_answers(
    planner: FixedPlanner, way: dict[str, Any], num_answers: int = 12, accuracy: float = 0.0
) -> list[Sequence]:
    """Whatever the drafter and the target say: the drafter never names the target's token."""
    target = FakeTarget(vocab_size=24, num_rows=4, max_len=256)
    drafter = TreeDrafter(target, num_drafted=4, width=3, accuracy=accuracy, tap_layers=(0, 2))
    engine = Engine(target, ByteTokenizer(), drafter, judge=RuleJudge(mocked(THREE)), planner=planner)
    params = [SamplingParams(seed=seed, max_tokens=120, ignore_eos=True, **way) for seed in range(num_answers)]
    return run(engine, [[seed % 20 + 1, 3] for seed in range(num_answers)], params)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_nodes", "way"), [(2, {"temperature": 1.0, "presence_penalty": 0.4}), (8, {})], ids=["sampled", "greedy"]
)
def test_mocked_trees_keep_what_marginals_make_expected(num_nodes: int, way: dict[str, Any]) -> None:
    done = mocked_answers(MockedPlanner(num_nodes=num_nodes, marginals=THREE), way)
    whole = [each for seq in done for each in seq.rounds[:-3]]  # the last rounds end with the answer
    kept = 1 + sum(each.num_accepted for each in whole) / len(whole)
    assert kept == pytest.approx(THREE.expected(num_nodes)[num_nodes].tokens, rel=0.04)
    assert not any(seq.lossless for seq in done)


@pytest.mark.slow
def test_mocked_trees_keep_more_than_mocked_chains() -> None:
    chain, tree = (
        sum(len(seq.rounds) for seq in mocked_answers(planner, {}, num_answers=6))
        for planner in (FixedPlanner(), MockedPlanner(num_nodes=12, marginals=THREE))
    )
    assert (
        chain / tree == pytest.approx(THREE.expected(12)[12].tokens / (1 + sum(THREE.survival)), rel=0.06)
        and chain > tree
    )


def test_of_a_mocked_round_nothing_is_learned() -> None:
    target = FakeTarget(vocab_size=24, num_rows=1, max_len=64)
    engine = Engine(
        target,
        ByteTokenizer(),
        TreeDrafter(target),
        judge=RuleJudge(mocked(THREE)),
        planner=MockedPlanner(num_nodes=6, marginals=THREE),
    )
    engine.add([1, 2], SamplingParams(max_tokens=30, ignore_eos=True))
    while engine.has_work:
        engine.step()
        assert all(each.target_ranks_B is None and not each.lossless for each in engine.rounds)


@pytest.mark.slow
@pytest.mark.parametrize("planner", [FixedPlanner(num_named=3), FixedPlanner(num_nodes=9)], ids=["chains", "trees"])
def test_rounds_tell_what_the_target_said(planner: FixedPlanner) -> None:
    """The drafter names the target's token among three with chance 0.9, at any rank: each rank stands as often."""
    target = FakeTarget(vocab_size=64, num_rows=4, max_len=256)
    engine = Engine(target, ByteTokenizer(), TreeDrafter(target, accuracy=0.9, tap_layers=(1,)), planner=planner)
    tally = Tally()
    for seed in range(24):
        engine.add([seed, 5], SamplingParams(max_tokens=60, ignore_eos=True, seed=seed))
    while engine.has_work:
        engine.step()
        for stats in engine.rounds:
            for observed in stats.target_ranks_B or ():
                if observed:
                    tally.add(observed)
    marginals = Marginals.of(tally)
    assert marginals.num_rounds > 300
    assert marginals.chances_KM[0][:3] == pytest.approx([0.3, 0.3, 0.3], abs=0.06)
    assert marginals.firsts == pytest.approx([0.3] * len(marginals.firsts), abs=0.15)


def test_a_planner_that_measures_nothing_is_not_told() -> None:
    target = FakeTarget(vocab_size=64, num_rows=1, max_len=256)
    engine = Engine(
        target, ByteTokenizer(), TreeDrafter(target, tap_layers=(1,)), planner=AdaptivePlanner(FLAT, grows_trees=True)
    )
    engine.add([3, 5], SamplingParams(max_tokens=30, ignore_eos=True))
    while engine.has_work:
        engine.step()
        assert all(each.target_ranks_B is None for each in engine.rounds)


def test_settings_of_a_mocked_tree() -> None:
    chances = ((0.7, 0.1), (0.6, 0.2))
    config = EngineConfig(mocked_marginals=chances, speculate="tree:8")
    assert (
        config.mocked == Marginals(chances)
        and config.mocked_as == "marginals of 2 draft positions, the most probable token's 0.7, 0.6"
    )
    rule = mocked(Marginals(chances))
    assert rule.name == MOCKED and not rule.lossless and rule.takes_trees and not mocked(3.0).takes_trees
    with pytest.raises(ConfigError, match="exclude each other"):
        replace(config, mocked_survival=(0.5,))
    with pytest.raises(ConfigError, match="mock it by mocked_marginals"):
        EngineConfig(mocked_tokens_per_round=3.0, speculate="tree:8")
    with pytest.raises(ConfigError, match="sum up to 1"):
        EngineConfig(mocked_marginals=((0.9, 0.2),))
