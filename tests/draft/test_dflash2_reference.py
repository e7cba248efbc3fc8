"""DFlash 2 in rounds against the authors' package: logits, drafts, and the distribution that sampled drafts come of."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from round_loop import admit, generate, ready
from tiny_dflash import KINDS, PROMPT, TARGET_LAYERS, VARIANTS, VOCAB, targets, tiny_target
from tiny_dflash2 import Recording2, network_2, raw_2, reference_of

from paceline.draft.base import NoDrafter
from paceline.draft.dflash.config import DFlashConfig, as_dflash2, new_config
from paceline.draft.dflash2 import selector as dflash2_selector
from paceline.draft.dflash2.drafter import DFlash2Drafter, DFlash2Network
from paceline.draft.dflash2.selector import WalkedReading
from paceline.model.target import head_weight
from paceline.train.config import DrafterShape, LoopConfig, OptimConfig
from paceline.train.documents.dataset import Corpus, Document
from paceline.train.features.hidden_states import OnlineFeatures
from paceline.train.learn.initial_weights import network_for
from paceline.train.learn.loop import Trainer
from paceline.train.learn.losses import Head
from paceline.train.methods.selector import trainable_of
from paceline.types import Batch, SamplingParams

pytestmark = pytest.mark.slow


def reference_rounds(
    raw: dict[str, Any], network: DFlash2Network, model: Any, max_tokens: int, temperature: float
) -> Any:
    """(rounds, all tokens) of the authors' loop; a round: anchor's place, logits, path, candidates, q."""
    authors, reference = reference_of(raw, network)
    rounds, select = [], reference.candidate_selector.select

    def record(hidden: Any, logits: Any, anchors: Any, heat: float) -> Any:
        path, candidates, q = select(hidden, logits, anchors, heat)
        rounds.append((logits[0], path[0].tolist(), candidates[0], None if q is None else q[0]))
        return path, candidates, q

    reference.candidate_selector.select = record
    authors._cuda_time = time.perf_counter
    prompt = torch.tensor([PROMPT])
    output = authors.dflash_generate(
        reference, model, prompt, max_tokens, None, temperature=temperature, return_stats=True
    )
    starts = accumulate(output.acceptance_lengths, initial=len(PROMPT))
    return [(start, *each) for start, each in zip(starts, rounds, strict=False)], output.output_ids[0].tolist()


REFERENCES: dict[tuple[str, int, tuple[float, ...]], Any] = {}
"""The authors' greedy rounds, by config, length and sums of the weights."""
DRAWN: dict[str, Any] = {}
"""The authors' sampled rounds, by variant."""
NAMES = ["full", "full-causal", "one-layer-one-feature", "scaled", "sliding-both-ways"]
"""The others change attention alone, which is DFlash's: test_dflash.py."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_rounds_are_the_references(name: str, kind: Any) -> None:
    model, target = targets(kind=kind)
    raw = raw_2(**VARIANTS[name])
    drafter = assert_same_rounds(raw, network_2(raw), model, target, 16, 6)
    assert selects(drafter), "the test needs a selector that changes drafts"


def selects(drafter: Recording2) -> bool:
    """True if a draft is not the most likely token."""
    greedy = [
        logits.argmax(-1).tolist()[: len(drafts)] for logits, drafts in zip(drafter.logits, drafter.drafts, strict=True)
    ]
    return greedy != drafter.drafts


@pytest.mark.parametrize("kind", KINDS)
def test_medium_shape_as_the_reference(kind: Any) -> None:
    model, target = targets(hidden=192, vocab=40, kind=kind)
    raw = as_dflash2(new_config(192, 40, TARGET_LAYERS, num_layers=5, block_size=16, head_dim=32), rank=24)
    assert_same_rounds(raw, network_2(raw), model, target, 28, 6)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], DFlash2Network]:
    """Weights that a training made, convolution and selector too; free codebooks, as a checkpoint has them."""
    shape = DrafterShape(num_layers=2, block_size=4, num_taps=2, kind="dflash2", selector_rank=6, codebooks="free")
    raw, network = network_for(teacher := tiny_target(), "none", shape, None, 0)
    assert isinstance(network, DFlash2Network)
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, VOCAB, 4).tolist() for _ in range(12)]
    texts = [prompt + generate(tiny_target(), NoDrafter(), [prompt], 24)[0][0] for prompt in prompts]
    texts = [Document(f"{number}@0/0", np.array(text, dtype=np.int32), 4) for number, text in enumerate(texts)]
    features = OnlineFeatures(teacher, texts, network.config.target_layer_ids, False)
    settings = LoopConfig(max_steps=12, blocks_per_step=16, anchors=8, autocast=False, selector_from=0.1)
    settings = replace(settings, optim=OptimConfig(lr=2e-2), serve_share=0.0)
    embedding_VD = teacher.embed(torch.arange(VOCAB)).clone()
    drafter = trainable_of(network, raw)
    folder = tmp_path_factory.mktemp("trained")
    Trainer(
        drafter, Corpus(texts, []), features, embedding_VD, Head(head_weight(teacher)), settings, folder=folder
    ).run()
    fresh = DFlash2Network.random(network.config).state_dict()
    for name in ("layers.0.mlp_conv.kernel_projection.weight", "candidate_selector.successor_codebook"):
        assert (network.state_dict()[name] - fresh[name]).abs().max() > 1e-2, "the test needs parts that learned"
    raw["dflash_config"]["selector_top_k"] = 6  # the package wants as many tokens as candidates
    return raw, DFlash2Network.of(DFlashConfig.from_json(raw), network.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_of_trained_weights_are_the_references(
    kind: Any, trained: tuple[dict[str, Any], DFlash2Network]
) -> None:
    model, target = targets(kind=kind)
    assert_same_rounds(*trained, model, target, 30, 5)


def assert_same_rounds(
    raw: dict[str, Any], network: DFlash2Network, model: Any, target: Any, most: int, least: int
) -> Recording2:
    sums = tuple(float(tensor.double().sum()) for tensor in network.state_dict().values())
    key = json.dumps(raw, sort_keys=True), most, sums
    if key not in REFERENCES:  # the same for a native target
        REFERENCES[key] = reference_rounds(raw, network, model, most, 0.0)
    theirs, tokens = REFERENCES[key]
    drafter = Recording2(network)
    (answer,), _ = generate(target, drafter, [PROMPT], most, chunk=5)
    assert PROMPT + answer == tokens[: len(PROMPT) + most]
    full = [each for each in theirs if len(each[1]) == drafter.num_drafted]  # the reference shrinks its last blocks
    assert len(full) >= least
    for (_, logits, path, _, _), mine, drafts in zip(full, drafter.logits, drafter.drafts, strict=False):
        assert (logits[: len(mine)] - mine).abs().max() < 1e-4 * logits.abs().max().clamp(min=1.0)
        assert path[: len(drafts)] == drafts
    return drafter


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["full", "scaled"])
def test_sampled_proposals_are_the_references(name: str, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Along the path that the package drew, the distribution of each draft is the package's."""
    model, target = targets(kind=kind)
    raw = raw_2(**VARIANTS[name])
    network = network_2(raw)
    if name not in DRAWN:  # the same for a native target
        torch.manual_seed(3)
        DRAWN[name] = reference_rounds(raw, network, model, 24, 0.8)
    theirs, tokens = DRAWN[name]
    drafter = DFlash2Drafter(network)
    ready(target, drafter)
    full = [each for each in theirs if len(each[2]) == drafter.num_drafted]
    assert len(full) >= 6
    plain, drawing = WalkedReading.drawn, iter(list[int]())

    def follow(self: WalkedReading, slot: int, limit: int, seq: Any) -> Any:
        candidates = iter(self._tokens_BKM[slot])
        monkeypatch.setattr(dflash2_selector, "sample", lambda row, draw: next(candidates).index(next(drawing)))
        return plain(self, slot, limit, seq)

    monkeypatch.setattr(WalkedReading, "drawn", follow)
    for start, _, path, candidates, q in full:
        drawing = iter(path)
        seq = admit(target, drafter, tokens[:start], SamplingParams(max_tokens=60, temperature=0.8))
        seq.tokens[-1] = tokens[start]
        block = drafter.propose(Batch([seq]))
        drafter.drop(seq)
        target.cache.free(seq.row)
        probs = block.probs_B[0]
        assert block.tokens_B[0] == path and probs is not None
        expected = torch.zeros(len(path), VOCAB).scatter(1, candidates, q)
        assert (probs - expected).abs().max() < 1e-4
