"""Settings that are read wrongly, one at a time: each is named.

The answers are made by the drafter itself: a random token, then the whole block that the right drafter drafts behind
it, and so on. So the right drafter brings a whole block a round, and whatever else is read brings little.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from scored import FASTEST, tiny_llm
from tiny_dflash import HIDDEN, TARGET_LAYERS, loud_, network, tiny_target

from paceline.draft.base import Observed
from paceline.draft.dflash.checkpoint import StoredDrafter
from paceline.draft.dflash.config import DFlashConfig, as_dflash2, new_config
from paceline.draft.dflash2.drafter import DFlash2Network
from paceline.draft.eagle3.checkpoint import Eagle3Checkpoint, Eagle3Config
from paceline.draft.eagle3.checkpoint import new_config as new_eagle3
from paceline.draft.eagle3.drafter import Eagle3Network
from paceline.draft.formats.family import drafter_from
from paceline.draft.vocabulary import Vocabulary
from paceline.engine.llm import LLM
from paceline.loop.adapt.servers.mismatch import LOW, Ranked, drafter_of, measure, named, rank
from paceline.loop.adapt.traffic.stored import Request
from paceline.model.target import ForwardBatch
from paceline.types import Batch, SamplingParams, Sequence

pytestmark = pytest.mark.slow
VOCAB, BLOCK, ROUNDS, PROMPT = 67, 6, 4, 40
SLIDING = {
    "sliding_window": 5,
    "layer_types": ["sliding_attention"] * 2,
    "use_sliding_window": True,
    "is_causal": False,
}
Spoil = Callable[[StoredDrafter], StoredDrafter]


def right(**keys: Any) -> StoredDrafter:
    raw = new_config(
        HIDDEN, VOCAB, TARGET_LAYERS, num_layers=2, block_size=BLOCK, head_dim=8, intermediate_size=48, **keys
    )
    raw["dflash_config"]["target_layer_ids"] = [2, 4]
    tensors = {name: tensor.detach() for name, tensor in network(raw).state_dict().items()}
    return StoredDrafter(DFlashConfig.from_json(raw), tensors)


def with_keys(stored: StoredDrafter, **keys: Any) -> StoredDrafter:
    raw = {**stored.config.raw, **{name: value for name, value in keys.items() if name != "nested"}}
    raw["dflash_config"] = {**raw["dflash_config"], **keys.get("nested", {})}
    return replace(stored, config=DFlashConfig.from_json(raw))


def with_tensors(stored: StoredDrafter, change: Callable[[str, torch.Tensor], torch.Tensor]) -> StoredDrafter:
    return replace(stored, tensors={name: change(name, tensor) for name, tensor in stored.tensors.items()})


def interleaved(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Queries and keys with the two halves of each head's channels in turns, as other programs store them."""
    if not any(f".{which}." in name for which in ("q_proj", "k_proj", "q_norm", "k_norm")):
        return tensor
    order = torch.stack([torch.arange(4), torch.arange(4, 8)], dim=1).flatten()
    return tensor.unflatten(0, (-1, 8))[:, order].flatten(0, 1)


def norms_less_one(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor - 1 if name.endswith("norm.weight") else tensor


def right_2() -> StoredDrafter:
    body = right()
    raw = as_dflash2(body.config.raw, rank=5, top_k=6)
    raw["dflash_config"]["conv_group_size"] = 4
    config = DFlashConfig.from_json(raw)
    more = loud_(DFlash2Network.random(config)).state_dict()
    return StoredDrafter(config, {**{name: tensor.detach() for name, tensor in more.items()}, **body.tensors})


def last_layer_first(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor[:, HIDDEN:], tensor[:, :HIDDEN]], dim=1) if name == "fc.weight" else tensor


def later_tap_first(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if name.endswith("_conv.base_kernel"):
        return tensor[:, [1, 0]]
    if not name.endswith("kernel_projection.weight"):
        return tensor
    groups = len(tensor) // 4
    return tensor[
        [*range(groups, 2 * groups), *range(groups), *range(3 * groups, 4 * groups), *range(2 * groups, 3 * groups)]
    ]


def codebooks_exchanged(stored: StoredDrafter) -> StoredDrafter:
    names = [f"candidate_selector.{which}_codebook" for which in ("predecessor", "successor")]
    swapped = dict(zip(names, [stored.tensors[name] for name in reversed(names)], strict=True))
    return replace(stored, tensors=stored.tensors | swapped)


SEEDED = torch.Generator().manual_seed(3)
IDS = torch.arange(0, 2 * VOCAB // 3, 2)
CASES: dict[str, tuple[StoredDrafter, Spoil]] = {
    "layer ids off by one": (right(), lambda stored: with_keys(stored, nested={"target_layer_ids": [3, 5]})),
    "mask token": (right(), lambda stored: with_keys(stored, nested={"mask_token_id": 20})),
    "rotary length": (right(rope_theta=1e6), lambda stored: with_keys(stored, rope_theta=100.0)),
    "rotary style": (right(), lambda stored: with_tensors(stored, interleaved)),
    "window flag": (right(**SLIDING), lambda stored: with_keys(stored, use_sliding_window=False)),
    "head": (
        right(),
        lambda stored: replace(stored, vocabulary=Vocabulary(None, torch.randn(VOCAB, HIDDEN, generator=SEEDED))),
    ),
    "head: d2t with ids in it": (
        replace(right(), vocabulary=Vocabulary(IDS, None)),
        lambda stored: replace(stored, vocabulary=Vocabulary(IDS + torch.arange(len(IDS)), None)),
    ),
    "anchor slot": (right(sample_from_anchor=True), lambda stored: with_keys(stored, sample_from_anchor=False)),
    "norm flags": (right(), lambda stored: with_tensors(stored, norms_less_one)),
    "layer order": (right(), lambda stored: with_tensors(stored, last_layer_first)),
    "convolution": (right_2(), lambda stored: with_tensors(stored, later_tap_first)),
    "selector": (right_2(), codebooks_exchanged),
    "mask token: of DFlash 2": (right_2(), lambda stored: with_keys(stored, nested={"mask_token_id": 20})),
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    tiny = tiny_llm(FASTEST)
    tiny.target = tiny_target(4, vocab=VOCAB, kind=FASTEST)
    tiny.engine = tiny.new_engine(tiny.drafter)
    return tiny


def right_eagle3(**keys: Any) -> Eagle3Checkpoint:
    raw = new_eagle3(HIDDEN, VOCAB, TARGET_LAYERS, head_dim=8, intermediate_size=48, draft_vocab_size=len(IDS), **keys)
    config = Eagle3Config.from_json(raw)
    built = Eagle3Network(config)
    loud_(built, 3)
    return Eagle3Checkpoint(config, {name: tensor.detach() for name, tensor in built.state_dict().items()}, IDS)


def with_config(stored: Eagle3Checkpoint, **fields: Any) -> Eagle3Checkpoint:
    return replace(stored, config=replace(stored.config, **fields))


EAGLE3: dict[str, tuple[Eagle3Checkpoint, Callable[[Eagle3Checkpoint], Eagle3Checkpoint]]] = {
    "layer ids off by one": (
        right_eagle3(tap_layers=[1, 2, 4]),
        lambda stored: with_config(stored, tap_layers=(0, 1, 3)),
    ),
    "norm flags: told": (right_eagle3(), lambda stored: with_config(stored, norm_output=False)),
    "norm flags: residual": (right_eagle3(version="3"), lambda stored: with_config(stored, norm_before_residual=True)),
    "rotary length": (
        right_eagle3(rope_theta=1e4),
        lambda stored: with_config(stored, shape=replace(stored.config.shape, rope_theta=3.0)),
    ),
    "head: d2t with ids in it": (right_eagle3(), lambda stored: replace(stored, ids=IDS + torch.arange(len(IDS)))),
}


@pytest.mark.nightly
@pytest.mark.parametrize("kind", EAGLE3)
def test_each_mismatch_of_eagle3_is_named(llm: LLM, kind: str) -> None:
    stored, spoil = EAGLE3[kind]
    requests = answers(llm, stored)
    whole = measure(llm, drafter_of(stored), requests)
    assert whole == pytest.approx(6)
    ranked = rank(llm, spoil(stored), requests)
    assert ranked[0].tokens_per_round < 0.6 * whole
    mismatch = named(ranked)
    assert mismatch is not None and mismatch.kind == kind.partition(":")[0], ranked[:4]
    assert mismatch.tokens_per_round == pytest.approx(whole)


def answers(llm: LLM, stored: StoredDrafter | Eagle3Checkpoint, count: int = 1) -> list[Request]:
    """Texts of which this drafter drafts every token but the first of each round."""
    target, drafter = llm.target, drafter_of(stored)
    draw = torch.Generator().manual_seed(5)
    requests = []
    for number in range(count):
        target.set_taps(drafter.tap_layers)
        drafter.bind(target)
        row = target.cache.allocate()
        assert row is not None
        prompt = torch.randint(VOCAB, (PROMPT,), generator=draw).tolist()
        seq = Sequence(0, list(prompt), PROMPT, SamplingParams())
        seq.row = row
        drafter.start(seq)
        read = prompt
        for _ in range(ROUNDS):
            out = target.forward(ForwardBatch([row], [seq.cached_len], [len(read)], read, "none"))
            drafter.observe([Observed(seq, seq.cached_len, len(read), out.taps_TF)])
            seq.cached_len += len(read)
            seq.tokens.append(int(torch.randint(VOCAB, (1,), generator=draw)))
            drafts = drafter.propose(Batch([seq])).tokens_B[0]
            seq.tokens += drafts
            read = seq.tokens[seq.cached_len :]
        target.cache.free(row)
        answer_ids = [*seq.tokens[PROMPT:], 0]
        requests.append(Request(str(number), "", 0, prompt, answer_ids, SamplingParams(), 0, "length"))
    return requests


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.nightly] * (kind == "mask token: of DFlash 2")) for kind in CASES],
)
def test_each_mismatch_is_named(llm: LLM, kind: str) -> None:
    stored, spoil = CASES[kind]
    requests = answers(llm, stored)
    whole = measure(llm, drafter_from(stored), requests)
    assert whole == pytest.approx(stored.config.num_slots + 1)
    ranked = rank(llm, spoil(stored), requests)
    assert ranked[0].kind == "as it is" and ranked[0].tokens_per_round < LOW
    mismatch = named(ranked)
    assert mismatch is not None and mismatch.kind == kind.partition(":")[0], ranked[:4]
    assert mismatch.tokens_per_round == pytest.approx(whole)
    figures = [each.tokens_per_round for each in ranked[1:]]
    assert figures == sorted(figures, reverse=True) and len(figures) > 10


def test_a_little_more_is_named_only_where_every_prompt_says_so() -> None:
    as_is = Ranked("as it is", "", 1.6, 20)
    for gain, is_confirmed, is_named in (
        (0.15, True, True),
        (0.15, False, False),
        (0.05, True, False),
        (0.3, False, True),
    ):
        better = Ranked("mask token", "mask_token_id 5", 1.6 + gain, 20, is_confirmed)
        assert (named([as_is, better]) is better) == is_named, (gain, is_confirmed)


def test_a_gain_is_sure_where_it_does_not_hang_on_few_prompts(llm: LLM) -> None:
    stored, spoil = CASES["mask token"]
    requests = answers(llm, stored, 4)
    ranked = rank(llm, spoil(stored), requests)
    assert ranked[1].is_confirmed and ranked[1].num_prompts == 4
    assert not any(each.is_confirmed for each in rank(llm, stored, requests)), "nothing is better than the right one"
