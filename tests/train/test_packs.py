"""Packs of bounded size: long documents go in pieces that keep their context, and teach what they would teach whole."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_training import config, document, embedding, head_of, tiny_decoder

from paceline.train.config import DrafterShape, LoopConfig
from paceline.train.documents.dataset import Corpus, Document
from paceline.train.features import hidden_states as features_module
from paceline.train.features.hidden_states import Features, OnlineFeatures
from paceline.train.learn.initial_weights import network_for
from paceline.train.learn.loop import Trainer
from paceline.train.learn.packs import DFlashTrainable, PackBudget, context_of, split_into_packs


class Noise:
    """Features of any document: the same each time, and only of the document that was asked for last."""

    def __init__(self, documents: list[Document], width: int) -> None:
        self.documents, self.width = documents, width

    def of(self, number: int) -> Features:
        generator = torch.Generator().manual_seed(number)
        return Features(torch.randn(len(self.documents[number]), self.width, generator=generator), None)


def trainer(folder: Path, documents: list[Document], settings: LoopConfig, **shape: Any) -> Trainer:
    target = tiny_decoder()
    raw, network = network_for(target, "none", DrafterShape(num_layers=1, block_size=4, num_taps=2, **shape), None, 0)
    source = Noise(documents, network.fc.in_features)
    drafter = DFlashTrainable(network, raw)
    return Trainer(
        drafter, Corpus(documents, []), source, embedding(target), head_of(target, network), settings, folder=folder
    )


def gradients(one: Trainer) -> tuple[float, list[torch.Tensor], int]:
    """Loss and gradients of the first step, and in how many packs it was computed."""
    chosen, num_slots, _ = one.planner.step(one.state.place)
    loss, _ = one.forward_backward(chosen, num_slots, one.head)
    grads = [parameter.grad.clone() for parameter in one.network.parameters() if parameter.grad is not None]
    return loss, grads, sum(1 for _ in split_into_packs(chosen, one.budget))


class TestBudget:
    def test_pieces_keep_every_anchor_and_all_context(self) -> None:
        budget, anchors_A = PackBudget(128, 1024, 8), np.arange(16_000, 16_384, 6)
        pieces = list(budget.pieces((3, anchors_A)))
        assert np.concatenate([piece for _, piece in pieces]).tolist() == anchors_A.tolist() and len(pieces) > 10
        for number, piece in pieces:
            assert number == 3 and context_of(piece, None) == range(int(piece.max()))
            assert len(piece) == 1 or len(piece) * 8 * int(piece.max()) <= 1024**2 // 4

    def test_early_blocks_of_a_long_document_go_together(self) -> None:
        sizes = [len(piece) for _, piece in PackBudget(128, 1024, 8).pieces((0, np.arange(50, 16_000, 250)))]
        assert sizes[0] > 2 * sizes[-1] and sum(sizes) == 64

    def test_with_a_window_only_that_much_context_is_carried(self) -> None:
        budget, anchors_A = PackBudget(128, 1024, 8, window=256), np.array([15_000, 15_010, 15_020])
        assert context_of(anchors_A, 256) == range(15_000 - 255, 15_020) and budget.size(anchors_A) == 275 + 24
        assert [len(piece) for _, piece in budget.pieces((0, anchors_A))] == [3], "a long document, but a short context"

    def test_documents_share_a_pack_while_there_is_room(self) -> None:
        chosen = [(number, np.arange(300, 310)) for number in range(7)]
        packs = list(split_into_packs(chosen, PackBudget(128, 1024, 4)))
        assert [len(pack) for pack in packs] == [2, 2, 2, 1], "349 tokens each"
        assert [len(pack) for pack in split_into_packs(chosen, PackBudget(10, 1024, 4))] == [1] * 7
        assert [len(pack) for pack in split_into_packs(chosen, PackBudget(128, None, 4))] == [7]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [{}, {"sliding_window": 24}], ids=["full", "window"])
def test_pieces_teach_what_the_whole_would(tmp_path: Path, shape: dict[str, Any]) -> None:
    documents = [document(number, 4, length) for number, length in enumerate((20, 400, 60))]
    settings = config(blocks_per_step=40, anchors=24, blocks_per_pack=64)
    results = {
        tokens: gradients(trainer(tmp_path, documents, dataclasses.replace(settings, tokens_per_pack=tokens), **shape))
        for tokens in (None, 4096, 64)
    }
    assert results[4096][2] == results[None][2] == 1 and results[64][2] > 4
    assert results[64][0] == pytest.approx(results[None][0], rel=1e-6)
    for whole, in_pieces in zip(results[None][1], results[64][1], strict=True):
        torch.testing.assert_close(in_pieces, whole, atol=1e-7, rtol=1e-4)


@pytest.mark.slow
def test_a_document_of_16k_tokens_trains_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest product of a step is counted: it is what a pack of the budget's tokens may have, not the
    document's."""
    long = document(0, 4, 16_380)
    one = trainer(tmp_path, [long], config(max_steps=2, blocks_per_step=64, anchors=64, tokens_per_pack=1024))
    largest, softmax = [0], torch.softmax

    def counted(scores: torch.Tensor, **options: Any) -> torch.Tensor:
        largest[0] = max(largest[0], scores.numel())
        return softmax(scores, **options)

    monkeypatch.setattr(torch, "softmax", counted)
    steps: list[dict[str, Any]] = []
    one.run(steps.append)
    assert len(steps) == 2 and all(np.isfinite(step["loss"]) for step in steps)
    whole = 64 * 4 * (16_384 + 4) * 4  # slots, positions, heads
    assert 0 < largest[0] <= 4 * (1024**2 // 4 + 4 * 64) < whole / 12


def test_a_long_document_is_read_in_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    docs, target, sizes = [document(1, 4, 50)], tiny_decoder(), list[int]()
    whole = OnlineFeatures(target, docs, (0, 2), needs_final=True).of(0)
    monkeypatch.setattr(features_module, "POSITIONS_PER_PASS", 16)
    forward = target.forward
    monkeypatch.setattr(target, "forward", lambda batch: (sizes.append(batch.num_tokens), forward(batch))[1])
    source = OnlineFeatures(target, docs, (0, 2), needs_final=True)
    parts = source.of(0)
    assert sizes == [16, 16, 16, 6] and source.of(0) is parts, "asked again for its next piece"
    assert whole.final_SD is not None and parts.final_SD is not None
    torch.testing.assert_close(parts.taps_SF, whole.taps_SF, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(parts.final_SD, whole.final_SD, atol=1e-5, rtol=1e-4)
