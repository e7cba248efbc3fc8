"""Measures each layer's influence along answers, to select the layers of a student.

influence of layer l = 1 - mean over the answers' tokens of cos(input, output): ShortGPT's block influence (arXiv
2403.03853, section 3.1). A model recovers fastest from the removal of layers with low influence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.engine.llm import LLM
from paceline.model.target import ForwardBatch
from paceline.train.documents.dataset import Document

NUM_DOCUMENTS = 4
"""Number of answers to measure on; a few hundred tokens suffice to rank most layers."""


@torch.inference_mode()
def influences(llm: LLM, documents: Sequence[Document]) -> list[float]:
    """Returns the influence of every layer: 1 - mean cosine similarity of the layer's input and output hidden states,
    over the answer tokens of the first 4 documents (NUM_DOCUMENTS).

    The influence of the first and of the last layer is not measured but set to infinity, so that both are always
    copied.
    """
    target = llm.target
    num_layers = target.num_layers
    if num_layers < 3:
        return [float("inf")] * num_layers
    target.set_taps(tuple(range(num_layers - 1)))
    row = target.cache.allocate()
    assert row is not None, "the engine is not idle"
    sums, num_tokens = torch.zeros(num_layers - 2), 0
    for document in documents[:NUM_DOCUMENTS]:
        tokens, first = document.tokens.tolist(), document.answer_start
        out = target.forward(ForwardBatch([row], [0], [len(tokens)], tokens, "none"))
        assert out.taps_TF is not None
        taps_TLD = out.taps_TF[first:].float().unflatten(-1, (num_layers - 1, -1))
        alike_TL = torch.nn.functional.cosine_similarity(taps_TLD[:, :-1], taps_TLD[:, 1:], dim=-1)
        sums += (1 - alike_TL).sum(0).cpu()
        num_tokens += len(alike_TL)
        target.cache.rollback([row], [0])
    target.cache.free(row)
    target.set_taps(())
    return [float("inf"), *(sums / num_tokens).tolist(), float("inf")]


def most_influential(influence: Sequence[float], number: int) -> tuple[int, ...]:
    """Returns the indices of the `number` layers with the highest influence, ascending; ties go to the lower layer."""
    return tuple(sorted(sorted(range(len(influence)), key=lambda layer: (-influence[layer], layer))[:number]))
