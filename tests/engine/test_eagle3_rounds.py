"""EAGLE-3 in the engine: plain decoding's text, in batches that come and go; sampled answers have its distribution."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from doubles import ByteTokenizer
from engine_runs import run
from sampled_answers import FASTEST, p_value
from tiny_dflash import PROMPT, VOCAB, needs_native, tiny_target
from tiny_eagle3 import IDS, drafter_of, loud_network, raw_eagle3

from paceline.draft.eagle3.drafter import Eagle3Drafter
from paceline.engine.engine import Engine
from paceline.model.native.decoder import NativeDecoder
from paceline.model.torch.decoder import Decoder
from paceline.plan.costs import PassCosts
from paceline.plan.planner import AdaptivePlanner, FixedPlanner, Planner
from paceline.types import SamplingParams, Sequence

pytestmark = pytest.mark.slow

PROMPTS = [PROMPT, PROMPT[:3], PROMPT[4:11], PROMPT[::-1], PROMPT[2:], PROMPT * 2]
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, penalised": {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
    "seeded": {"temperature": 1.0, "seed": 5},
    "seeded, filtered": {"temperature": 0.8, "top_p": 0.9, "top_k": 5, "presence_penalty": 0.5, "seed": 7},
}
CASES = [
    (Decoder, "seeded, filtered"),
    *(pytest.param(NativeDecoder, way, marks=needs_native) for way in ("greedy", "greedy, penalised", "seeded")),
]


def small(**keys: Any) -> Eagle3Drafter:
    return drafter_of(loud_network(raw_eagle3(draft_vocab_size=len(IDS), **keys)))


def answers(kind: Any, params: SamplingParams, planner: Planner, drafter: Any = None) -> list[Sequence]:
    engine = Engine(tiny_target(num_rows=4, kind=kind), ByteTokenizer(), drafter, planner=planner)
    return run(engine, PROMPTS, params)


@pytest.mark.parametrize(("kind", "way"), CASES)
def test_the_text_is_plain_decodings(kind: Any, way: str) -> None:
    params = SamplingParams(max_tokens=20, **WAYS[way])
    plain, drafted = answers(kind, params, FixedPlanner(0)), list[int]()
    for planner in (
        FixedPlanner(most_chunk=4),
        FixedPlanner(num_nodes=12),
        AdaptivePlanner(PassCosts([(1, 1e-2), (64, 2e-2)])),
    ):
        sequences = answers(kind, params, planner, small())
        assert [seq.output_ids for seq in sequences] == [seq.output_ids for seq in plain]
        assert all(seq.lossless for seq in sequences)
        drafted.append(sum(each.num_drafted for seq in sequences for each in seq.rounds))
    assert drafted[0] > 100


@pytest.mark.parametrize(("temperature", "seed"), [(0.0, None), (1.0, 3)])
def test_trees_of_branches_stand_where_the_target_follows_them(temperature: float, seed: int | None) -> None:
    """The likeliest tokens of each place are drafted side by side: more stands than of chains, and never beyond a
    tree."""
    kept = []
    for nodes in (0, 40):
        params = SamplingParams(max_tokens=40, temperature=temperature, seed=seed, ignore_eos=True)
        rounds = [
            each for seq in answers(FASTEST, params, FixedPlanner(num_nodes=nodes), small()) for each in seq.rounds
        ]
        kept.append(sum(each.num_accepted for each in rounds) / len(rounds))
        assert max(each.num_accepted for each in rounds) <= 5
    assert kept[1] > 1.5 * kept[0] > 0


def test_the_planner_is_told_that_each_draft_takes_a_step() -> None:
    planner = AdaptivePlanner(PassCosts([(1, 1e-2), (64, 2e-2)]))
    answers(FASTEST, SamplingParams(max_tokens=40, ignore_eos=True), planner, small())
    assert planner.offer("eagle3", "greedy", 5, is_stepwise=True).each_s > 1e-6, "its drafting was measured"
    assert planner._stepwise == {"eagle3"} and not planner._blocks


class Recording(Eagle3Drafter):
    drafts: dict[tuple[int, ...], list[int]]

    def propose(self, batch: Any) -> Any:
        block = super().propose(batch)
        self.drafts |= {
            tuple(seq.tokens): tokens for seq, tokens in zip(batch.sequences, block.tokens_B, strict=True) if tokens
        }
        return block


def conversations(engine: Engine) -> dict[int, list[int]]:
    """Turns of conversations over few rows, shared beginnings, and requests that are cancelled in the middle."""
    luck, texts, prompts = random.Random(3), dict[int, list[int]](), list[list[int]]()
    base = [luck.randrange(VOCAB) for _ in range(40)]

    def step() -> None:
        for chunk in engine.step():
            texts.setdefault(chunk.sequence.request_id, []).extend(chunk.token_ids)
        engine.check_integrity()

    for _ in range(14):
        start = luck.choice([base, base[:25], *prompts[-2:]])
        prompts.append(
            [
                *start[: luck.randrange(20, len(start) + 1)],
                *(luck.randrange(VOCAB) for _ in range(luck.randrange(1, 5))),
            ]
        )
        engine.add(prompts[-1], SamplingParams(max_tokens=8))
        unwanted = engine.add([*prompts[-1], 1], SamplingParams(max_tokens=40))
        step()
        step()
        engine.abort(unwanted)
        texts.pop(unwanted, None)
        for _ in range(luck.randrange(6)):
            step()
    while engine.has_work:
        step()
    return texts


@needs_native
def test_rows_that_share_beginnings_and_are_cancelled_draft_as_fresh_ones() -> None:
    """Text and drafts: what a sequence takes over is what it would have computed."""
    runs = []
    for reuses in (True, False):
        drafter = Recording(loud_network(raw_eagle3(draft_vocab_size=len(IDS))), ids=IDS, num_drafted=3)
        drafter.drafts = {}
        target = tiny_target(num_rows=3, kind=NativeDecoder)
        engine = Engine(target, ByteTokenizer(), drafter, prefill_chunk=16)
        engine.prefix = engine.prefix if reuses else None
        texts = conversations(engine)
        assert not reuses or (engine.prefix is not None and engine.prefix.num_reused > 100)
        assert target.cache.num_free == 3
        runs.append((texts, drafter.drafts))
    assert runs[0][0] == runs[1][0]
    common = runs[0][1].keys() & runs[1][1].keys()
    assert len(common) > 40
    for text in common:
        length = min(len(runs[0][1][text]), len(runs[1][1][text]))
        assert runs[0][1][text][:length] == runs[1][1][text][:length]


SAMPLED = SamplingParams(temperature=0.8, max_tokens=3)


def test_sampled_answers_have_the_targets_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    assert p_value(small(), "block", SAMPLED, 1 / 12, monkeypatch) > 0.001


def test_a_proposal_that_drafts_were_not_drawn_from_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lying(Eagle3Drafter):
        def propose(self, batch: Any) -> Any:
            block = super().propose(batch)
            block.probs_B = [None if each is None else torch.full_like(each, 1e-6) for each in block.probs_B]
            return block

    network = loud_network(raw_eagle3(draft_vocab_size=len(IDS)))
    assert p_value(Lying(network, ids=IDS), "block", SAMPLED, 1 / 12, monkeypatch) < 1e-6
