"""Losses against the whole vocabulary spelt out in float64, D-PACE and LK against their formulas, figures counted by
hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.errors import ConfigError
from paceline.train.config import LOSSES, LossConfig
from paceline.train.learn import losses
from paceline.train.learn.losses import Head, LossVocabulary, SlotMetrics, Slots, default_gamma, head_loss

VOCAB, HIDDEN, SLOTS, BLOCKS = 23, 6, 5, 7


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def batch(blocks: int = BLOCKS) -> tuple[Tensor, Slots, Tensor]:
    """Hidden states, slots of which some are not valid, a head's weight."""
    labels_AK = torch.randint(0, VOCAB, (blocks, SLOTS), generator=torch.Generator().manual_seed(1))
    valid_AK = torch.arange(SLOTS) < torch.tensor([SLOTS, 2, SLOTS, 1, 4, SLOTS, 0] * blocks)[:blocks, None]
    slots = Slots(labels_AK, valid_AK, draw(blocks, SLOTS, HIDDEN, seed=2))
    return draw(blocks * SLOTS, HIDDEN).requires_grad_(), slots, draw(VOCAB, HIDDEN, seed=3)


def weights_by_formula(config: LossConfig, ce_AK: Tensor, valid_AK: Tensor) -> Tensor:
    """Slot by slot from reference/dflash.md; d-pace over the number of slots besides."""
    weight_AK = torch.zeros_like(ce_AK)
    for block, (ce_K, valid_K) in enumerate(zip(ce_AK.tolist(), valid_AK.tolist(), strict=True)):
        prefixes, standing = [], 1.0
        for ce, valid in zip(ce_K, valid_K, strict=True):
            standing *= (1 - config.alpha) * math.exp(-ce) + config.alpha
            prefixes.append(standing if valid else 0.0)
        for k, valid in enumerate(valid_K):
            weight = sum(prefixes[k:]) / len(ce_K) if config.name == "d-pace" else math.exp(-k / (config.gamma or 4.0))
            weight_AK[block, k] = weight if valid else 0.0
    return weight_AK


def naive(config: LossConfig, hidden_TD: Tensor, slots: Slots, weight_VD: Tensor, scale: float, cap: float) -> Tensor:
    """The sum over valid slots, all logits at once."""
    assert slots.final_AKD is not None
    logits = hidden_TD.view(*slots.labels_AK.shape, HIDDEN) @ weight_VD.T * scale
    logits = torch.tanh(logits / cap) * cap if cap else logits
    draft, target = logits.softmax(-1), (slots.final_AKD.double() @ weight_VD.T).softmax(-1)
    ce = F.cross_entropy(logits.flatten(0, 1), slots.labels_AK.flatten(), reduction="none").view(slots.labels_AK.shape)
    kl = (target * (target.log() - draft.log())).sum(-1)
    accepted = torch.stack([torch.minimum(draft[..., token], target[..., token]) for token in range(VOCAB)]).sum(0)
    share = torch.exp(-3 * accepted.detach())
    tv = 0.5 * (draft - target).abs().sum(-1)
    each = {"ce": ce, "d-pace": ce, "kl": kl, "lk": -accepted.log(), "lk-hybrid": share * kl + (1 - share) * tv}
    return (each[config.name] * weights_by_formula(config, ce.detach(), slots.valid_AK)).sum()


@pytest.mark.parametrize(("scale", "cap"), [(1.0, 0.0), (0.7, 0.0), (1.3, 2.5)])
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_and_gradient_as_spelt_out(
    name: str, scale: float, cap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of two blocks of five slots, the last one smaller; divided by any number of slots."""
    monkeypatch.setattr(losses, "CHUNK_ROWS", 2 * SLOTS)
    config = LossConfig(name, gamma=4.0)
    hidden_TD, slots, weight_VD = batch()
    loss, _ = head_loss(hidden_TD, slots, Head(weight_VD, scale, cap), config, 13.0)
    (3.0 * loss).backward()
    twin = hidden_TD.detach().double().requires_grad_()
    expected = naive(config, twin, slots, weight_VD.double(), scale, cap) / 13.0
    (3.0 * expected).backward()
    assert hidden_TD.grad is not None and twin.grad is not None
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(hidden_TD.grad.double(), twin.grad, atol=1e-6, rtol=1e-4)
    assert not hidden_TD.grad.view(BLOCKS, SLOTS, -1)[~slots.valid_AK].any()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("rows", [1, SLOTS, 3 * SLOTS + 2, 1000])
def test_chunks_change_nothing(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for chunk in (rows, BLOCKS * SLOTS):
        monkeypatch.setattr(losses, "CHUNK_ROWS", chunk)
        hidden_TD, slots, weight_VD = batch()
        loss, _ = head_loss(hidden_TD, slots, Head(weight_VD), LossConfig(name), 9.0)
        loss.backward()
        results.append((loss.detach(), hidden_TD.grad))
        _, metrics = head_loss(hidden_TD.detach(), slots, Head(weight_VD), LossConfig(name), 9.0)
        assert metrics.sums_4K[0].tolist() == slots.valid_AK.sum(0).tolist(), (
            "without gradients every chunk is measured"
        )
    torch.testing.assert_close(results[0], results[1], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["ce", "d-pace"])
def test_labels_behind_the_end_teach_nothing(name: str) -> None:
    results = []
    for shift in (0, 1):
        hidden_TD, slots, weight_VD = batch()
        labels = torch.where(slots.valid_AK, slots.labels_AK, (slots.labels_AK + shift) % VOCAB)
        loss, _ = head_loss(hidden_TD, Slots(labels, slots.valid_AK), Head(weight_VD), LossConfig(name), 9.0)
        loss.backward()
        results.append((loss.detach(), hidden_TD.grad))
    torch.testing.assert_close(results[0], results[1], atol=0, rtol=0)


def test_bfloat16_heads_stay_near_float32() -> None:
    for name in LOSSES:
        results = []
        for dtype in (torch.float32, torch.bfloat16):
            hidden_TD, slots, weight_VD = batch()
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
                loss, _ = head_loss(hidden_TD, slots, Head(weight_VD.to(dtype)), LossConfig(name), 9.0)
            loss.backward()
            assert hidden_TD.grad is not None and hidden_TD.grad.dtype is torch.float32
            results.append((loss.item(), hidden_TD.grad))
        assert results[1][0] == pytest.approx(results[0][0], rel=0.02)
        within = 0.15 if name == "lk" else 0.02  # the smaller of two nearly equal probabilities may change sides
        assert (results[1][1] - results[0][1]).norm() < within * results[0][1].norm()


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_d_pace_weights_are_the_formula(alpha: float) -> None:
    config = LossConfig("d-pace", alpha=alpha)
    ce_AK, (_, slots, _) = draw(BLOCKS, SLOTS).abs(), batch()
    weights = losses.slot_weights(config, ce_AK, slots.valid_AK)
    torch.testing.assert_close(weights, weights_by_formula(config, ce_AK, slots.valid_AK))
    if alpha == 1.0:  # every prefix is one: the first of five slots has all five behind it
        assert weights[0].tolist() == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_weights_of_ce_decay_as_the_paper_says() -> None:
    weights = losses.slot_weights(LossConfig("ce"), torch.zeros(1, 7), torch.ones(1, 7, dtype=torch.bool))
    assert weights[0].tolist() == pytest.approx([math.exp(-k / 4) for k in range(7)])
    assert [default_gamma(size) for size in (8, 10, 16)] == [4.0, 5.0, 7.0]


def test_lk_is_the_chance_that_a_sampled_draft_stands() -> None:
    """sum_v draft(v) * min(1, target(v) / draft(v)), token by token."""
    config = LossConfig("lk", gamma=1e9)
    hidden_TD, slots, weight_VD = batch(1)
    assert slots.final_AKD is not None
    loss, metrics = head_loss(hidden_TD.detach(), slots, Head(weight_VD), config, SLOTS)
    drafts, targets = (hidden_TD.detach() @ weight_VD.T).softmax(-1), (slots.final_AKD[0] @ weight_VD.T).softmax(-1)
    chances = [
        sum(float(q) * min(1.0, float(p) / float(q)) for q, p in zip(draft, target, strict=True))
        for draft, target in zip(drafts, targets, strict=True)
    ]
    mean = -sum(math.log(chance) for chance in chances) / SLOTS
    assert float(loss) == pytest.approx(mean, rel=1e-4) == metrics.rates()["loss"]


def test_figures_counted_by_hand() -> None:
    """Three blocks of three slots over 40 tokens; the hidden states are the logits."""
    ranks = [[0, 0, 5], [0, 16, 0], [3, 0, 0]]  # rank of each label, 0 the most likely
    valid_AK = torch.tensor([[True, True, True], [True, True, True], [True, True, False]])
    logits = -torch.arange(40.0).repeat(9, 1)
    slots = Slots(torch.tensor(ranks), valid_AK)
    loss, metrics = head_loss(logits, slots, Head(torch.eye(40)), LossConfig("ce"), 8.0)
    rates = metrics.rates()
    assert rates["recall1"] == [0.6667, 0.6667, 0.5]
    assert rates["recall16"] == [1.0, 0.6667, 1.0]
    assert rates["accuracy"] == pytest.approx(5 / 8)
    assert rates["eal"] == pytest.approx(1 + 2 / 3 + 1 / 3 + 0 / 2)
    log_z = float(torch.logsumexp(-torch.arange(40.0), 0))
    assert rates["loss"] == pytest.approx(log_z + (0 + 0 + 5 + 0 + 16 + 0 + 3 + 0) / 8)
    assert loss.requires_grad is False
    twice = SlotMetrics.zero(3)
    twice.flat += metrics.flat
    twice.flat += metrics.flat
    assert twice.rates() == rates and twice.sums_4K[0].tolist() == [6, 6, 4]


def test_of_equal_logits_the_one_that_drafting_takes_counts() -> None:
    slots = Slots(torch.tensor([[2, 1]]), torch.ones(1, 2, dtype=torch.bool))
    logits = torch.tensor([[0.0, 1.0, 1.0], [0.0, 1.0, 1.0]])
    _, metrics = head_loss(logits, slots, Head(torch.eye(3)), LossConfig("ce"), 2.0)
    taken = int(logits[0].max(-1).indices)
    assert metrics.sums_4K[1].tolist() == [float(taken == 2), float(taken == 1)]


@pytest.mark.parametrize("name", LOSSES)
def test_logits_are_never_held_for_all_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    heights = []
    logits_of = Head.logits

    def counted(self: Head, hidden_RD: Tensor) -> Tensor:
        heights.append(len(hidden_RD))
        return logits_of(self, hidden_RD)

    monkeypatch.setattr(Head, "logits", counted)
    blocks = 200
    hidden_TD, slots, weight_VD = batch(blocks)
    loss, _ = head_loss(hidden_TD, slots, Head(weight_VD), LossConfig(name), 9.0)
    assert sum(heights) == blocks * SLOTS and max(heights) <= losses.CHUNK_ROWS < blocks * SLOTS
    held: list[Any] = [getattr(loss.grad_fn, "saved_tensors", ())]
    assert all(tensor.shape[-1] != VOCAB for tensors in held for tensor in tensors)


class TestLossVocabulary:
    weight_VD = draw(200, HIDDEN, seed=4)
    counts_V = torch.randint(0, 50, (200,), generator=torch.Generator().manual_seed(5))

    def head(self, size: int, labels: Tensor, seed: int = 0) -> Head:
        return LossVocabulary(self.weight_VD, self.counts_V, size).head(labels, torch.Generator().manual_seed(seed))

    def test_it_holds_every_label_and_the_most_frequent_tokens(self) -> None:
        labels = torch.randint(0, 200, (9, 4), generator=torch.Generator().manual_seed(6))
        head = self.head(40, labels)
        assert head.columns is not None and head.columns.tolist() == sorted(set(head.columns.tolist()))
        assert set(labels.flatten().tolist()) <= set(head.columns.tolist())
        frequent = torch.argsort(self.counts_V, descending=True, stable=True)[:30].tolist()
        assert set(frequent) <= set(head.columns.tolist())
        assert torch.equal(head.columns[head.local(labels)[0]], labels)
        assert torch.equal(head.weight_VD, self.weight_VD[head.columns])
        assert len(head.columns) <= 40 + len(set(labels.flatten().tolist()))

    def test_all_tokens_are_full_cross_entropy(self) -> None:
        """The sample holds all that is left when the labels bring in what the frequent ones leave."""
        hidden_TD, slots, _ = batch()
        rest = torch.arange(200)
        full, sampled = Head(self.weight_VD), self.head(199, rest)
        assert sampled.columns is not None and len(sampled.columns) == 200
        for name in ("ce", "d-pace"):
            pair = []
            for head in (full, sampled):
                leaf = hidden_TD.detach().requires_grad_()
                loss, _ = head_loss(leaf, slots, head, LossConfig(name), 5.0)
                loss.backward()
                pair.append((loss.detach(), leaf.grad))
            torch.testing.assert_close(pair[0], pair[1], atol=1e-6, rtol=1e-5)

    @pytest.mark.slow
    def test_the_partition_sum_keeps_its_expectation(self) -> None:
        hidden_RD, labels = 0.5 * draw(8, HIDDEN, seed=7), torch.arange(100, 108)
        sums = torch.stack([self.head(40, labels, seed).logits(hidden_RD).exp().sum(-1) for seed in range(2000)])
        full = (hidden_RD @ self.weight_VD.T).exp().sum(-1)
        error = sums.std(0) / len(sums) ** 0.5
        assert ((sums.mean(0) - full).abs() < 4.5 * error + 1e-4 * full).all()
        assert (sums.mean(0) / full - 1).abs().max() < 0.02

    def test_multiplier_and_cap_come_along(self) -> None:
        vocabulary = LossVocabulary(self.weight_VD, self.counts_V, 40)
        head = vocabulary.head(torch.tensor([3]), torch.Generator().manual_seed(0), 0.5, 4.0)
        assert head.columns is not None and head.offset_V is not None
        hidden_RD = draw(3, HIDDEN)
        plain = Head(self.weight_VD, 0.5, 4.0).logits(hidden_RD)[:, head.columns]
        torch.testing.assert_close(head.logits(hidden_RD) - head.offset_V, plain)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "mse"}, "name must be one of ce, d-pace, kl, lk, lk-hybrid, not 'mse'"),
        ({"gamma": 0.0}, "gamma must be above 0"),
        ({"alpha": 1.5}, "alpha must be between 0 and 1"),
        ({"vocab": 1}, "at least 2 tokens"),
        ({"name": "kl", "vocab": 50}, "leave the loss vocabulary out"),
    ],
)
def test_impossible_losses_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LossConfig(**values)


def test_a_token_the_head_lacks_is_missed_and_teaches_nothing() -> None:
    weight = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([0, 2, 3, 7, 8, 9])
    hidden = (4 * weight[[1, 3, 4]]).clone().requires_grad_()
    slots = Slots(torch.tensor([[2, 5, 8]]), torch.ones(1, 3, dtype=torch.bool))
    loss, metrics = head_loss(hidden, slots, Head(weight, columns=ids), LossConfig("ce"), 3.0)
    loss.backward()
    assert metrics.sums_4K[0].tolist() == [1, 1, 1]
    assert metrics.sums_4K[1][1] == 0 and metrics.sums_4K[3].tolist()[1:] == [0, 0]
    assert hidden.grad is not None and not hidden.grad[1].any() and hidden.grad[0].any()


class Aliased(TorchDispatchMode):
    """Raises where an operation writes its `out` over an input of its own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = kwargs.get("out")
        assert out is None or all(out is not each for each in args), func
        return func(*args, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1000, 32_003])
def test_softmax_over_the_logits_is_that_of_a_copy(vocab: int, dtype: torch.dtype) -> None:
    logits_RV = (8 * draw(2 * losses.SOFTMAX_ROWS + 1, vocab)).to(dtype)
    expected_RV = torch.softmax(logits_RV.clone(), -1)
    with Aliased():
        found_RV = losses.softmax_over(logits_RV)
    assert torch.equal(found_RV, expected_RV)
    assert found_RV.data_ptr() == logits_RV.data_ptr(), "fresh memory costs a CPU more than the softmax"


def test_no_operation_of_a_loss_writes_over_its_input() -> None:
    """PyTorch promises nothing of one that does; on a GPU the memory is fresh."""
    hidden_TD, slots, weight_VD = batch()
    with Aliased():
        head_loss(hidden_TD, slots, Head(weight_VD), LossConfig("ce"), 20.0)[0].backward()
    elsewhere = draw(3, 11).to("meta")
    assert losses.softmax_over(elsewhere) is not elsewhere
