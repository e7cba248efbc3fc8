"""DFlash 2 in training: a start that changes nothing, the selector's loss against its formula, its stage, its
codebooks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_training import SMALL, VOCAB, a_pack, assert_resumes, config, documents, tiny_decoder, trainer
from tiny_runs import TINY, paceline
from torch import nn

from paceline.draft.dflash.checkpoint import read_stored, write_checkpoint
from paceline.draft.dflash2.codebooks import materialised
from paceline.draft.dflash2.drafter import DFlash2Network
from paceline.draft.dspark.drafter import DSparkNetwork
from paceline.draft.formats.family import read_drafter
from paceline.errors import ConfigError
from paceline.runs.folder import RunFolder
from paceline.train.config import DrafterShape, LoopConfig, LossConfig, OptimConfig
from paceline.train.features.hidden_states import OnlineFeatures
from paceline.train.learn.initial_weights import network_for
from paceline.train.learn.loop import Trainer
from paceline.train.learn.losses import Head
from paceline.train.learn.packs import DFlashTrainable, Pack
from paceline.train.methods.selector import BlockSample, DFlash2Trainable, trainable_of

SECOND: dict[str, Any] = {"kind": "dflash2", "selector_rank": 6}


def trainer_2(folder: Path, settings: LoopConfig | None = None) -> Trainer:
    one = trainer(folder, settings, target=(target := tiny_decoder()), shape=SECOND)
    heldout, layer_ids = documents(4), one.drafter.network.config.target_layer_ids
    one.heldout["heldout"] = heldout, OnlineFeatures(target, heldout, layer_ids, False)
    return one


@pytest.mark.parametrize("codebooks", ["factored", "free"])
@pytest.mark.parametrize("is_continued", [False, True])
@pytest.mark.parametrize(
    ("kind", "network_type"),
    [pytest.param("dflash2", DFlash2Network, marks=pytest.mark.slow), ("dspark", DSparkNetwork)],
)
def test_it_begins_as_the_v1_drafter(
    kind: str, network_type: type, codebooks: str, is_continued: bool, tmp_path: Path
) -> None:
    target = tiny_decoder()
    raw, body = network_for(target, "none", DrafterShape(**SMALL), None, 3)
    init = None
    if is_continued:
        write_checkpoint(init := tmp_path / "v1", raw, body.state_dict())
    shape = DrafterShape(**SMALL, kind=kind, selector_rank=6, codebooks=codebooks)
    extended_raw, network = network_for(target, "none", shape, init, 3)
    assert extended_raw["architectures"] == [network_type.__name__.replace("Network", "DraftModel")]
    assert isinstance(network, network_type)
    one = trainer(tmp_path, shape={"kind": kind, "selector_rank": 6})
    pack, table = a_pack(one), one.embedding_VD
    v1, extended = DFlashTrainable(body, raw), trainable_of(network, extended_raw)
    hidden = extended.hidden(pack, table, False)
    torch.testing.assert_close(hidden, v1.hidden(pack, table, False), atol=1e-6, rtol=1e-6)
    assert torch.equal(extended.right(hidden, pack, one.head, table), v1.right(hidden, pack, one.head, table))


def test_a_block_whose_slots_are_shifted_is_refused(tmp_path: Path) -> None:
    raw, body = network_for(tiny_decoder(), "none", DrafterShape(**SMALL), None, 3)
    write_checkpoint(tmp_path / "v1", {**raw, "sample_from_anchor": True}, body.state_dict())
    with pytest.raises(ConfigError, match="predicts the token after each position"):
        network_for(tiny_decoder(), "none", DrafterShape(), tmp_path / "v1", 0)


def loud_selector(network: nn.Module) -> None:
    assert isinstance(network, DFlash2Network)
    generator = torch.Generator().manual_seed(5)
    for parameter in network.candidate_selector.parameters():
        parameter.data.normal_(0, 0.5, generator=generator)


@pytest.mark.parametrize("name", ["ce", "d-pace"])
@pytest.mark.parametrize("columns", [None, torch.tensor([*range(20), 22])])
def test_loss_and_figures_by_formula(name: str, columns: torch.Tensor | None, tmp_path: Path) -> None:
    """Slot by slot: gold among the top 16 of 24, weights of all slots, a missed one left out of the sum only."""
    one = trainer_2(tmp_path)
    drafter, settings = one.drafter, LossConfig(name, selector=0.7)
    assert isinstance(drafter, DFlash2Trainable)
    loud_selector(drafter.network)
    head = one.head if columns is None else Head(one.head.weight_VD[columns], 1.0, 0.0, columns)
    selector, pack, table = drafter.network.candidate_selector, a_pack(one), one.embedding_VD
    hidden_TD = torch.randn(len(pack.anchors_A) * 3, 32, generator=torch.Generator().manual_seed(0))
    loss, metrics = drafter.selector_loss(
        hidden_TD, pack, head, table, settings, 11.0, is_measured=True, is_learning=True
    )
    books = {each: table @ getattr(selector, f"{each}_factor").T for each in ("predecessor", "successor")}
    ids = torch.arange(VOCAB) if columns is None else columns
    expected, missed, right, standing = torch.zeros(()), 0, torch.zeros(3), torch.zeros(3)
    for block, hidden_KD in enumerate(hidden_TD.unflatten(0, (-1, 3))):
        before, prefix, all_right, rows = int(pack.anchors_A[block]), 1.0, True, []
        for slot, hidden_D in enumerate(hidden_KD):
            gold, valid = int(pack.slots.labels_AK[block, slot]), bool(pack.slots.valid_AK[block, slot])
            logits_V = head.weight_VD @ hidden_D
            place = (ids == gold).nonzero()
            unary, chosen = logits_V.topk(16)
            scores = unary + books["successor"][ids[chosen]] @ (
                books["predecessor"][before] * selector.hidden_projection(hidden_D)
            )
            own = (ids[chosen] == gold).nonzero()
            ce = float(
                -torch.log_softmax(logits_V, 0)[
                    place[0, 0] if len(place) else min(int(torch.searchsorted(ids, gold)), len(ids) - 1)
                ]
            )
            prefix *= (0.5 * math.exp(-ce) + 0.5) if valid else 0.0
            rows.append(
                (prefix if valid else 0.0, -torch.log_softmax(scores, 0)[own[0, 0]] if valid and len(own) else None)
            )
            missed += valid and not len(own)
            is_right = bool(valid and len(own) and ids[chosen[scores.argmax()]] == gold)
            all_right = all_right and is_right
            right[slot] += is_right
            standing[slot] += all_right
            before = gold if valid else 0
        for slot, (_, own_loss) in enumerate(rows):
            weight = math.exp(-slot / 2.0) if name == "ce" else sum(each for each, _ in rows[slot:]) / 3
            if own_loss is not None:
                expected = expected + weight * own_loss
    assert missed > 0, "the test needs tokens that are not among the candidates"
    assert float(loss.detach()) == pytest.approx(float(expected.detach()) * 0.7 / 11.0, rel=1e-4)
    assert metrics.selector_4K[2].tolist() == right.tolist() and metrics.selector_4K[3].tolist() == standing.tolist()
    assert metrics.selector_4K[0].tolist() == pack.slots.valid_AK.sum(0).tolist()
    assert int(metrics.selector_2[1]) == int(pack.slots.valid_AK.sum()) - missed


def gradients(one: Trainer, pack: Pack, sample: BlockSample) -> torch.Tensor:
    """Gradients of all weights of the selector, concatenated."""
    assert isinstance(one.drafter, DFlash2Trainable)
    selector = one.drafter.network.candidate_selector
    hidden_TD = torch.randn(len(pack.anchors_A) * 3, 32, generator=torch.Generator().manual_seed(0))
    own = hidden_TD, pack, one.head, one.embedding_VD, LossConfig(), 11.0
    loss, _ = one.drafter.selector_loss(*own, is_measured=False, is_learning=True, sample=sample)
    return torch.cat([each.flatten() for each in torch.autograd.grad(loss, list(selector.parameters()))])


@pytest.mark.slow
def test_a_sample_of_blocks_has_the_gradient_of_all_on_average(tmp_path: Path) -> None:
    """Each block is in half of the samples, and weighs twice as much there; a sample of everything is everything."""
    one = trainer_2(tmp_path)
    loud_selector(one.drafter.network)
    pack = a_pack(one)
    whole = gradients(one, pack, BlockSample())
    assert torch.equal(whole, gradients(one, pack, BlockSample(1.0, "any")))
    taken = [BlockSample(0.5, str(step)).of(pack).tolist() for step in range(400)]
    assert len({tuple(each) for each in taken}) > 100, "other blocks in every step"
    for block in range(len(pack.anchors_A)):
        assert sum(block in each for each in taken) / 400 == pytest.approx(0.5, abs=0.1)
    mean = sum((gradients(one, pack, BlockSample(0.5, str(step))) for step in range(400)), torch.zeros(())) / 400
    assert float((mean - whole).norm() / whole.norm()) < 0.1
    assert float((mean / 2 - whole).norm() / whole.norm()) > 0.4, "the measure sees a weight that is missing"


def test_a_sample_does_not_depend_on_packs(tmp_path: Path) -> None:
    """One pack of all blocks, or one for each document."""
    one, sample = trainer_2(tmp_path), BlockSample(0.5, "7")
    chosen, _, _ = one.planner.step(one.state.place)
    parts = [one.packer.pack([each]) for each in chosen]
    counts = [len(each.anchors_A) for each in parts]
    firsts = [sum(counts[:number]) for number in range(len(counts))]
    split = [first + block for first, each in zip(firsts, parts, strict=True) for block in sample.of(each).tolist()]
    assert split == sample.of(one.packer.pack(chosen)).tolist()


@pytest.mark.slow
def test_looks_at_held_out_documents_see_every_block(tmp_path: Path) -> None:
    looks = []
    for share in (1.0, 0.1):
        one = trainer_2(tmp_path / str(share), config(selector_share=share))
        loud_selector(one.drafter.network)
        looks.append(one.evaluate(*one.heldout["heldout"]))
    assert looks[0] == looks[1] and {"selector_lift", "recall16"} <= looks[0].keys()


def test_a_step_without_a_sampled_block_has_gradients_of_zero(tmp_path: Path) -> None:
    one = trainer_2(tmp_path)
    loud_selector(one.drafter.network)
    assert gradients(one, a_pack(one), BlockSample(1e-12, "")).abs().max() == 0


def run_of(one: Trainer) -> tuple[list[dict[str, Any]], list[float]]:
    """Figures of each step, and how far successors moved from zero."""
    assert isinstance(one.drafter, DFlash2Trainable)
    steps, moved, selector = list[dict[str, Any]](), list[float](), one.drafter.network.candidate_selector

    def note(line: dict[str, Any]) -> None:
        steps.append(line)
        moved.append(float(selector.get_parameter("successor_factor").detach().abs().max()))

    one.run(note)
    return steps, moved


@pytest.mark.slow
def test_the_selector_learns_after_its_share_of_the_run(tmp_path: Path) -> None:
    one = trainer_2(tmp_path, config(max_steps=20, selector_from=0.25, heldout_every=5))
    steps, moved = run_of(one)
    assert max(moved[:5]) == 0.0 < min(moved[5:])
    kernel = one.network.state_dict()["layers.0.attention_conv.base_kernel"]
    assert (kernel[:, 1] != 0).any(), "convolution learns all along"
    assert "selector_lift" not in steps[3] and "selector_lift" in steps[10]
    looks = [line["heldout"] for line in steps if "heldout" in line]
    assert looks[0]["selector_lift"] == pytest.approx(0.0, abs=1e-6)
    assert looks[-1]["eal"] == pytest.approx(looks[-1]["base_eal"] + looks[-1]["selector_lift"])


@pytest.mark.slow
def test_it_lifts_a_body_that_stays_as_it_is(tmp_path: Path) -> None:
    """The texts go through the vocabulary in steps: what comes next is told by what came before."""
    one = trainer_2(tmp_path, config(max_steps=40, selector_from=0.0, heldout_every=39, optim=OptimConfig(lr=2e-2)))
    for name, parameter in one.network.named_parameters():
        if "selector" not in name:
            parameter.register_hook(torch.zeros_like)
    steps, _ = run_of(one)
    look = steps[-1]["heldout"]
    knowing_nothing = math.log(16)
    assert look["selector_lift"] > 0 and look["selector_loss"] < knowing_nothing


@pytest.mark.slow
def test_the_body_learns_as_without_a_selector(tmp_path: Path) -> None:
    """Hidden states and logits are taken as they are: the same body, whatever the selector's loss weighs."""
    bodies = []
    for weight in (1e-3, 10.0):
        settings = config(
            max_steps=6, selector_from=0.0, loss=LossConfig("ce", selector=weight), optim=OptimConfig(clip=1e9)
        )
        one = trainer_2(tmp_path / str(weight), settings)
        one.run()
        bodies.append({name: tensor for name, tensor in one.network.state_dict().items() if "selector" not in name})
    assert all(torch.equal(bodies[0][name], bodies[1][name]) for name in bodies[0])


@pytest.mark.slow
def test_a_run_is_resumed_with_its_factors(tmp_path: Path) -> None:
    settings = config(max_steps=6, selector_from=0.5)
    assert_resumes(lambda folder: trainer_2(folder, settings), tmp_path, step=4, name="objective")


def test_codebooks_written_out_score_as_their_factors(tmp_path: Path) -> None:
    one = trainer_2(tmp_path)
    assert isinstance(one.drafter, DFlash2Trainable)
    loud_selector(network := one.drafter.network)
    whole = DFlash2Network.of(network.config, materialised(network.state_dict(), one.embedding_VD))
    tokens = torch.tensor([[3, 7], [0, 23]])
    for book in ("predecessor_codebook", "successor_codebook"):
        rows = network.candidate_selector.rows(book, tokens, one.embedding_VD)
        torch.testing.assert_close(rows, whole.candidate_selector.rows(book, tokens), atol=1e-5, rtol=1e-5)
    assert whole.candidate_selector.get_parameter("successor_codebook").shape == (VOCAB, 6)


@pytest.mark.slow
def test_the_command_continues_a_v1_drafter(tmp_path: Path) -> None:
    """v1 in, DFlash 2 out, with a draft vocabulary; served by the engine as it is teacher-forced."""
    run, second = tmp_path / "v1", tmp_path / "v2"
    paceline(*TINY, "--max-steps", 3, "--out", run, "--draft-vocab", 200, "--limit", 16, "--serve-share", "0")
    words = ("--answers", run / "regenerate" / "answers", "--init", run / "drafter", "--out", second)
    paceline(*TINY, "--max-steps", 6, *words, "--drafter-kind", "dflash2", "--selector-rank", 8, "--selector-from", 0.2)
    stored = read_stored(second / "drafter")
    settings, tensors = stored.config, stored.tensors
    assert settings.second is not None and settings.second.selector_rank == 8
    assert tensors["candidate_selector.successor_codebook"].shape == (settings.vocab_size, 8)
    assert tensors["candidate_selector.successor_codebook"].abs().max() > 0
    drafter = read_drafter(second / "drafter")
    assert drafter.name == "dflash2" and drafter.draft_ids is not None
    served = json.loads((second / "heldout.json").read_text())
    assert served["served_of_walked"] == pytest.approx(served["teacher_forced"], rel=0.1)
    last = list(RunFolder(second).metrics())[-1]["heldout"]
    assert {"selector_lift", "base_eal", "recall16", "selector_loss"} <= last.keys()
    assert read_drafter(run / "drafter").name == "dflash"
    assert load_file(second / "drafter" / "model.safetensors").keys() == tensors.keys()
