"""Rounds with trees: the text is plain decoding's, whatever the tree; mistakes on purpose are seen."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from doubles import ByteTokenizer, FakeTarget, TreeDrafter
from engine_runs import run
from torch import Tensor

from paceline.engine import round as decode
from paceline.engine.engine import Engine
from paceline.engine.round import RuleJudge
from paceline.model.target import ForwardBatch
from paceline.plan.costs import PassCosts
from paceline.plan.planner import AdaptivePlanner, FixedPlanner, Planner
from paceline.plan.trees import Tree
from paceline.types import GrammarSpec, SamplingParams, Sequence
from paceline.verify.rules import RULES, Uniforms

PROMPTS = [[1, 2], [3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7]]
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, penalised": {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
    "greedy, biased": {"logit_bias": {3: 2.0, 7: -float("inf")}},
    "sampled": {"temperature": 1.0},
    "filtered": {"temperature": 0.8, "top_p": 0.9, "min_p": 0.02, "top_k": 9},
    "everything": {
        "temperature": 1.3,
        "top_p": 0.95,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.4,
        "logit_bias": {1: 0.6},
    },
    "with logprobs": {"temperature": 1.0, "logprobs": 3},
}
DRAFTERS: dict[str, dict[str, Any]] = {
    "always": {"accuracy": 1.0},
    "sometimes": {"accuracy": 0.7},
    "never": {"accuracy": 0.0},
    "wide": {"accuracy": 0.9, "width": 8, "num_drafted": 6},
}
CASES = [
    *(((1, 6, 40)[number % 3], list(DRAFTERS)[number % 4], way) for number, way in enumerate(WAYS)),
    (1, "always", "everything"),
    (6, "wide", "sampled"),
]
"""Every request, every drafter and every size of trees."""


def answers(planner: Planner, way: dict[str, Any], num_seeds: int = 1, **drafter: Any) -> list[Sequence]:
    """All prompts with some seeds, several rows at a time. An answer of 24 tokens fills its row of the cache."""
    target = FakeTarget(vocab_size=24, sharpness=1.5, num_rows=3, max_len=32)
    draws = TreeDrafter(target, **({"accuracy": 1.0, "tap_layers": (0, 2)} | drafter))
    engine = Engine(target, ByteTokenizer(), draws, planner=planner)
    prompts = [prompt for prompt in PROMPTS for _ in range(num_seeds)]
    params = [SamplingParams(seed=seed, max_tokens=24, **way) for _ in PROMPTS for seed in range(num_seeds)]
    return run(engine, prompts, params)


@cache
def plain(way: str) -> list[Sequence]:
    return answers(FixedPlanner(0), WAYS[way])


def tokens(sequences: list[Sequence]) -> list[list[int]]:
    return [seq.output_ids for seq in sequences]


@pytest.mark.slow
@pytest.mark.parametrize(("num_nodes", "name", "way"), CASES)
def test_the_text_is_plain_decodings(num_nodes: int, name: str, way: str) -> None:
    expected = plain(way)
    sequences = answers(FixedPlanner(num_nodes=num_nodes), WAYS[way], **DRAFTERS[name])
    assert tokens(sequences) == tokens(expected)
    for one, other in zip(sequences, expected, strict=True):
        assert one.logprobs == other.logprobs
        assert one.lossless and len(one.logprobs) in (0, len(one.output_ids))
    accepted = sum(each.num_accepted for seq in sequences for each in seq.rounds)
    assert (accepted == 0) == (name == "never" and way == "greedy") or name == "never" or accepted > 0


def test_max_drafted_limits_the_nodes_of_a_tree() -> None:
    target = FakeTarget(vocab_size=258)
    engine = Engine(target, ByteTokenizer(), TreeDrafter(target, accuracy=0.8), planner=FixedPlanner(num_nodes=16))
    for most in (0, 1, 2, 3):
        target.calls.clear()
        run(engine, [[1, 2, 3]], SamplingParams(max_tokens=20, max_drafted=most))
        assert max(call.num_tokens for call in target.calls[1:]) == 1 + most


@pytest.mark.slow
def test_a_tree_keeps_more_than_its_spine() -> None:
    """The target's token is among three at any rank: one path finds it a third of the time, a tree of them nearly
    always."""
    rounds = {}
    for name, planner in (("chain", FixedPlanner()), ("tree", FixedPlanner(num_nodes=40))):
        done = (
            answers(planner, {}, accuracy=1.0, num_drafted=3)
            if name == "tree"
            else answers(planner, {}, accuracy=1 / 3)
        )
        rounds[name] = sum(len(seq.rounds) for seq in done)
    assert rounds["tree"] * 1.5 < rounds["chain"]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["greedy", "sampled"])
def test_an_adaptive_planner_grows_trees_where_passes_are_cheap(way: str) -> None:
    cheap = AdaptivePlanner(PassCosts([(1, 1e-3), (64, 1.05e-3)]), grows_trees=True)
    narrow, siblings = cheap.narrow, list[bool]()

    def watched(*arguments: Any) -> list[int | Tree]:
        chosen = narrow(*arguments)
        siblings.extend(any(each.ranks) for each in chosen if isinstance(each, Tree))
        return chosen

    cheap.narrow = watched
    sequences = answers(cheap, WAYS[way], accuracy=0.9)
    assert tokens(sequences) == tokens(plain(way))
    assert any(siblings), "chains alone would give this text too"


def test_rows_with_a_grammar_keep_chains_beside_trees() -> None:
    def ask(planner: Planner) -> list[list[int]]:
        target = FakeTarget(vocab_size=258, sharpness=1.5, num_rows=2, max_len=64)
        drafter = TreeDrafter(target, accuracy=0.8)
        engine = Engine(target, ByteTokenizer(), drafter, planner=planner, eos_token_ids=(257,))
        digits = SamplingParams(max_tokens=20, grammar=GrammarSpec("regex", "[0-9]{3,8}"))
        return tokens(run(engine, [[1, 2], [3, 4]], [digits, SamplingParams(max_tokens=20)]))

    assert ask(FixedPlanner(num_nodes=12)) == ask(FixedPlanner(0))


def test_rules_that_weigh_probabilities_and_targets_without_trees_get_chains() -> None:
    for rule, takes in (("auto", True), ("match", True), ("rejection", False), ("block", False)):
        assert RuleJudge(RULES[rule]).takes_trees is takes
    target = FakeTarget(vocab_size=24, num_rows=1)
    target.takes_trees = False
    engine = Engine(target, ByteTokenizer(), TreeDrafter(target), planner=FixedPlanner(num_nodes=8))
    run(engine, [[1, 2]], SamplingParams(max_tokens=9))
    assert all(batch.parents is None for batch in target.calls)


def logits_before(judge: RuleJudge, seq: Sequence, path: list[int], slots: list[int], logits_JV: Tensor) -> int:
    """Wrong: behind a draft it reads the logits of the one before."""
    return decode.race(logits_JV[slots[-2:][0]], seq.params, Uniforms.of(seq).noise(len(path)))


@pytest.mark.slow
def test_a_wrong_draw_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are planted in test_tree_enumeration.py."""
    expected = tokens(plain("sampled"))
    monkeypatch.setattr(RuleJudge, "_draw", logits_before)
    assert tokens(answers(FixedPlanner(num_nodes=12), WAYS["sampled"], accuracy=0.9)) != expected


def test_wrong_ancestors_and_a_path_left_unmoved_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens(plain("greedy"))
    right = decode.verify_input

    def all_follow_the_one_before(*args: Any, **kwargs: Any) -> ForwardBatch:
        batch = right(*args, **kwargs)
        batch.parents = None
        return batch

    with monkeypatch.context() as patch:
        patch.setattr(decode, "verify_input", all_follow_the_one_before)
        assert tokens(answers(FixedPlanner(num_nodes=12), {}, accuracy=0.9, tap_layers=())) != expected
    with monkeypatch.context() as patch:
        patch.setattr("doubles.FakeCache._move", lambda *_: None)
        patch.setattr("doubles.FakeCache.check", lambda *_: None)
        assert tokens(answers(FixedPlanner(num_nodes=12), {}, accuracy=0.9, tap_layers=())) != expected


def test_a_row_whose_logits_are_not_finite_fails_alone() -> None:
    target = FakeTarget(vocab_size=24, num_rows=2)
    sound = target.logits_after
    target.logits_after = lambda tokens: (
        torch.full((24,), float("nan")) if len(tokens) > 8 and 3 in tokens[:1] else sound(tokens)
    )  # pyright: ignore[reportAttributeAccessIssue]
    drafter = TreeDrafter(target, accuracy=0.9)
    target.greedy = lambda tokens, count: [1] * count  # pyright: ignore[reportAttributeAccessIssue]
    engine = Engine(target, ByteTokenizer(), drafter, planner=FixedPlanner(num_nodes=12))
    bad, good = run(engine, [[3, 1], [4, 1]], SamplingParams(max_tokens=12))
    assert bad.finish_reason == "error" and "not finite" in str(bad.error)
    assert good.finish_reason == "length" and len(good.output_ids) == 12
