"""DFlash 2 and DSpark in the engine: plain decoding's text in chains, trees, batches; samples have its distribution."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from doubles import ByteTokenizer
from engine_runs import run
from sampled_answers import p_value
from tiny_dflash import PROMPT, VOCAB, loud_, needs_native, raw_config, tiny_target
from tiny_dspark import network_3, raw_3

from paceline.draft.dflash.config import DFlashConfig, as_dflash2
from paceline.draft.dflash2.drafter import DFlash2Drafter, DFlash2Network, WalkingDrafter
from paceline.draft.dflash2.selector import WalkedReading
from paceline.draft.dspark.drafter import DSparkDrafter
from paceline.engine.engine import Engine
from paceline.model.native.decoder import NativeDecoder
from paceline.model.torch.decoder import Decoder
from paceline.plan.planner import FixedPlanner
from paceline.types import Batch, SamplingParams, Sequence

pytestmark = pytest.mark.slow

PROMPTS = [PROMPT, PROMPT[:3], PROMPT[4:11], PROMPT[::-1]]
PAIRS_OF_TOKENS = [chr(token) + chr((token + step) % VOCAB) for token in range(VOCAB) for step in (0, 1, 4)]
SHAPED: dict[str, Any] = {
    "min_tokens": 9,
    "stop_token_ids": (4, 8),
    "bad_words": ("\x05", "\x07\x02\x06", *PAIRS_OF_TOKENS),
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, penalised": {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
    "seeded": {"temperature": 1.0, "seed": 5},
    "seeded, filtered": {"temperature": 0.8, "top_p": 0.9, "top_k": 5, "presence_penalty": 0.5, "seed": 7},
    "greedy, shaped": SHAPED,
    "seeded, shaped": {**SHAPED, "temperature": 1.0, "seed": 11},
}


CASES = [
    (0, "always", Decoder, "greedy"),
    (12, "always", Decoder, "greedy"),
    (0, "never", Decoder, "greedy"),
    (0, "sometimes", Decoder, "greedy, penalised"),
    (0, "never", Decoder, "seeded"),
    (12, "sometimes", Decoder, "seeded"),
    (0, "always", Decoder, "seeded, filtered"),
    (12, "its own", Decoder, "greedy, shaped"),
    (12, "always", Decoder, "seeded, shaped"),
    pytest.param(0, "sometimes", NativeDecoder, "greedy", marks=needs_native),
    pytest.param(12, "sometimes", NativeDecoder, "greedy, penalised", marks=needs_native),
    pytest.param(12, "its own", NativeDecoder, "seeded, filtered", marks=needs_native),
    pytest.param(0, "sometimes", NativeDecoder, "seeded, shaped", marks=needs_native),
]
"""Nodes of a tree (0: a chain), how often drafts agree with the text, the target, the request: every request with a
chain and with a tree, and every kind of agreement too, not all combinations."""


class Agreeing(WalkingDrafter):
    """Says what the texts say, at a share of the places; at the others what they do not say. The pass is the drafter's
    own."""

    texts: dict[tuple[int, ...], list[int]]
    """By prompt."""
    share = 1.0

    def propose(self, batch: Batch) -> Any:
        self.told = {seq.row: self.texts[tuple(seq.tokens[: seq.prompt_len])] for seq in batch.sequences}
        return super().propose(batch)

    def _make_path(self, target: Any) -> Any:
        path = super()._make_path(target)
        read = path.read

        def agreeing(rows: list[int], anchors: list[int], width: int, size: int) -> Any:
            hidden, logits = read(rows, anchors, width, size)
            for index, row in enumerate(rows):
                at = path.cache.lengths[row] + 1
                for slot, token in enumerate(self.told[row][at : at + width]):
                    is_wrong = random.Random(31 * at + slot).random() >= self.share
                    logits[index, slot, (token + is_wrong) % VOCAB] += 1e4
            return hidden, logits

        path.read = agreeing
        return path


class Agreeing2(Agreeing, DFlash2Drafter):
    pass


class AgreeingSpark(Agreeing, DSparkDrafter):
    pass


def network() -> DFlash2Network:
    built = DFlash2Network.random(DFlashConfig.from_json(as_dflash2(raw_config(), rank=5, top_k=6)))
    loud_(built)
    return built


SEED = 2
"""Seed of a random DSpark drafter; with this one, some sampled drafts are accepted."""
MADE: dict[str, Any] = {
    "dflash2": (lambda: DFlash2Drafter(network()), lambda: Agreeing2(network())),
    "dspark": (lambda: DSparkDrafter(network_3(raw_3(), SEED)), lambda: AgreeingSpark(network_3(raw_3(), SEED))),
}
"""By name: a drafter, and one that can be told what to say."""


def answers(kind: Any, params: SamplingParams, planner: FixedPlanner, drafter: Any = None) -> list[Sequence]:
    engine = Engine(tiny_target(num_rows=4, kind=kind), ByteTokenizer(), drafter, planner=planner)
    return run(engine, PROMPTS, params)


@cache
def plain_answers(kind: Any, way: str) -> list[Sequence]:
    return answers(kind, SamplingParams(max_tokens=24, **WAYS[way]), FixedPlanner(0))


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize(("num_nodes", "agrees", "kind", "way"), CASES)
def test_the_text_is_plain_decodings(name: str, num_nodes: int, agrees: str, kind: Any, way: str) -> None:
    params = SamplingParams(max_tokens=24, **WAYS[way])
    plain = plain_answers(kind, way)
    drafter = MADE[name][agrees != "its own"]()
    if agrees != "its own":
        drafter.share = {"always": 1.0, "sometimes": 0.6, "never": 0.0}[agrees]
        drafter.texts = {tuple(prompt): seq.tokens for prompt, seq in zip(PROMPTS, plain, strict=True)}
    sequences = answers(kind, params, FixedPlanner(num_nodes=num_nodes), drafter)
    assert [seq.output_ids for seq in sequences] == [seq.output_ids for seq in plain]
    accepted, drafted = (
        sum(getattr(each, name) for seq in sequences for each in seq.rounds) for name in ("num_accepted", "num_drafted")
    )
    assert drafted > 0 and all(seq.lossless for seq in sequences)
    if "shaped" in way:
        texts = [bytes(seq.output_ids) for seq in sequences]
        assert not any(word.encode() in answer for word in SHAPED["bad_words"] for answer in texts)
        assert not any({4, 8} & set(answer[: SHAPED["min_tokens"]]) for answer in texts)
    if agrees == "always" and way == "greedy":
        assert accepted == drafted
    elif agrees == "never" and way == "greedy" and not num_nodes:
        assert accepted == 0
    else:
        assert accepted < drafted or agrees == "always"


SAMPLED = SamplingParams(temperature=0.7, top_k=3, max_tokens=4)


def p_of(rule: str, monkeypatch: pytest.MonkeyPatch, name: str = "dflash2") -> float:
    """Returns the p-value of sampled answers; the rule auto guesses the drafts, others draw them from the drafter."""
    return p_value(MADE[name][0](), rule, SAMPLED, 1 / 8, monkeypatch)


@pytest.mark.parametrize(("rule", "name"), [("block", "dflash2"), ("auto", "dflash2"), ("block", "dspark")])
def test_sampled_answers_have_the_targets_distribution(rule: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert p_of(rule, monkeypatch, name) > 0.001


def test_a_proposal_that_drafts_were_not_drawn_from_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = WalkedReading.drawn

    def wrong(self: WalkedReading, slot: int, limit: int, seq: Sequence) -> Any:
        tokens, probs_KV, sure = drawn(self, slot, limit, seq)
        return tokens, None if probs_KV is None else torch.full_like(probs_KV, 1.0 / VOCAB), sure

    monkeypatch.setattr(WalkedReading, "drawn", wrong)
    assert p_of("block", monkeypatch) < 1e-6
