"""DSpark in training: a start that changes nothing, its losses against their formulas, a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_training import SMALL, a_pack, embedding, tiny_decoder, trainer
from tiny_dflash import loud_
from tiny_runs import TINY, paceline
from torch.nn import functional as F

from paceline.draft.dflash.checkpoint import write_checkpoint
from paceline.draft.dflash2.codebooks import materialised
from paceline.draft.formats.family import network_of, read_drafter
from paceline.errors import ConfigError
from paceline.train.config import DrafterShape, LossConfig
from paceline.train.learn.initial_weights import network_for
from paceline.train.learn.loop import Trainer
from paceline.train.learn.losses import Head, slot_weights
from paceline.train.learn.packs import Pack
from paceline.train.methods import dspark
from paceline.train.methods.dspark import DSparkTrainable

SPARK: dict[str, Any] = {"kind": "dspark", "selector_rank": 6}
COLUMNS = torch.tensor([*range(20), 22])


def spark_of(one: Trainer) -> tuple[DSparkTrainable, Pack]:
    assert isinstance(one.drafter, DSparkTrainable)
    loud_(one.drafter.network.markov_head, 3)
    return one.drafter, a_pack(one)


@pytest.mark.parametrize(("name", "columns"), [("ce", None), ("d-pace", COLUMNS), ("kl", None), ("lk", None)])
@pytest.mark.parametrize("codebooks", ["factored", "free"])
def test_loss_and_figures_by_formula(name: str, columns: torch.Tensor | None, codebooks: str, tmp_path: Path) -> None:
    """The Markov head corrects logits for the target's tokens; the confidence learns whether drafts are accepted."""
    one = trainer(tmp_path, needs_final=name in ("kl", "lk"), shape={**SPARK, "codebooks": codebooks})
    drafter, pack = spark_of(one)
    head = one.head if columns is None else Head(one.head.weight_VD[columns], columns=columns)
    loss_config, table = LossConfig(name=name), one.embedding_VD
    hidden = drafter.hidden(pack, table, False).detach().requires_grad_()
    scalar, metrics = drafter.loss(hidden, pack, head, table, loss_config, 50.0)
    (gradient,) = torch.autograd.grad(scalar, hidden, retain_graph=True)
    whole = materialised(drafter.network.state_dict(), table)
    w1, w2 = (whole[f"markov_head.{book}_codebook"] for book in ("predecessor", "successor"))
    labels, valid = pack.slots.labels_AK.long(), pack.slots.valid_AK
    before = torch.cat([pack.anchors_A[:, None], torch.where(valid, labels, 0)[:, :-1]], dim=1)
    again = hidden.detach().requires_grad_()
    ids = torch.arange(len(table)) if columns is None else columns
    blocks = again.unflatten(0, labels.shape)
    logits = blocks @ head.weight_VD.T + w1[before] @ w2[ids].T
    rows, reached = head.local(labels)
    log_probs = logits.log_softmax(-1)
    ce = -log_probs.gather(-1, rows[..., None])[..., 0]
    accepted, loss = (logits.argmax(-1) == rows).float(), ce
    if pack.slots.final_AKD is not None and name in ("kl", "lk"):
        target = head.target_logits(pack.slots.final_AKD).softmax(-1)
        accepted = torch.minimum(target, log_probs.exp()).sum(-1).detach()
        overlap = torch.minimum(target, log_probs.exp()).sum(-1)
        loss = (target * (target.log() - log_probs)).sum(-1) if name == "kl" else -(overlap + 1e-6).log()
    weights = slot_weights(loss_config, ce.detach(), valid & reached)
    confidence = drafter.network.confidence_head
    assert confidence is not None
    sure = confidence(blocks.detach(), w1[before])
    own = F.binary_cross_entropy_with_logits(sure, accepted * reached, reduction="none")
    unsure = slot_weights(loss_config, torch.where(reached, ce.detach(), 30.0), valid)
    expected = ((loss * weights).sum() + (own * unsure).sum()) / 50.0
    torch.testing.assert_close(scalar, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, again)[0], atol=1e-5, rtol=1e-4)
    right = (logits.argmax(-1) == rows) & reached & valid
    assert torch.equal(drafter.right(hidden, pack, head, table), right)
    assert metrics.sums_4K[1].tolist() == right.sum(0).tolist()


def test_pieces_have_the_gradient_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, pack = spark_of(one := trainer(tmp_path, shape=SPARK))
    gradients = []
    for rows in (10_000, 6):
        monkeypatch.setattr(dspark, "CHUNK_ROWS", rows)
        drafter.network.zero_grad()
        hidden = drafter.hidden(pack, one.embedding_VD, False)
        drafter.loss(hidden, pack, one.head, one.embedding_VD, LossConfig(), 50.0)[0].backward()
        assert all(parameter.grad is not None for parameter in drafter.network.parameters())
        gradients.append([parameter.grad for parameter in drafter.network.parameters()])
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-4)


def test_a_dflash_2_drafter_does_not_become_one(tmp_path: Path) -> None:
    raw, network = network_for(tiny_decoder(), "none", DrafterShape(**SMALL, kind="dflash2", selector_rank=6), None, 3)
    weights = materialised(network.state_dict(), embedding(tiny_decoder()))
    write_checkpoint(tmp_path / "second", raw, network_of(network.config, weights).state_dict())
    with pytest.raises(ConfigError, match="a dflash2 drafter cannot become one"):
        network_for(tiny_decoder(), "none", DrafterShape(**SMALL, **SPARK), tmp_path / "second", 0)


@pytest.mark.slow
def test_a_run_writes_a_drafter_that_drafts(tmp_path: Path) -> None:
    words = ("--drafter-kind", "dspark", "--selector-rank", 8, "--out", tmp_path / "run")
    paceline(*TINY, "--max-steps", 6, *words)
    drafter = read_drafter(tmp_path / "run" / "drafter")
    assert drafter.name == "dspark"
    tensors = load_file(tmp_path / "run" / "drafter" / "model.safetensors")
    assert tensors["markov_head.successor_codebook"].abs().max() > 0
    assert tensors["confidence_head.proj.weight"].abs().max() > 0
    served = json.loads((tmp_path / "run" / "heldout.json").read_text())
    assert served["tokens_per_round"] >= 1.0
