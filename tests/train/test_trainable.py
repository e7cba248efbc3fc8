"""The seam `Trainable`: a drafter of another kind learns through the same loop, and its runs are resumed like any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_training import HIDDEN, assert_resumes, config, documents, embedding, losses, tiny_decoder
from torch import Tensor, nn

from paceline.model.target import head_weight
from paceline.train.config import OptimConfig
from paceline.train.documents.dataset import Corpus, Place
from paceline.train.features.hidden_states import OnlineFeatures
from paceline.train.learn.loop import Trainer
from paceline.train.learn.losses import Head
from paceline.train.learn.packs import Pack, Trainable

pytestmark = pytest.mark.slow


class Guesser(nn.Module):
    """No attention at all: every slot is a product of the anchor's embedding and of the newest tap before it."""

    def __init__(self, num_slots: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(2 * HIDDEN, HIDDEN)
        self.slots = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(num_slots))

    def forward(self, inputs_AD: Tensor) -> Tensor:
        hidden_AD = torch.tanh(self.fc(inputs_AD))
        return torch.stack([slot(hidden_AD) for slot in self.slots], dim=1)


class GuesserTrainable:
    """The interface that the training loop needs."""

    block_size = 4

    def __init__(self) -> None:
        self.network, self.raw = Guesser(self.block_size - 1), {"architectures": ["Guesser"]}
        self.layers = self.network.slots

    def hidden(self, pack: Pack, embedding_VD: Tensor, is_autocast: bool) -> Tensor:
        newest, first = [], 0
        for anchors_A, length in zip(pack.layout.anchors, pack.layout.context_lens, strict=True):
            newest.append(pack.taps_NF[first + anchors_A - 1])
            first += length
        inputs_AD = torch.cat([embedding_VD[pack.anchors_A], torch.cat(newest)], dim=1)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            return self.network(inputs_AD).float().flatten(0, 1)


def trainer(folder: Path, **changes: Any) -> Trainer:
    drafter: Trainable = GuesserTrainable()
    target, corpus = tiny_decoder(), Corpus(documents(), [])
    features = OnlineFeatures(target, corpus.train, (3,), needs_final=False)
    head = Head(head_weight(target))
    return Trainer(
        drafter, corpus, features, embedding(target), head, config(**changes), folder=folder, peak_flops=1e12
    )


@pytest.mark.parametrize("changes", [{}, {"autocast": True}, {"gradient_checkpointing": True}], ids=str)
def test_another_network_learns(tmp_path: Path, changes: dict[str, Any]) -> None:
    one = trainer(tmp_path, max_steps=20, optim=OptimConfig(lr=1e-2), **changes)
    chosen, num_slots, _ = one.planner.step(Place())

    def loss() -> float:
        """The loss of the same blocks, before and after."""
        with torch.no_grad():
            return float(one.pack_loss(one.packer.pack(chosen), one.head, num_slots)[0])

    before = loss()
    assert len(losses(one)) == 20 and loss() < before
    assert load_file(tmp_path / "step-000020" / "model.safetensors").keys() == Guesser(3).state_dict().keys()
    assert "Guesser" in (tmp_path / "step-000020" / "config.json").read_text()


def test_its_run_is_resumed(tmp_path: Path) -> None:
    assert_resumes(lambda folder: trainer(folder, max_steps=6), tmp_path)
