"""How much each layer of a model changes what passes through it, along the answers of an application.

influence of layer l = 1 - mean over the answers' tokens of cos(what goes in, what comes out): ShortGPT's block influence
(arXiv 2403.03853, section 3.1). Layers that change little are those whose loss is soonest made good.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.engine.llm import LLM
from paceline.model.target import ForwardBatch
from paceline.train.documents.dataset import Document

NUM_DOCUMENTS = 4
"""Answers that are looked at: some hundred tokens decide the order of most layers."""


@torch.inference_mode()
def influences(llm: LLM, documents: Sequence[Document]) -> list[float]:
    """Of each layer; infinite for the first and the last, which every student keeps."""
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


def most_influential(found: Sequence[float], kept: int) -> tuple[int, ...]:
    """So many layers, in their order; of equal ones the first."""
    return tuple(sorted(sorted(range(len(found)), key=lambda layer: (-found[layer], layer))[:kept]))
