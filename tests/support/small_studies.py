"""Small runs of experiments/two_ideas.py and two_steps.py: options, drafters with large weights, packs of one text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from two_ideas import NUM_DRAFTS, Study

from paceline.train.documents.dataset import Document
from paceline.train.features.hidden_states import Features
from paceline.train.learn.packs import Pack, Packer
from paceline.train.tiny import write_tiny_target

ANCHOR, LENGTH, VOCAB = 10, 40, 200


def words_for(folder: Path, **options: Any) -> list[str]:
    """A script's options: a tiny random target, thirty texts of random tokens, and these."""
    draw = np.random.default_rng(0)
    texts = [[1, 2, 3, *draw.integers(0, VOCAB, LENGTH - 3).tolist()] for _ in range(30)]
    lines = [json.dumps({"input_ids": text, "loss_mask": [0] * 8 + [1] * (LENGTH - 8)}) for text in texts]
    (folder / "texts.jsonl").write_text("\n".join(lines))
    options |= {"answers": folder / "texts.jsonl", "target": write_tiny_target(folder / "target")}
    options |= {"num_heldout": 9, "out": folder / "out"}
    return [str(word) for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]


@torch.no_grad()
def loud(study: Study, name: str) -> Any:
    """A new drafter of this name with larger weights, so that its drafts differ from each other."""
    drafter, _ = study.cell(name, 0)
    for weight in drafter.network.parameters():
        weight.mul_(8.0 if weight.ndim == 2 else 1.0)
    return drafter


def taps_of(study: Study) -> Tensor:
    width = len(study.taps) * study.target.hidden_size
    return torch.randn(LENGTH, width, generator=torch.Generator().manual_seed(1))


def packed(study: Study, tokens: list[int], anchors: list[int], taps_NF: Tensor | None = None) -> Pack:
    features = Features(taps_of(study) if taps_NF is None else taps_NF, None)

    class Given:
        def of(self, number: int) -> Features:
            return features

    document = Document("text", np.array(tokens, dtype=np.int32), 4)
    return Packer(1 + NUM_DRAFTS, [document], Given()).pack([(0, np.array(anchors))])
