"""A small model as drafter: in step with the target through chunks, rollbacks, ragged batches and sampling."""

from __future__ import annotations

import pytest
import torch
from doubles import FakeTarget
from grammar_engines import byte_engine
from round_loop import admit, generate, ready

from paceline.draft.small_model import SmallModelDrafter
from paceline.errors import DrafterMismatchError
from paceline.model.checkpoint import random_tensors
from paceline.model.config.decoder import DecoderConfig
from paceline.model.torch.decoder import Decoder
from paceline.types import Batch, GrammarSpec, SamplingParams

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1], [8, 2, 8, 1, 8]]


def decoder(seed: int = 0, vocab: int = 17, num_layers: int = 2, num_rows: int = 3) -> Decoder:
    config = DecoderConfig("llama", vocab, 32, 48, num_layers, 4, 2, 8, 256, rms_norm_eps=1e-6)
    scaled = [(name, tensor if "norm" in name else tensor * 12) for name, tensor in random_tensors(config, seed)]
    return Decoder(config, scaled, num_rows=num_rows, max_len=96)


@pytest.mark.slow
def test_the_target_s_twin_is_always_right() -> None:
    _, rounds = generate(decoder(), SmallModelDrafter(decoder(), num_drafted=3), PROMPTS, 41, chunk=3)
    assert all(stats.num_accepted_B == stats.num_drafted_B for stats in rounds)
    assert len(rounds) == 10


def test_a_draft_that_a_grammar_replaced_leaves_its_cache() -> None:
    target, model = (FakeTarget(vocab_size=258, order=400) for _ in range(2))
    engine = byte_engine(target, SmallModelDrafter(model))
    engine.add([1, 2, 3], SamplingParams(max_tokens=40, grammar=GrammarSpec("regex", "Dear friends, [a-c]{30}")))
    while engine.has_work:
        rounds = [len(chunk.sequence.rounds) for chunk in engine.step()]
        for seq in engine.scheduler.running:
            held = model.fake_cache.content(seq.row)
            assert held == seq.tokens[: len(held)]
    assert rounds[0] > 0


@pytest.mark.slow
def test_another_model_changes_only_the_speed() -> None:
    plain, plain_rounds = generate(decoder(), SmallModelDrafter(decoder(), num_drafted=0), PROMPTS, 40)
    drafted, rounds = generate(decoder(), SmallModelDrafter(decoder(seed=1, num_layers=1)), PROMPTS, 40, chunk=4)
    assert drafted == plain
    refused = sum(d - a for stats in rounds for d, a in zip(stats.num_drafted_B, stats.num_accepted_B, strict=True))
    assert refused > 0 and len(plain_rounds) == 39


def test_its_cache_holds_exactly_verified_tokens() -> None:
    target, model = FakeTarget(vocab_size=8, num_rows=2, seed=1), FakeTarget(vocab_size=8, seed=1, sharpness=3.0)
    other = FakeTarget(vocab_size=8, seed=2)
    for drafter in (SmallModelDrafter(model), SmallModelDrafter(other)):
        answers, _ = generate(target, drafter, [[1, 2, 3, 4, 5], [6, 7]], 30, chunk=2)
        assert answers == [target.greedy([1, 2, 3, 4, 5], 30), target.greedy([6, 7], 30)]


def test_sampled_rows_bring_their_distribution() -> None:
    target, drafter = decoder(), SmallModelDrafter(decoder(), num_drafted=4)
    ready(target, drafter)
    sampling = SamplingParams(max_tokens=40, temperature=0.7, top_k=3)
    greedy = admit(target, drafter, PROMPTS[0], SamplingParams(max_tokens=3))
    sampled = admit(target, drafter, PROMPTS[0], sampling)
    sampled.seed = 9
    block = drafter.propose(Batch([greedy, sampled]))
    assert [len(tokens) for tokens in block.tokens_B] == [1, 4] and block.probs_B[0] is None
    probs = block.probs_B[1]
    assert probs is not None and (probs > 0).sum(-1).tolist() == [3] * 4
    assert all(probs[slot, token] > 0 for slot, token in enumerate(block.tokens_B[1]))

    alone_target, alone = decoder(), SmallModelDrafter(decoder(), num_drafted=4)
    ready(alone_target, alone)
    again = admit(alone_target, alone, PROMPTS[0], sampling)
    again.seed = 9
    repeated = alone.propose(Batch([again]))
    assert repeated.tokens_B[0] == block.tokens_B[1]


def test_mismatches() -> None:
    target = decoder()
    with pytest.raises(DrafterMismatchError, match="the drafter has 18 tokens, the target 17"):
        SmallModelDrafter(decoder(vocab=18)).bind(target)
    with pytest.raises(DrafterMismatchError, match="second time"):
        SmallModelDrafter(target).bind(target)


def test_no_gradients_are_kept() -> None:
    target, drafter = decoder(), SmallModelDrafter(decoder())
    ready(target, drafter)
    seq = admit(target, drafter, PROMPTS[0], SamplingParams(max_tokens=9, temperature=1.0))
    probs = drafter.propose(Batch([seq])).probs_B[0]
    assert probs is not None and not probs.requires_grad and probs.dtype == torch.float32
