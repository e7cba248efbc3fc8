"""Lossy requests in the engine: lossless values give plain decoding's text, others cost what their ledger says."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from doubles import ByteTokenizer, FakeTarget, ScriptedDrafter, TreeDrafter
from engine_runs import run

from paceline.engine.completion import GenerationStats
from paceline.engine.engine import Engine
from paceline.engine.round import RuleJudge
from paceline.errors import SamplingError
from paceline.lossy import Lossy
from paceline.plan.costs import PassCosts
from paceline.plan.planner import AdaptivePlanner, FixedPlanner, Planner
from paceline.types import GrammarSpec, SamplingParams, Sequence
from paceline.verify.rules import RULES, mocked

PROMPTS = [[1, 2], [3, 1, 4, 1, 5], [9]]
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, penalised": {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
    "sampled": {"temperature": 1.0},
    "filtered": {"temperature": 0.8, "top_p": 0.9, "min_p": 0.02, "top_k": 9},
    "everything": {"temperature": 1.3, "top_p": 0.95, "presence_penalty": 0.5, "logit_bias": {1: 0.6}, "logprobs": 2},
}
SHAPES = {"chain": FixedPlanner(), "tree": FixedPlanner(num_nodes=20)}


def engine_of(
    planner: Planner, *, probs: bool = False, accuracy: float = 0.8, rule: str = "auto", **more: Any
) -> Engine:
    target = FakeTarget(vocab_size=24, sharpness=1.5, num_rows=3, max_len=64)
    kind = ScriptedDrafter if probs else TreeDrafter
    drafter = kind(target, accuracy=accuracy, with_probs=probs, tap_layers=(0, 2))
    more = {"allow_lossy": True} | more
    return Engine(target, ByteTokenizer(), drafter, planner=planner, judge=RuleJudge(RULES[rule]), **more)


def answers(
    engine: Engine, lossy: Any, way: dict[str, Any], num_seeds: int = 3, max_tokens: int = 24
) -> list[Sequence]:
    prompts = [prompt for prompt in PROMPTS for _ in range(num_seeds)]
    params = [
        SamplingParams(seed=seed, max_tokens=max_tokens, lossy=lossy, **way)
        for _ in PROMPTS
        for seed in range(num_seeds)
    ]
    return run(engine, prompts, params)


@cache
def plain_answers(way: str) -> list[Sequence]:
    return answers(engine_of(FixedPlanner(0)), None, WAYS[way], num_seeds=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "way", "name"),
    [
        (list(SHAPES)[(number + place) % 2], way, name)
        for number, name in enumerate(("lenience:1", "threshold:1", "relaxed:n=5,delta=0", "mixture:1"))
        for place, way in enumerate(WAYS)
    ],
)
def test_lossless_values_give_plain_decodings_text(shape: str, way: str, name: str) -> None:
    plain = plain_answers(way)
    sequences = answers(engine_of(SHAPES[shape]), name, WAYS[way], num_seeds=1)
    assert [seq.output_ids for seq in sequences] == [seq.output_ids for seq in plain]
    assert [seq.logprobs for seq in sequences] == [seq.logprobs for seq in plain]
    assert all(seq.lossless for seq in plain)
    assert not any(seq.lossless for seq in sequences), "whoever asked for a lossy rule is told so"
    for seq in sequences:
        assert seq.ledger is not None and len(seq.ledger.sums) == seq.num_output
        assert seq.ledger.spent == (0.0, 0.0, 0)


@pytest.mark.slow
def test_lossless_values_give_rejections_text_for_drawn_drafts() -> None:
    """The same rounds: drafts are drawn from distributions, and refused ones replaced from the residual."""
    sequences = answers(engine_of(FixedPlanner(), probs=True), "lenience:1", WAYS["sampled"])
    expected = answers(engine_of(FixedPlanner(), probs=True, rule="rejection"), None, WAYS["sampled"])
    assert [seq.output_ids for seq in sequences] == [seq.output_ids for seq in expected]
    assert [seq.rounds for seq in sequences] == [seq.rounds for seq in expected]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "way"), [("chain", "sampled"), ("tree", "greedy")])
def test_a_lossy_rule_keeps_more_drafts_and_says_what_it_cost(shape: str, way: str) -> None:
    lossless = answers(engine_of(SHAPES[shape]), None, WAYS[way])
    lossy = answers(engine_of(SHAPES[shape]), "relaxed:n=24,delta=1", WAYS[way])
    assert sum(len(seq.rounds) for seq in lossy) < sum(len(seq.rounds) for seq in lossless)
    changed, num_tokens = 0, 0
    for seq in lossy:
        price = GenerationStats.of(seq).lossy
        assert price is not None and price.rule == "relaxed:n=24,delta=1" and price.max_tv is None
        assert seq.ledger is not None and len(seq.ledger.sums) == seq.num_output
        changed, num_tokens = changed + seq.ledger.spent.num_changed, num_tokens + seq.num_output
        if way == "greedy":
            assert price.mean_tv == price.share_changed
    assert 0 < changed < num_tokens
    assert all(GenerationStats.of(seq).lossy is None for seq in lossless)


@pytest.mark.slow
@pytest.mark.parametrize(("probs", "way"), [(False, "greedy"), (False, "sampled"), (True, "sampled")])
def test_no_part_of_an_answer_exceeds_the_budget(probs: bool, way: str) -> None:
    """Neither the request's own nor the engine's; stop strings and ends of answers cut rounds short."""
    free = answers(engine_of(FixedPlanner(), probs=probs), "lenience:0.05", WAYS[way], num_seeds=2, max_tokens=32)
    spent = max(sums.tv / place for seq in free if seq.ledger for place, sums in enumerate(seq.ledger.sums, 1))
    assert spent > 0.2, "else there is nothing to keep within"
    for own, engines, least in ((None, 0.1, 0.1), (0.5, 0.1, 0.1), (0.1, 0.5, 0.1)):
        rule = "lenience:0.05" + (f",max_tv={own}" if own else "")
        done = answers(
            engine_of(FixedPlanner(), probs=probs, max_tv=engines), rule, WAYS[way], num_seeds=2, max_tokens=32
        )
        for seq in done:
            assert seq.ledger is not None and seq.ledger.max_tv == least and len(seq.ledger.sums) == seq.num_output
            assert all(sums.tv / place <= least for place, sums in enumerate(seq.ledger.sums, 1))
        assert any(seq.ledger and seq.ledger.spent.tv > 0 for seq in done)


def test_rows_beside_a_lossy_one_are_lossless() -> None:
    plain = answers(engine_of(FixedPlanner(0)), None, {}, num_seeds=1)
    mixed = run(
        engine_of(FixedPlanner()),
        PROMPTS,
        [
            SamplingParams(max_tokens=24, seed=0, lossy=Lossy.of("relaxed:n=24,delta=1") if place == 1 else None)
            for place in range(3)
        ],
    )
    assert [seq.lossless for seq in mixed] == [True, False, True]
    for place in (0, 2):
        assert mixed[place].output_ids == plain[place].output_ids


def test_rounds_with_a_lossy_row_say_so_and_planners_learn_apart() -> None:
    planner = AdaptivePlanner(PassCosts([(1, 1e-3), (64, 1.05e-3)]))
    engine = engine_of(planner, accuracy=0.2)
    engine.add([1, 2], SamplingParams(max_tokens=30, lossy=Lossy.of("relaxed:n=24,delta=1")))
    flags = set[bool]()
    while engine.has_work:
        engine.step()
        flags |= {each.lossless for each in engine.rounds}
    assert flags == {False}
    assert {kind for _, kind in planner._chances} <= {"lossy"}


def test_a_grammar_still_holds() -> None:
    target = FakeTarget(vocab_size=258, sharpness=1.5, num_rows=2, max_len=64)
    engine = Engine(
        target, ByteTokenizer(), TreeDrafter(target), planner=FixedPlanner(), eos_token_ids=(257,), allow_lossy=True
    )
    params = SamplingParams(
        max_tokens=20, grammar=GrammarSpec("regex", "[0-9]{3,8}"), lossy=Lossy.of("relaxed:n=258,delta=1")
    )
    [seq] = run(engine, [[1, 2]], params)
    assert bytes(token for token in seq.output_ids if token < 256).decode().isdigit()


def test_it_is_off_unless_allowed() -> None:
    params = SamplingParams(lossy=Lossy.of("lenience:0.5"))
    with pytest.raises(SamplingError, match="allow_lossy"):
        engine_of(FixedPlanner(), allow_lossy=False).add([1], params)
    target = FakeTarget(vocab_size=24)
    engine = Engine(target, ByteTokenizer(), judge=RuleJudge(mocked(2.0)), allow_lossy=True)
    with pytest.raises(SamplingError, match="mocked"):
        engine.add([1], params)
