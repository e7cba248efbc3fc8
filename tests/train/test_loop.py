"""The loop: packs add up, figures are what they say, the schedule is followed, held-out documents are looked at."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_training import HIDDEN, VOCAB, config, documents, embedding, steps_of, tiny_decoder, trainer
from torch.nn import functional as F

from paceline.errors import ConfigError
from paceline.train.config import LOSSES, LoopConfig, LossConfig, OptimConfig
from paceline.train.documents.dataset import Place
from paceline.train.features.hidden_states import OnlineFeatures
from paceline.train.learn.checkpoint import best_checkpoint
from paceline.train.learn.loop import Trainer, learning_rate_share
from paceline.train.learn.losses import Head, unigram_entropy
from paceline.train.learn.packs import heldout_anchors


def test_entropy_of_words() -> None:
    assert unigram_entropy(np.array([5, 5, 0, 0])) == pytest.approx(math.log(2))
    assert unigram_entropy(np.full(VOCAB, 3)) == pytest.approx(math.log(VOCAB))
    half = unigram_entropy(np.array([4, 4, 4, 4]), np.array([0, 2]))
    assert half == pytest.approx(0.5 * math.log(2)), "half of the places count, each with one bit"
    assert unigram_entropy(np.array([0, 0, 4]), np.array([0])) == 0.0


def objectives(folder: Path, **changes: Any) -> list[float]:
    return [figures["objective"] for figures in steps_of(trainer(folder, config(**changes)))]


def watched(folder: Path, **changes: Any) -> Trainer:
    """A trainer that looks at other documents, as held out and as out of distribution."""
    one = trainer(folder, config(**changes))
    others = documents(14)[10:]
    features = OnlineFeatures(tiny_decoder(), others, one.network.config.target_layer_ids, needs_final=False)
    one.heldout = {"heldout": (others, features), "ood": (others[:2], features)}
    return one


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["ce", "d-pace", "lk-hybrid"])
def test_packs_and_ways_of_attending_change_nothing(tmp_path: Path, loss: str) -> None:
    changes: dict[str, Any] = {"max_steps": 4, "loss": LossConfig(loss)}
    expected = objectives(tmp_path / "a", **changes)
    assert objectives(tmp_path / "b", **changes, blocks_per_pack=1) == pytest.approx(expected, rel=1e-5)
    assert objectives(tmp_path / "c", **changes, blocks_per_pack=100) == pytest.approx(expected, rel=1e-5)
    assert objectives(tmp_path / "d", **changes, attention="sdpa") == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_shares_of_a_step_add_up_to_it(tmp_path: Path) -> None:
    """Each of three processes computes its share."""
    one = trainer(tmp_path)
    chosen, num_slots, _ = one.planner.step(Place())
    runs = []
    for shares in ([chosen], [chosen[rank::3] for rank in range(3)]):
        one.network.zero_grad()
        loss = sum(one.forward_backward(share, num_slots, one.head)[0] for share in shares)
        runs.append((loss, [parameter.grad for parameter in one.network.parameters()]))
    assert runs[0][0] == pytest.approx(runs[1][0], rel=1e-6)
    torch.testing.assert_close(runs[0][1], runs[1][1], atol=1e-6, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "optimiser"), [*((name, "adamw") for name in LOSSES), ("d-pace", "muon")])
def test_every_loss_and_optimiser_learns(tmp_path: Path, loss: str, optimiser: str) -> None:
    figures = steps_of(
        trainer(tmp_path, config(loss=LossConfig(loss), optim=OptimConfig(optimiser, lr=3e-3), max_steps=12))
    )
    assert sum(each["loss"] for each in figures[-3:]) < sum(each["loss"] for each in figures[:3])


@pytest.mark.slow
def test_autocast_stays_near_full_precision(tmp_path: Path) -> None:
    full, half = objectives(tmp_path / "a"), objectives(tmp_path / "b", autocast=True)
    assert half == pytest.approx(full, rel=0.02) and half != full


@pytest.mark.slow
def test_an_easy_text_is_learned(tmp_path: Path) -> None:
    """How much is not asked, only that it is far more than steps differ by chance."""
    settings = config(max_steps=40, blocks_per_step=64, anchors=16, blocks_per_pack=64, loss=LossConfig("d-pace"))
    figures = steps_of(trainer(tmp_path, settings))
    assert figures[0]["eal"] < figures[-1]["eal"] and figures[-1]["loss"] < 0.7 * figures[0]["loss"]


@pytest.mark.slow
def test_the_first_figures_are_cross_entropy_by_hand(tmp_path: Path) -> None:
    """One step of one pack: the loss per slot, the objective, and how often each label was the most likely."""
    settings = config(max_steps=1, blocks_per_pack=100, loss=LossConfig("ce", gamma=2.0))
    one, target = trainer(tmp_path, settings), tiny_decoder()
    chosen, num_slots, _ = one.planner.step(Place())
    pack = one.packer.pack(chosen)
    with torch.no_grad():
        logits = target.head(one.drafter.hidden(pack, embedding(target), False)).unflatten(0, (-1, 3))
    labels, valid = pack.slots.labels_AK, pack.slots.valid_AK
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    weights = torch.exp(-torch.arange(3) / 2.0)
    (figures,) = steps_of(one)
    assert figures["loss"] == pytest.approx(float(losses[valid].mean()), rel=1e-5)
    assert figures["objective"] == pytest.approx(float((losses * weights * valid).sum()) / num_slots, rel=1e-5)
    right = (logits.argmax(-1) == labels) & valid
    assert figures["recall1"] == pytest.approx((right.sum(0) / valid.sum(0)).tolist(), abs=1e-4)


@pytest.mark.slow
def test_each_step_tells_what_it_did(tmp_path: Path) -> None:
    one = trainer(tmp_path, config(max_steps=3), peak_flops=1e12)
    figures = steps_of(one)
    for number, each in enumerate(figures, start=1):
        assert each["step"] == number and each["blocks"] == 8 * number
        assert all(
            each[name] > 0 for name in ("tokens_per_s", "blocks_per_s", "grad_norm", "lr", "seconds", "flops_share")
        )
        assert len(each["recall1"]) == len(each["recall16"]) == 3
        assert all(first <= near for first, near in zip(each["recall1"], each["recall16"], strict=True))
        assert 1.0 <= each["eal"] <= 4.0 and each["loss"] > 0
    assert figures[0]["tokens"] < figures[1]["tokens"] and figures[0]["epoch"] < figures[-1]["epoch"]
    per_block = (
        6 * sum(each.numel() for each in one.network.layers.parameters() if each.ndim == 2) * 4 + 4 * 3 * HIDDEN * VOCAB
    )
    assert figures[-1]["flops_share"] == pytest.approx(per_block * figures[-1]["blocks_per_s"] / 1e12)


class TestEnds:
    @pytest.mark.slow
    def test_epochs_pass_every_document_that_often(self, tmp_path: Path) -> None:
        one = trainer(tmp_path, config(max_steps=None, epochs=3.0))
        figures = steps_of(one)
        assert len(figures) == one.total_steps and figures[-1]["epoch"] == pytest.approx(3.0, abs=0.3)

    def test_minutes_end_a_run_too(self, tmp_path: Path) -> None:
        one = trainer(tmp_path, config(max_steps=100, max_minutes=1.0))
        one.state = replace(one.state, elapsed_s=59.9999)
        assert one.share_done == pytest.approx(0.99999, abs=1e-4)
        assert len(steps_of(one)) == 1 and one.share_done >= 1.0
        assert [path.name for path in tmp_path.iterdir()] == ["step-000001"], "its end is kept"

    def test_evaluations_count_as_minutes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A training of one minute whose evaluations took most of it ran for longer."""
        one = watched(tmp_path, max_steps=100, max_minutes=1.0, heldout_every=1)
        clock = [0.0]
        monkeypatch.setattr(time, "monotonic", lambda: clock[0])
        monkeypatch.setattr(one, "evaluate", lambda *_: clock.__setitem__(0, clock[0] + 12.0) or {"eal": 1.0})
        assert len(steps_of(one)) == 4, "two sets, each looked at for twelve seconds after a step"
        assert one.state.seconds < 10.0

    @pytest.mark.slow
    def test_the_learning_rate_warms_up_and_falls(self, tmp_path: Path) -> None:
        settings = config(max_steps=50, blocks_per_step=1, optim=OptimConfig(lr=1e-3))
        rates = [each["lr"] for each in steps_of(trainer(tmp_path, settings))]
        assert rates[0] == pytest.approx(1e-5) and rates[1] == pytest.approx(5e-4) and rates[2] == pytest.approx(1e-3)
        assert rates[2:] == sorted(rates[2:], reverse=True)
        assert learning_rate_share(1.0) == pytest.approx(0.05) and learning_rate_share(0.52) == pytest.approx(0.525)


@pytest.mark.slow
class TestHeldOut:
    def test_it_is_looked_at_every_so_often_and_at_the_end(self, tmp_path: Path) -> None:
        figures = steps_of(watched(tmp_path, max_steps=5, heldout_every=2))
        assert [each["step"] for each in figures if "heldout" in each] == [2, 4, 5]
        assert {"loss", "eal", "accuracy", "recall1", "recall16"} <= figures[1]["heldout"].keys()
        assert figures[1]["ood"]["eal"] >= 1.0

    def test_looking_teaches_nothing(self, tmp_path: Path) -> None:
        plain = objectives(tmp_path / "a")
        looked = [each["objective"] for each in steps_of(watched(tmp_path / "b", heldout_every=1))]
        assert looked == pytest.approx(plain, rel=1e-6)

    def test_it_measures_all_slots_of_the_same_anchors_each_time(self, tmp_path: Path) -> None:
        one = watched(tmp_path, blocks_per_pack=3)
        docs, features = one.heldout["heldout"]
        first = one.evaluate(docs, features)
        one.config = replace(one.config, blocks_per_pack=100)
        second = one.evaluate(docs, features)
        assert first["loss"] == pytest.approx(second["loss"], rel=1e-5) and first["recall16"] == second["recall16"]
        num_blocks = sum(len(anchors) for _, anchors in heldout_anchors(docs, 8))
        assert first["recall1"][0] * num_blocks == pytest.approx(round(first["recall1"][0] * num_blocks), abs=0.01)
        assert all(parameter.grad is None for parameter in one.network.parameters())

    def test_a_regression_out_of_distribution_is_said(self, tmp_path: Path) -> None:
        one, notices = watched(tmp_path, max_steps=4, heldout_every=1), []
        levels = iter([2.0, 2.5, 2.45, 2.0])

        def evaluate(docs: list[Any], features: Any) -> dict[str, Any]:
            return {"eal": next(levels) if len(docs) == 2 else 1.0}

        one.evaluate = evaluate  # type: ignore[method-assign]
        one.run(notice=notices.append)
        assert (
            len(notices) == 1
            and "step 4: out of distribution 2.00 tokens a round are expected, 2.50 were before" in notices[0]
        )


def test_weight_decay_spares_norms_and_gradients_are_clipped(tmp_path: Path) -> None:
    one = trainer(tmp_path, config(max_steps=1, optim=OptimConfig(lr=1e-3, weight_decay=0.5, clip=1e-9)))
    before = {name: tensor.clone() for name, tensor in one.network.state_dict().items()}
    one.run()
    for name, tensor in one.network.state_dict().items():
        if "norm" in name:
            assert (tensor - before[name]).abs().max() < 3e-3
    rate = 1e-3 * learning_rate_share(0.0)
    shrunk = before["layers.0.mlp.up_proj.weight"] * (1 - 0.5 * rate)
    assert (one.network.state_dict()["layers.0.mlp.up_proj.weight"] - shrunk).abs().max() < 1.5 * rate


@pytest.mark.slow
class TestKeepBest:
    @staticmethod
    def _kept(one: Trainer, looks: list[tuple[float, float]]) -> tuple[int | None, list[torch.Tensor]]:
        """Step whose weights are kept when held-out and other documents look so, and the first weights after each
        step."""
        values, weights = iter([each for look in looks for each in look]), list[torch.Tensor]()
        one.evaluate = lambda documents, features: {"eal": next(values)}
        one.run(lambda figures: weights.append(one.network.state_dict()["fc.weight"].clone()))
        kept = best_checkpoint(one.folder)
        assert kept is None or torch.equal(kept[0]["fc.weight"], weights[kept[1]["step"] - 1])
        return kept and kept[1]["step"], weights

    def test_the_weights_of_the_best_look_stay(self, tmp_path: Path) -> None:
        one = watched(tmp_path, max_steps=4, heldout_every=1, keep="best")
        step, weights = self._kept(one, [(1.0, 2.0), (3.0, 2.0), (2.0, 2.0), (2.5, 2.0)])
        assert step == 2 and not torch.equal(weights[1], weights[3])

    def test_a_look_that_forgets_others_does_not_count(self, tmp_path: Path) -> None:
        one = watched(tmp_path, max_steps=3, heldout_every=1, keep="best")
        assert self._kept(one, [(1.0, 2.0), (3.0, 1.5), (2.0, 2.0)])[0] == 3

    def test_by_default_nothing_is_kept(self, tmp_path: Path) -> None:
        assert self._kept(watched(tmp_path, max_steps=2, heldout_every=1), [(1.0, 2.0), (3.0, 2.0)])[0] is None

    def test_what_serves_best_is_kept_beside_the_last(self, tmp_path: Path) -> None:
        """Looks that are no better than before are not served, but for the last one."""
        one = watched(tmp_path, max_steps=5, heldout_every=1, serve_share=1.0)
        rates, served = {1: 1.5, 2: 1.2, 4: 1.4, 5: 1.3}, list[int]()

        def serve(weights: dict[str, torch.Tensor]) -> float:
            served.append(one.state.step)
            assert torch.equal(weights["fc.weight"], one.network.state_dict()["fc.weight"])
            return rates[one.state.step]

        one.served = serve
        step, _ = self._kept(one, [(1.5, 2.0), (3.0, 2.0), (2.0, 2.0), (3.5, 2.0), (2.0, 2.0)])
        assert (served, step, one.state.best_served) == ([1, 2, 4, 5], 1, 1.5)

    def test_of_weights_that_serve_alike_those_are_kept_of_which_more_is_expected(self, tmp_path: Path) -> None:
        """A few served prompts cannot tell 1.50 from 1.47; all held-out documents can tell 1.5 from 3."""
        one = watched(tmp_path, max_steps=4, heldout_every=1, serve_share=1.0)
        one.served = lambda _: {1: 1.5, 2: 1.47, 3: 1.44, 4: 1.47}[one.state.step]
        step, _ = self._kept(one, [(1.5, 2.0), (3.0, 2.0), (3.5, 2.0), (2.0, 2.0)])
        assert (step, one.state.best_served) == (2, 1.5), "1.44 is too little, and of the last no more is expected"

    def test_serving_takes_its_share_of_the_time_and_no_more(self, tmp_path: Path) -> None:
        one, served = watched(tmp_path, max_steps=4, heldout_every=1, serve_share=0.0), list[int]()
        one.served = lambda weights: served.append(one.state.step) or 1.5
        one.state = replace(one.state, serving_s=1e-9)
        self._kept(one, [(1.5, 2.0), (3.0, 2.0), (3.1, 2.0), (3.5, 2.0)])
        assert served == [4], "at the end only"

    def test_a_resumed_run_knows_what_was_best(self, tmp_path: Path) -> None:
        self._kept(watched(tmp_path, max_steps=2, heldout_every=1, keep="best"), [(1.0, 2.0), (3.0, 2.0)])
        one = watched(tmp_path, max_steps=2, heldout_every=1, keep="best")
        assert one.resume() and one.state.best_eal == 3.0


@pytest.mark.parametrize("changes", [{"epochs": 0.0}, {"blocks_per_step": 0}, {"anchors": 0}, {"heldout_every": 0}])
def test_impossible_settings_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be (above 0|at least 1, not 0)"):
        LoopConfig(**changes)
    with pytest.raises(ConfigError, match="name must be one of adamw, muon"):
        OptimConfig("sgd")


@pytest.mark.slow
def test_log_vocabulary_is_the_loss_of_knowing_nothing(tmp_path: Path) -> None:
    one = trainer(tmp_path, config(max_steps=1))
    one.network.norm.weight.data.zero_()
    assert steps_of(one)[0]["loss"] == pytest.approx(math.log(VOCAB), rel=1e-5)


@pytest.mark.slow
def test_a_loss_vocabulary_learns_over_all_tokens_and_held_out_looks_are_those_of_the_draft_vocabulary(
    tmp_path: Path,
) -> None:
    settings = config(max_steps=2, loss=LossConfig("ce", vocab=12))
    one = watched(tmp_path)
    whole = trainer(tmp_path / "both", settings)
    kept = torch.tensor([1, 2, 3, 5, 8])
    whole.heldout_head = Head(whole.head.weight_VD[kept], columns=kept)
    assert whole.vocabulary is not None, "it is drawn from the whole head"
    docs, features = one.heldout["heldout"]
    cut, full = whole.evaluate(docs, features), trainer(tmp_path / "full", settings).evaluate(docs, features)
    assert cut["loss"] != full["loss"] and steps_of(whole)[-1]["objective"] > 0
