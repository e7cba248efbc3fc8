"""DFlash against the authors' package: same weights, same target, same drafts; and against our own slow network."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from round_loop import admit, generate, ready
from tiny_dflash import (
    HIDDEN,
    KINDS,
    PROMPT,
    TARGET_LAYERS,
    VARIANTS,
    VOCAB,
    Recording,
    network,
    raw_config,
    targets,
    tiny_target,
)
from tiny_dflash2 import Recording2, network_2, raw_2

from paceline.draft import tapped
from paceline.draft.base import Observed
from paceline.draft.dflash.config import new_config
from paceline.draft.dflash.drafter import DFlashDrafter
from paceline.draft.dflash.reading import scale_logits
from paceline.errors import DrafterMismatchError
from paceline.model.target import ForwardBatch
from paceline.model.torch.decoder import Decoder
from paceline.train.learn.attention import Layout, make_attention
from paceline.types import Batch, SamplingParams, Take

REFERENCES: dict[tuple[str, int], Any] = {}
"""The authors' rounds, by config and length."""


def reference_rounds(
    raw: dict[str, Any], state: dict[str, torch.Tensor], model: Any, prompt: list[int], max_tokens: int
) -> Any:
    """(logits of each round, all tokens) of the authors' loop."""
    authors = pytest.importorskip("dflash.model", reason="pip install --no-deps dflash==0.1.0")
    from transformers import Qwen3Config

    reference = authors.DFlashDraftModel(Qwen3Config(**raw)).eval()
    reference.load_state_dict(state)
    logits, compute = [], reference.compute_logits

    def record(hidden: torch.Tensor, head: Any) -> torch.Tensor:
        logits.append(compute(hidden, head)[0])
        return logits[-1]

    reference.compute_logits = lambda hidden, head: record(hidden, head)[None]
    tokens = authors.dflash_generate(reference, model, torch.tensor([prompt]), max_tokens, None)
    return logits, tokens[0].tolist()


def assert_same_rounds(raw: dict[str, Any], model: Any, target: Decoder, max_tokens: int, min_rounds: int) -> None:
    own = network(raw)
    key = json.dumps(raw, sort_keys=True), max_tokens
    if key not in REFERENCES:  # the same for a native target
        REFERENCES[key] = reference_rounds(raw, own.state_dict(), model, PROMPT, max_tokens)
    theirs, tokens = REFERENCES[key]
    drafter = Recording(own)
    (answer,), rounds = generate(target, drafter, [PROMPT], max_tokens, chunk=5)
    assert PROMPT + answer == tokens[: len(PROMPT) + max_tokens]
    full = [logits for logits in theirs if len(logits) == drafter.num_drafted]  # the reference shrinks its last blocks
    assert len(full) >= min_rounds
    for reference, mine in zip(full, drafter.logits, strict=False):
        reference = reference[: len(mine)]  # its last full block drafts one token past the limit
        assert (reference - mine).abs().max() < 1e-4 * reference.abs().max().clamp(min=1.0)  # float32, any sum order
        assert reference.argmax(-1).tolist() == mine.argmax(-1).tolist()
    assert any(count > 0 for stats in rounds for count in stats.num_accepted_B), "the test needs some acceptance"


# The reference cannot run sliding layers without a window: Transformers' cache fails on them.
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", sorted(VARIANTS.keys() - {"sliding-unused"}))
def test_rounds_are_the_references(name: str, kind: Any) -> None:
    model, target = targets(kind=kind)
    assert_same_rounds(raw_config(**VARIANTS[name]), model, target, max_tokens=36, min_rounds=18)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_medium_shape_as_the_reference(kind: Any) -> None:
    model, target = targets(hidden=192, vocab=12, kind=kind)
    raw = new_config(192, 12, TARGET_LAYERS, num_layers=5, block_size=16, head_dim=32)
    assert_same_rounds(raw, model, target, max_tokens=28, min_rounds=6)


RECORDED: dict[int, Any] = {
    1: lambda keys: Recording(network(raw_config(**keys))),
    2: lambda keys: Recording2(network_2(raw_2(**keys))),
}
"""A drafter of each version of DFlash that keeps its logits."""


@pytest.mark.slow
@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chosen", [None, 2])
@pytest.mark.parametrize(
    ("version", "name"),
    [*((1, name) for name in VARIANTS), *((2, name) for name in ("full", "sliding", "biased", "yarn"))],
)
def test_decode_path_equals_the_trainable_network(version: int, name: str, kind: Any, chosen: int | None) -> None:
    """A block of chosen length has as many slots as are read."""
    target, drafter = tiny_target(kind=kind), RECORDED[version](VARIANTS[name])
    ready(target, drafter)
    seq = admit(target, drafter, PROMPT, SamplingParams(max_tokens=40))
    takes = None if chosen is None else [Take(drafter.name, chosen)]
    drafter.propose(Batch([seq], takes, whole_blocks=chosen is None))

    config, context = drafter.config, len(PROMPT)
    size = config.block_size if chosen is None else 1 + chosen
    twin = tiny_target()
    twin.set_taps(drafter.tap_layers)
    taps = twin.forward(ForwardBatch([twin.cache.allocate()], [0], [context], PROMPT, "none")).taps_TF
    block = torch.tensor([seq.tokens[-1]] + [config.mask_token_id] * (size - 1))
    attend = make_attention("split", config, Layout((context,), (torch.tensor([context]),), size), torch.float32)
    embedded = target.embed(block) * config.input_embedding_scale
    hidden = drafter.network(embedded, taps, attend, *([size] if version == 2 else []))
    expected = scale_logits(target.head(hidden[1:]), config)
    torch.testing.assert_close(drafter.logits[0], expected, atol=1e-4, rtol=1e-4)


def test_a_row_that_never_drafts_keeps_few_features(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tapped, "MOST_PENDING", 40)
    target = tiny_target()
    target.overwrites_taps = False  # so that no copies are kept, which could not be counted
    drafter = DFlashDrafter(network(raw_config()))
    ready(target, drafter)
    seq = admit(target, drafter, PROMPT, SamplingParams(max_tokens=240))
    kept: list[weakref.ref[torch.Tensor]] = []
    for position in range(len(PROMPT), 220):
        taps_TF = torch.ones(1, len(drafter.tap_layers) * HIDDEN)
        kept.append(weakref.ref(taps_TF))
        drafter.observe([Observed(seq, position, 1, taps_TF)])
        seq.tokens.append(0)
        seq.cached_len += 1
        del taps_TF
        assert sum(each() is not None for each in kept) <= 40 + tapped.MOST_UNSORTED
    assert drafter.can_draft(seq)


def test_limits_are_respected_and_an_empty_pass_is_skipped() -> None:
    target = tiny_target()
    drafter = Recording(network(raw_config()), num_drafted=5)
    ready(target, drafter)
    last = admit(target, drafter, PROMPT, SamplingParams(max_tokens=2))
    assert drafter.propose(Batch([last])).tokens_B == [[]] and not drafter.logits
    some = admit(target, drafter, PROMPT, SamplingParams(max_tokens=4))
    many = admit(target, drafter, PROMPT, SamplingParams(max_tokens=40))
    lengths = [len(tokens) for tokens in drafter.propose(Batch([last, some, many])).tokens_B]
    assert lengths == [0, 2, 5]
    assert {len(logits) for logits in drafter.logits} == {5}


@pytest.mark.slow
def test_fewer_slots_are_the_first_of_the_same_block() -> None:
    target = tiny_target()
    drafts = []
    for num_drafted in (7, 3):
        drafter = DFlashDrafter(network(raw_config()), num_drafted=num_drafted)
        ready(target, drafter)
        drafts.append(
            drafter.propose(Batch([admit(target, drafter, PROMPT, SamplingParams(max_tokens=40))])).tokens_B[0]
        )
    assert drafts[1] == drafts[0][:3]


@pytest.mark.slow
def test_greedy_and_sampled_rows_in_one_batch() -> None:
    target = tiny_target()
    drafter = Recording(network(raw_config()))
    ready(target, drafter)
    rows = [SamplingParams(max_tokens=40), SamplingParams(max_tokens=40, temperature=0.8, top_k=4)]
    sequences = [admit(target, drafter, PROMPT, params) for params in rows]
    block = drafter.propose(Batch(sequences))
    assert block.probs_B[0] is None and block.tokens_B[0] == drafter.logits[0].argmax(-1).tolist()
    probs = block.probs_B[1]
    assert probs is not None and probs.shape == (7, VOCAB)
    torch.testing.assert_close(probs.sum(-1), torch.ones(7))
    assert (probs > 0).sum(-1).tolist() == [4] * 7
    assert all(probs[slot, token] > 0 for slot, token in enumerate(block.tokens_B[1]))
    assert drafter.propose(Batch(sequences[1:])).tokens_B == block.tokens_B[1:], "draws depend on seed and place only"
    sequences[1].params = replace(rows[1], seed=5)
    assert drafter.propose(Batch(sequences[1:])) == block.certain([block.tokens_B[0]]), "a seed's drafts are certain"


@pytest.mark.parametrize("kind", KINDS)
class TestDraftVocabulary:
    """Drafting among some tokens only: the same network, fewer rows of the head."""

    IDS = torch.tensor([1, 4, 5, 9])

    def rounds(self, kind: Any, **options: Any) -> tuple[Recording, list[Any]]:
        target = tiny_target(kind=kind)
        drafter = Recording(network(raw_config()), **options)
        ready(target, drafter)
        rows = [SamplingParams(max_tokens=40), SamplingParams(max_tokens=40, temperature=0.8)]
        block = drafter.propose(Batch([admit(target, drafter, PROMPT, params) for params in rows]))
        return drafter, [block.tokens_B, block.probs_B]

    @pytest.mark.slow
    def test_drafts_are_the_best_of_these_tokens(self, kind: Any) -> None:
        full, _ = self.rounds(kind)
        reduced, (tokens, probs) = self.rounds(kind, draft_ids=self.IDS)
        for all_logits, some_logits in zip(full.logits, reduced.logits, strict=True):
            torch.testing.assert_close(all_logits[:, self.IDS], some_logits, atol=1e-5, rtol=1e-4)
        assert tokens[0] == self.IDS[full.logits[0][:, self.IDS].argmax(-1)].tolist()
        assert probs[1].shape == (7, VOCAB) and set(tokens[1]) <= set(self.IDS.tolist())
        torch.testing.assert_close(probs[1][:, self.IDS].sum(-1), torch.ones(7))

    @pytest.mark.slow
    def test_text_is_the_targets_all_the_same(self, kind: Any) -> None:
        target = tiny_target(kind=kind)
        plain = generate(target, DFlashDrafter(network(raw_config())), [PROMPT], 30)[0]
        assert generate(target, DFlashDrafter(network(raw_config()), draft_ids=self.IDS), [PROMPT], 30)[0] == plain

    def test_tokens_the_target_lacks_are_refused(self, kind: Any) -> None:
        target = tiny_target(kind=kind)
        with pytest.raises(DrafterMismatchError, match="draft vocabulary: the drafter says token 11"):
            DFlashDrafter(network(raw_config()), draft_ids=torch.tensor([1, 11])).bind(target)
