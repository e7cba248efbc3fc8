"""DFlash 2, DSpark and EAGLE-3 in the engine: plain decoding's text in chains, trees, batches; samples have its
distribution."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from doubles import ByteTokenizer
from engine_runs import run
from sampled_answers import FASTEST, p_value
from tiny_dflash import PROMPT, VOCAB, loud_, needs_native, raw_config, tiny_target
from tiny_dflash2 import network_2, raw_2
from tiny_dspark import network_3, raw_3
from tiny_eagle3 import IDS, drafter_of, loud_network, raw_eagle3

from paceline.draft.dflash.config import DFlashConfig, as_dflash2
from paceline.draft.dflash2.drafter import DFlash2Drafter, DFlash2Network, WalkingDrafter
from paceline.draft.dspark.drafter import DSparkDrafter
from paceline.draft.eagle3.drafter import Eagle3Drafter
from paceline.engine.engine import Engine
from paceline.model.native.decoder import NativeDecoder
from paceline.model.torch.decoder import Decoder
from paceline.model.torch.recorded_pass import GraphDecoder
from paceline.plan.costs import PassCosts
from paceline.plan.planner import AdaptivePlanner, FixedPlanner, Planner
from paceline.types import Batch, SamplingParams, Sequence

pytestmark = pytest.mark.slow

PROMPTS = [PROMPT, PROMPT[:3], PROMPT[4:11], PROMPT[::-1], PROMPT[2:], PROMPT * 2]
"""More than the engine has rows."""
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

PLANNERS: dict[str, Callable[[], Planner]] = {
    "chain": FixedPlanner,
    "short chunks": lambda: FixedPlanner(most_chunk=4),
    "tree": lambda: FixedPlanner(num_nodes=12),
    "adaptive": lambda: AdaptivePlanner(PassCosts([(1, 1e-2), (64, 2e-2)])),
}
CASES = [
    ("chain", "always", Decoder, "greedy"),
    ("tree", "always", Decoder, "greedy"),
    ("chain", "never", Decoder, "greedy"),
    ("chain", "sometimes", Decoder, "greedy, penalised"),
    ("chain", "never", Decoder, "seeded"),
    ("tree", "sometimes", Decoder, "seeded"),
    ("chain", "always", Decoder, "seeded, filtered"),
    ("tree", "its own", Decoder, "greedy, shaped"),
    ("tree", "always", Decoder, "seeded, shaped"),
    ("chain", "sometimes", NativeDecoder, "greedy"),
    ("tree", "sometimes", NativeDecoder, "greedy, penalised"),
    ("tree", "its own", NativeDecoder, "seeded, filtered"),
    ("chain", "sometimes", NativeDecoder, "seeded, shaped"),
]
"""Planner, how often drafts agree with the text, the target, the request: every request with a chain and with a tree,
and every kind of agreement too, not all combinations."""
EAGLES = [
    (planner, "its own", kind, way)
    for kind, way in (
        (Decoder, "seeded, filtered"),
        *((NativeDecoder, way) for way in ("greedy", "greedy, penalised", "seeded")),
    )
    for planner in ("short chunks", "tree", "adaptive")
]


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


def eagle3() -> Eagle3Drafter:
    return drafter_of(loud_network(raw_eagle3(draft_vocab_size=len(IDS))))


SEED = 2
"""Seed of a random DSpark drafter; with this one, some sampled drafts are accepted."""
MADE: dict[str, Any] = {
    "dflash2": (lambda: DFlash2Drafter(network()), lambda: Agreeing2(network())),
    "dspark": (lambda: DSparkDrafter(network_3(raw_3(), SEED)), lambda: AgreeingSpark(network_3(raw_3(), SEED))),
    "eagle3": (eagle3, None),
}
"""By name: a drafter, and one whose drafts can be set."""


def answers(kind: Any, params: SamplingParams, planner: Planner, drafter: Any = None) -> list[Sequence]:
    engine = Engine(tiny_target(num_rows=4, kind=kind), ByteTokenizer(), drafter, planner=planner)
    return run(engine, PROMPTS, params)


@cache
def plain_answers(kind: Any, way: str) -> list[Sequence]:
    return answers(kind, SamplingParams(max_tokens=24, **WAYS[way]), FixedPlanner(0))


@pytest.mark.parametrize(
    ("name", "planner", "agrees", "kind", "way"),
    [
        pytest.param(name, *case, marks=[needs_native] * (NativeDecoder in case))
        for name, cases in (("dflash2", CASES), ("dspark", CASES), ("eagle3", EAGLES))
        for case in cases
    ],
)
def test_the_text_is_plain_decodings(name: str, planner: str, agrees: str, kind: Any, way: str) -> None:
    params = SamplingParams(max_tokens=24, **WAYS[way])
    plain = plain_answers(kind, way)
    drafter = MADE[name][agrees != "its own"]()
    if agrees != "its own":
        drafter.share = {"always": 1.0, "sometimes": 0.6, "never": 0.0}[agrees]
        drafter.texts = {tuple(prompt): seq.tokens for prompt, seq in zip(PROMPTS, plain, strict=True)}
    sequences = answers(kind, params, PLANNERS[planner](), drafter)
    assert [seq.output_ids for seq in sequences] == [seq.output_ids for seq in plain]
    accepted, drafted = (
        sum(getattr(each, name) for seq in sequences for each in seq.rounds) for name in ("num_accepted", "num_drafted")
    )
    assert all(seq.lossless for seq in sequences) and drafted > (100 if planner == "short chunks" else 0)
    if "shaped" in way:
        texts = [bytes(seq.output_ids) for seq in sequences]
        assert not any(word.encode() in answer for word in SHAPED["bad_words"] for answer in texts)
        assert not any({4, 8} & set(answer[: SHAPED["min_tokens"]]) for answer in texts)
    if agrees == "always" and way == "greedy":
        assert accepted == drafted
    elif agrees == "never" and way == "greedy":
        assert accepted == 0
    else:
        assert accepted < drafted or agrees == "always"


SAMPLED = {
    "dflash2": (SamplingParams(temperature=0.7, top_k=3, max_tokens=4), 1 / 8),
    "dspark": (SamplingParams(temperature=0.7, top_k=3, max_tokens=4), 1 / 8),
    "eagle3": (SamplingParams(temperature=0.8, max_tokens=3), 1 / 12),
}
"""By name: a request, and the least accepted drafts an answer with which the test proves something."""


@pytest.mark.parametrize(
    ("rule", "name"), [("block", "dflash2"), ("auto", "dflash2"), ("block", "dspark"), ("block", "eagle3")]
)
def test_sampled_answers_have_the_targets_distribution(rule: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule auto predicts the target's tokens, others draw drafts from the drafter."""
    assert p_value(MADE[name][0](), rule, *SAMPLED[name], monkeypatch) > 0.001


@pytest.mark.parametrize(("name", "chance"), [("dflash2", 1.0 / VOCAB), ("eagle3", 1e-6)])
def test_a_proposal_that_drafts_were_not_drawn_from_would_be_seen(
    name: str, chance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = MADE[name][0]()
    propose = drafter.propose

    def lying(batch: Batch) -> Any:
        block = propose(batch)
        block.probs_B = [None if each is None else torch.full_like(each, chance) for each in block.probs_B]
        return block

    drafter.propose = lying
    assert p_value(drafter, "block", *SAMPLED[name], monkeypatch) < 1e-6


@pytest.mark.parametrize(("temperature", "seed"), [(0.0, None), (1.0, 3)])
def test_trees_of_branches_stand_where_the_target_follows_them(temperature: float, seed: int | None) -> None:
    """The likeliest tokens of each place are drafted side by side: more stands than of chains, and never beyond a
    tree."""
    kept = []
    for nodes in (0, 40):
        params = SamplingParams(max_tokens=40, temperature=temperature, seed=seed, ignore_eos=True)
        rounds = [
            each for seq in answers(FASTEST, params, FixedPlanner(num_nodes=nodes), eagle3()) for each in seq.rounds
        ]
        kept.append(sum(each.num_accepted for each in rounds) / len(rounds))
        assert max(each.num_accepted for each in rounds) <= 5
    assert kept[1] > 1.5 * kept[0] > 0


def test_the_planner_is_told_that_each_draft_takes_a_step() -> None:
    planner = AdaptivePlanner(PassCosts([(1, 1e-2), (64, 2e-2)]))
    answers(FASTEST, SamplingParams(max_tokens=40, ignore_eos=True), planner, eagle3())
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


def test_sampled_answers_of_rounds_on_the_device_have_the_targets_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer of a few tokens, enumerated."""
    params = SamplingParams(temperature=0.7, top_k=3, max_tokens=4)
    drafter, options = DFlash2Drafter(network_2(raw_2(block_size=4))), {"kind": GraphDecoder, "num_samples": 160}
    assert p_value(drafter, "auto", params, 1 / 8, monkeypatch, device_rounds=True, **options) > 0.001
