"""Training and decoding are one function: for the same tokens, the same logits in every slot of every block.

The hazards that other trainers met (reference/dflash.md, section 3): a window counted per block, causality that
differs, a block that sees the anchor's features, positions off by one. All blocks of all documents go through
training's packed forward at once; decoding meets each anchor as a round does, after observing every position before it.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest
import torch
from tiny_dflash import PROMPT, VARIANTS, Recording, network, raw_config, tiny_target
from torch import Tensor

from paceline.draft.base import Observed
from paceline.draft.dflash.drafter import DFlashNetwork
from paceline.draft.dflash.reading import scale_logits
from paceline.model.target import ForwardBatch, head_weight
from paceline.model.torch.decoder import Decoder
from paceline.train.config import LossConfig
from paceline.train.documents.dataset import Document
from paceline.train.features.hidden_states import OnlineFeatures
from paceline.train.learn.attention import WAYS
from paceline.train.learn.losses import Head, head_loss
from paceline.train.learn.packs import DFlashTrainable, Pack, Packer
from paceline.types import Batch, SamplingParams, Sequence

pytestmark = [
    pytest.mark.slow,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
]

DOCUMENTS = [
    Document("one@0/0", np.array(PROMPT + PROMPT[::-1] + [4, 4, 2], dtype=np.int32), 3),
    Document("two@0/0", np.array(PROMPT[5:] + PROMPT, dtype=np.int32), 1),
]
CHOSEN = [(0, np.array([3, 4, 9, 12, 20, 29])), (1, np.array([1, 7, 8, 21]))]


def packed(net: DFlashNetwork, target: Decoder) -> Pack:
    features = OnlineFeatures(target, DOCUMENTS, net.config.target_layer_ids, False)
    return Packer(net.config.block_size, DOCUMENTS, features).pack(CHOSEN)


def embedding(target: Decoder) -> Tensor:
    return target.embed(torch.arange(target.vocab_size))


def trained(net: DFlashNetwork, target: Decoder, way: str) -> Tensor:
    """Logits [blocks, K, V] of all blocks at once, as the loop computes them."""
    config = net.config
    hidden_TD = DFlashTrainable(net, {}, way).hidden(packed(net, target), embedding(target), False)
    head = Head(head_weight(target), config.output_multiplier, config.final_logit_softcapping)
    return head.logits(hidden_TD).unflatten(0, (-1, config.block_size - 1))


def decoded(net: DFlashNetwork, target: Decoder, *, chunk: int) -> Tensor:
    """The same logits from the drafter: observe up to each anchor, some tokens at a time, then propose."""
    drafter = Recording(net)
    target.set_taps(drafter.tap_layers)
    drafter.bind(target)
    for number, anchors in CHOSEN:
        tokens, row = DOCUMENTS[number].tokens.tolist(), target.cache.allocate()
        assert row is not None
        seq = Sequence(0, tokens[:1], 1, SamplingParams(max_tokens=100))
        seq.row = row
        drafter.start(seq)
        for anchor in anchors.tolist():
            while seq.cached_len < anchor:
                begin, end = seq.cached_len, min(anchor, seq.cached_len + chunk)
                out = target.forward(ForwardBatch([row], [begin], [end - begin], tokens[begin:end], "none"))
                seq.cached_len = end
                drafter.observe([Observed(seq, begin, end - begin, out.taps_TF)])
            seq.tokens[:] = tokens[: anchor + 1]
            drafter.propose(Batch([seq]))
        target.cache.free(row)
    return torch.stack(drafter.logits)


@pytest.mark.parametrize(("name", "way"), list(zip(VARIANTS, cycle(WAYS), strict=False)))
@torch.inference_mode()
def test_every_slot_of_several_anchors_as_decoding_sees_it(name: str, way: str) -> None:
    """Each variant with one way of attention, by turns; that all ways agree is tested in
    tests/train/test_attention.py."""
    keys = VARIANTS[name]
    net, target = network(raw_config(**keys)), tiny_target()
    expected = decoded(net, target, chunk=4)
    assert expected.shape[:2] == (10, net.config.block_size - 1)
    assert (expected.std(0) > 0.01).any(-1).all(), "the test needs blocks that differ"
    torch.testing.assert_close(trained(net, target, way), expected, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_one_position_off_would_be_noticed() -> None:
    net, target = network(raw_config()), tiny_target()
    expected = decoded(net, target, chunk=100)
    pack = packed(net, target)
    shifted_pack = replace(pack, taps_NF=pack.taps_NF.roll(1, 0))
    hidden_TD = DFlashTrainable(net, {}, "split").hidden(shifted_pack, embedding(target), False)
    shifted = scale_logits(target.head(hidden_TD.unflatten(0, (-1, 7))), net.config)
    assert (shifted - expected).abs().amax(-1).min() > 1e-3


@pytest.mark.parametrize("name", ["full", "sliding-both-ways", "scaled"])
def test_training_counts_the_drafts_that_decoding_makes(name: str) -> None:
    """recall@1 of the loop is the share of labels among the drafts; the labels stand where the drafts are verified."""
    net, target = network(raw_config(**VARIANTS[name])), tiny_target()
    drafts = decoded(net, target, chunk=3).argmax(-1)
    pack = packed(net, target)
    with torch.no_grad():
        slots_TD = DFlashTrainable(net, {}, "split").hidden(pack, embedding(target), False)
        head = Head(head_weight(target), net.config.output_multiplier, net.config.final_logit_softcapping)
        _, metrics = head_loss(slots_TD, pack.slots, head, LossConfig("ce"), 1.0)
    hits, counts, block = torch.zeros(7), torch.zeros(7), 0
    for number, anchors in CHOSEN:
        tokens = DOCUMENTS[number].tokens.tolist()
        for anchor in anchors.tolist():
            for slot, label in enumerate(tokens[anchor + 1 : anchor + 8]):
                hits[slot] += int(drafts[block, slot]) == label
                counts[slot] += 1
            block += 1
    assert metrics.sums_4K[:2].tolist() == [counts.tolist(), hits.tolist()]
