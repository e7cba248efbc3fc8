"""The losses of a drafter, by name, computed over the target's head in chunks. A slot is a draft position of a block.

    ce        cross entropy with the target's token, weight exp(-(k-1)/gamma)       DFlash, arXiv 2602.06036, 4.3
    d-pace    cross entropy weighted by the chance that earlier slots are accepted  arXiv 2605.18810
    kl        KL(target || drafter) over the target's own distribution, weighted as ce
    lk        -log A, A = sum_v min(target, drafter): the chance of acceptance      arXiv 2602.23881
    lk-hybrid l KL + (1 - l) TV, l = exp(-3 A): KL if A is low, TV if it is high    arXiv 2602.23881

The drafters that ship were trained with d-pace; lk and lk-hybrid have not been measured.

The head's [slots, vocabulary] matrix is never held completely: rows of whole blocks pass through it chunk by chunk,
forward and backward together, and only the gradient of the hidden states is returned (`head_loss`). With a loss
vocabulary, cross entropies run over the most frequent tokens and a sample of the others, whose logits are raised by
log(number / sampled), so that the expectation of the partition sum is unchanged (sampled softmax, arXiv 1412.2007).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.model.target import PLAIN_ENDS, EndScales
from paceline.train.config import LossConfig

CHUNK_ROWS = 256
NUM_RECALLED = 16
SOFTMAX_ROWS = 4
EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Slots:
    """Labels (token ids) of the A blocks of a pack (batch), for training. A block has an anchor, the last known token,
    and K = block_size - 1 slots (draft positions) after it; only the slots have labels."""

    labels_AK: Tensor
    """The target's token at each slot; arbitrary where `valid_AK` is False."""
    valid_AK: Tensor
    """False for slots after the end of the document."""
    final_AKD: Tensor | None = None
    """The target's final normed hidden state that predicts each slot, for losses over the target's distribution."""

    def of_blocks(self, blocks: slice) -> Slots:
        final_AKD = None if self.final_AKD is None else self.final_AKD[blocks]
        return Slots(self.labels_AK[blocks], self.valid_AK[blocks], final_AKD)


@dataclass(frozen=True, slots=True)
class Head:
    """An LM head, which training does not change: logits = scale * (hidden @ weight^T), soft-capped if `cap` is above
    0."""

    weight_VD: Tensor
    scale: float = 1.0
    """Factor on the drafter's logits."""
    cap: float = 0.0
    columns: Tensor | None = None
    """Token ids of the rows of `weight_VD`, ascending; None if they are the whole vocabulary."""
    offset_V: Tensor | None = None
    """Added to the logits if the loss uses only a part of the vocabulary: for a randomly sampled token, the log of the
    number of tokens that it represents; 0 for other tokens."""
    target: EndScales = PLAIN_ENDS
    """Scale and cap of the target's own logits."""

    def in_float32(self) -> Head:
        """Returns the head with float32 weights, so that products are computed in float32."""
        return replace(self, weight_VD=self.weight_VD.float())

    def logits(self, hidden_RD: Tensor) -> Tensor:
        logits_RV = hidden_RD.to(self.weight_VD.dtype) @ self.weight_VD.T
        if self.scale != 1.0:
            logits_RV = logits_RV * self.scale
        if self.cap > 0.0:
            logits_RV = torch.tanh(logits_RV / self.cap) * self.cap
        return logits_RV if self.offset_V is None else logits_RV.add_(self.offset_V)

    def target_logits(self, final_RD: Tensor) -> Tensor:
        """Returns the target's own logits [R, V] for the head's V tokens. `final_RD` [R, D]: the target's final hidden
        states at R positions."""
        return self.target.of_logits(final_RD.to(self.weight_VD.dtype) @ self.weight_VD.T)

    def local(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Returns where tokens are in this head, as (rows, is_known), each of the shape of the token ids `labels`.
        `rows`: the row of each token in `weight_VD`. `is_known`: True if the head has a row for the token; otherwise
        its entry in `rows` is arbitrary."""
        if self.columns is None:
            return labels, torch.ones_like(labels, dtype=torch.bool)
        rows = torch.searchsorted(self.columns, labels).clamp_(max=len(self.columns) - 1)
        return rows, self.columns[rows] == labels


@dataclass(slots=True)
class SlotMetrics:
    """Sums over training blocks: the loss, and for each slot (draft position of a block) the numbers of correct drafts.
    Sums of several packs and processes can be added up; `rates` returns averages."""

    flat: Tensor
    """The sums as one vector [3 + 8 K]: the loss, then `sums_4K`, `selector_2` and `selector_4K`."""

    @classmethod
    def zero(cls, num_slots: int) -> SlotMetrics:
        return cls(torch.zeros(3 + 8 * num_slots, dtype=torch.float64))

    @property
    def sums_4K(self) -> Tensor:
        """For each of the K slots (draft positions), the numbers of blocks in which these conditions hold, [4, K]:
        - (1) The slot is inside the document.
        - (2) The target's token is the drafter's most probable one.
        - (3) The target's token is one of the drafter's 16 most probable ones.
        - (4) As (2), at this and all earlier slots."""
        return self.flat[1 : 1 + 4 * self._num_slots].unflatten(0, (4, -1))  # a view: writes change `flat`

    @property
    def selector_2(self) -> Tensor:
        """Two sums over slots (draft positions) whose candidates include the target's token, [2]: the selector's loss,
        and the number of these slots. The selector is the part of DFlash 2 that chooses each draft among candidates."""
        return self.flat[1 + 4 * self._num_slots :][:2]

    @property
    def selector_4K(self) -> Tensor:
        """Counts of the blocks whose candidates a selector has scored: for each of the K slots (draft positions), the
        numbers of these blocks in which the following conditions hold, [4, K].
        - (1) The slot is inside the document.
        - (2) At this and all earlier slots, the most probable candidate is the target's token.
        - (3) At this slot, the selector chooses the target's token.
        - (4) As (3), at this and all earlier slots."""
        return self.flat[3 + 4 * self._num_slots :].unflatten(0, (4, -1))

    @property
    def _num_slots(self) -> int:
        return (len(self.flat) - 3) // 8

    def rates(self) -> dict[str, Any]:
        """Returns averages over slots (draft positions) inside documents. A draft is correct if it is the target's
        token.
        - "loss", "accuracy" (share of correct drafts): means over all slots;
        - "recall1", "recall16": for each slot, the share of blocks with the target's token in the drafter's top 1 or
          top 16;
        - "eal": expected acceptance length, 1 + sum over k of P(the drafts of slots 1 to k are all correct).

        For a drafter with a selector, "eal" is measured on the selector's choices. It then also returns "base_eal" (of
        the most probable tokens), "selector_lift" (eal - base_eal) and "selector_loss" (mean loss of the selector)."""
        counts_K, top1_K, top16_K, prefix_K = self.sums_4K
        counts_K = counts_K.clamp(min=1)
        eal = 1.0 + float((prefix_K / counts_K).sum())
        selector: dict[str, float] = {}
        if self.selector_2[1] > 0:
            valid_K, base_K, _, selected_K = self.selector_4K
            base, eal = (1.0 + float((sums_K / valid_K.clamp(min=1)).sum()) for sums_K in (base_K, selected_K))
            loss = float(self.selector_2[0] / self.selector_2[1])
            selector = {"base_eal": base, "selector_lift": eal - base, "selector_loss": loss}
        return {
            "loss": float(self.flat[0] / counts_K.sum()),
            "eal": eal,
            **selector,
            "accuracy": float(top1_K.sum() / counts_K.sum()),
            "recall1": [round(value, 4) for value in (top1_K / counts_K).tolist()],
            "recall16": [round(value, 4) for value in (top16_K / counts_K).tolist()],
        }


def head_loss(
    hidden_TD: Tensor, slots: Slots, head: Head, config: LossConfig, num_slots: float, is_measured: bool = True
) -> tuple[Tensor, SlotMetrics]:
    """Computes the training loss of a pack (batch of blocks); returns (loss, metrics). A backward pass from the loss
    gives the gradient of `hidden_TD`.

    hidden_TD [A * K, D]: normed hidden states of the slots (K draft positions of each of A blocks), block after block;
    the LM head `head` computes the logits from them. The loss is a weighted sum over slots inside the document, divided
    by `num_slots`, their number in the whole step. So the losses of all packs and processes add up to the step's loss.
    To save time, metrics cover only the first blocks in training; in an evaluation (without gradients) they cover all.
    With `is_measured` False they are zero."""
    grad_TD = torch.empty_like(hidden_TD) if hidden_TD.requires_grad else None
    total = torch.zeros((), dtype=torch.float64, device=hidden_TD.device)
    per_block = slots.labels_AK.shape[1]
    step = max(1, CHUNK_ROWS // per_block)
    metrics = SlotMetrics.zero(per_block)
    for first in range(0, len(slots.labels_AK), step):
        blocks = slice(first, first + step)
        rows = slice(first * per_block, (first + step) * per_block)
        is_now = is_measured and (grad_TD is None or first == 0)
        loss, grad, measured = _chunk(
            hidden_TD[rows], slots.of_blocks(blocks), head, config, grad_TD is not None, is_now
        )
        total += loss
        if measured is not None:
            metrics.flat += measured.flat
        if grad_TD is not None and grad is not None:
            grad_TD[rows] = grad
    scaled = (total / num_slots).to(torch.float32)
    if grad_TD is None:
        return scaled, metrics
    carrier = (hidden_TD * (grad_TD / num_slots)).sum()  # has the precomputed gradient; its value is subtracted again
    return scaled + (carrier - carrier.detach()), metrics


def _chunk(
    hidden_RD: Tensor, slots: Slots, head: Head, config: LossConfig, needs_grad: bool, is_measured: bool
) -> tuple[Tensor, Tensor | None, SlotMetrics | None]:
    """Returns loss (a sum), gradient of the hidden states and metrics of a few blocks."""
    local_AK, reached_AK = head.local(slots.labels_AK)
    learned = Slots(local_AK, slots.valid_AK & reached_AK, slots.final_AKD)
    is_plain = head.scale == 1.0 and head.cap <= 0.0
    way = _cross_entropy if is_plain and not config.needs_target_probs else _by_autograd
    with torch.autocast(hidden_RD.device.type, enabled=False), torch.no_grad():
        loss, grad, metrics = way(hidden_RD.detach(), learned, head, config, needs_grad, is_measured)
    if metrics is not None:
        metrics.sums_4K[0] = slots.valid_AK.sum(0)  # a token that the head lacks counts as missed
    return loss, grad, metrics


def _cross_entropy(
    hidden_RD: Tensor, slots: Slots, head: Head, config: LossConfig, needs_grad: bool, is_measured: bool
) -> tuple[Tensor, Tensor | None, SlotMetrics | None]:
    """Computes the gradient by hand: the softmax overwrites the logits, and its gradient overwrites the softmax."""
    logits_RV = head.logits(hidden_RD)
    label_R = slots.labels_AK.flatten()[:, None]
    metrics = measure(logits_RV, label_R, slots.valid_AK) if is_measured else None  # before they are overwritten
    probs_RV = softmax_over(logits_RV)
    chosen_R = probs_RV.gather(1, label_R).float().clamp_(min=1e-30)
    loss_AK = -chosen_R.log().view(slots.labels_AK.shape)
    weight_AK = slot_weights(config, loss_AK, slots.valid_AK)
    loss = (loss_AK * weight_AK).sum(dtype=torch.float64)
    if metrics is not None:
        metrics.flat[0] = (loss_AK * slots.valid_AK).sum(dtype=torch.float64)
    if not needs_grad:
        return loss, None, metrics
    weight_R1 = weight_AK.reshape(-1, 1)
    probs_RV[torch.arange(len(label_R), device=label_R.device), label_R[:, 0]] -= 1.0
    grad_RD = (probs_RV @ head.weight_VD).float() * weight_R1
    return loss, grad_RD.to(hidden_RD.dtype), metrics


def softmax_over(logits_RV: Tensor) -> Tensor:
    """Returns the softmax of each row of logits. On a CPU it overwrites `logits_RV`, since allocating memory takes
    longer than computing it."""
    if logits_RV.device.type != "cpu":
        return logits_RV.softmax(-1)
    for rows_RV in logits_RV.split(SOFTMAX_ROWS):
        rows_RV.copy_(rows_RV.softmax(-1))
    return logits_RV


def _by_autograd(
    hidden_RD: Tensor, slots: Slots, head: Head, config: LossConfig, needs_grad: bool, is_measured: bool
) -> tuple[Tensor, Tensor | None, SlotMetrics | None]:
    hidden_RD.requires_grad_(needs_grad)
    with torch.set_grad_enabled(needs_grad):
        logits_RV = head.logits(hidden_RD)
        label_R = slots.labels_AK.flatten()[:, None]
        ce_AK, loss_AK = slot_losses(logits_RV, label_R, slots, head, config)
        weight_AK = slot_weights(config, ce_AK.detach(), slots.valid_AK)
        loss = (loss_AK * weight_AK).sum()
    grad = torch.autograd.grad(loss, hidden_RD)[0] if needs_grad else None
    metrics = None
    if is_measured:
        metrics = measure(logits_RV.detach(), label_R, slots.valid_AK)
        metrics.flat[0] = (loss_AK.detach() * slots.valid_AK).sum(dtype=torch.float64)
    return loss.detach().double(), grad, metrics


def slot_losses(
    logits_RV: Tensor, label_R1: Tensor, slots: Slots, head: Head, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """Returns (cross entropy, loss), [A, K] each, for the K slots (draft positions) of A blocks; differentiable. The
    loss is the one that `config` names: the cross entropy, or a distance to the target's probabilities. The caller
    multiplies it by `slot_weights`. logits_RV: one row for each of the R = A * K slots. label_R1: column of the
    target's token in each row."""
    log_probs_RV = torch.log_softmax(logits_RV.float(), dim=-1)
    ce_AK = -log_probs_RV.gather(1, label_R1).view(slots.labels_AK.shape)
    if not config.needs_target_probs:
        return ce_AK, ce_AK
    assert slots.final_AKD is not None
    with torch.no_grad():
        target_RV = torch.log_softmax(head.target_logits(slots.final_AKD.flatten(0, 1)).float(), dim=-1)
    return ce_AK, distance(config.name, log_probs_RV, target_RV).view(ce_AK.shape)


def distance(name: str, draft_RV: Tensor, target_RV: Tensor) -> Tensor:
    """Returns the distance [R] between drafter and target in each of R rows, as the loss `name` (kl, lk or lk-hybrid)
    defines it. draft_RV, target_RV [R, V]: log-probabilities of drafter and target."""
    target_probs_RV = target_RV.exp()
    kl_R = (target_probs_RV * (target_RV - draft_RV)).sum(-1)
    if name == "kl":
        return kl_R
    accepted_R = torch.minimum(target_probs_RV, draft_RV.exp()).sum(-1)
    if name == "lk":
        return -(accepted_R + EPS).log()
    share_R = torch.exp(-3.0 * accepted_R.detach())
    return share_R * kl_R + (1.0 - share_R) * (1.0 - accepted_R)


def slot_weights(config: LossConfig, loss_AK: Tensor, valid_AK: Tensor) -> Tensor:
    """Returns the weight [A, K] of each slot (draft position) in the loss, zero after the document's end. `loss_AK`:
    cross entropy CE of each slot, detached.

    For the loss d-pace, slot k has the weight sum_{j >= k} s_1 ... s_j / K, where s_i = (1 - alpha) exp(-CE_i) + alpha.
    For other losses, slot k has the weight exp(-(k - 1) / gamma)."""
    valid_AK = valid_AK.to(loss_AK.dtype)
    num_slots = loss_AK.shape[1]
    if config.name == "d-pace":
        prefix_AK = (((1 - config.alpha) * torch.exp(-loss_AK) + config.alpha) * valid_AK).cumprod(dim=1)
        return prefix_AK.flip(1).cumsum(dim=1).flip(1) * valid_AK / num_slots
    gamma = config.gamma or default_gamma(num_slots + 1)
    slot_K = torch.arange(num_slots, device=loss_AK.device, dtype=loss_AK.dtype)
    return torch.exp(-slot_K / gamma) * valid_AK


def default_gamma(block_size: int) -> float:
    """Returns the decay `gamma` for a block size: linear between the paper's 4, 5 and 7 for blocks of 8, 10 and 16
    (DFlash, arXiv 2602.06036)."""
    if block_size <= 10:
        return max(1.0, 4.0 + (block_size - 8) / 2)
    return 5.0 + (block_size - 10) / 3


def measure(logits_RV: Tensor, label_R1: Tensor, valid_AK: Tensor) -> SlotMetrics:
    """Counts, for each of the K slots (draft positions), in how many blocks the drafter is right. Returns a SlotMetrics
    with these counts in `sums_4K`; its other sums are zero.

    logits_RV: one row per slot, R = A * K for A blocks. label_R1: column of the target's token in each row. valid_AK:
    True for slots inside the document. If several tokens share the highest logit, which is frequent in bfloat16, only
    one of them counts as the most probable."""
    rank_AK = _count(logits_RV > logits_RV.gather(1, label_R1)).view(valid_AK.shape)
    top1_AK = (logits_RV.max(-1).indices == label_R1[:, 0]).view(valid_AK.shape) & valid_AK
    top16_AK = (rank_AK < NUM_RECALLED) & valid_AK
    prefix_AK = top1_AK.cumprod(dim=1)
    metrics = SlotMetrics.zero(valid_AK.shape[1])
    metrics.sums_4K[:] = torch.stack([hits_AK.sum(0).cpu() for hits_AK in (valid_AK, top1_AK, top16_AK, prefix_AK)])
    return metrics


def _count(mask_RV: Tensor) -> Tensor:
    """Returns the number of set elements per row; on CPU row by row, since `sum` converts every bit to eight bytes."""
    if mask_RV.device.type != "cpu":
        return mask_RV.sum(-1)
    return torch.tensor([np.count_nonzero(row_V) for row_V in mask_RV.numpy()])


class LossVocabulary:
    """Limits the loss of each training step to a part of a large vocabulary, to save time: the most frequent tokens,
    the step's labels, and a random sample of the others."""

    SHARE_SAMPLED = 0.25

    def __init__(self, weight_VD: Tensor, counts_V: Tensor, size: int) -> None:
        self._weight_VD = weight_VD
        order_V = torch.argsort(counts_V, descending=True, stable=True)
        self._num_sampled = max(1, int(size * self.SHARE_SAMPLED))
        self._frequent = order_V[: size - self._num_sampled]
        self._rest = order_V[size - self._num_sampled :]

    def head(self, labels: Tensor, generator: torch.Generator, scale: float = 1.0, cap: float = 0.0) -> Head:
        """Returns an LM head that has rows only for the tokens of one step's loss, among them all `labels` (token ids).
        The logits of randomly sampled tokens are increased, since each represents several tokens without a row.
        `generator`: draws the sample. `scale`: factor on the logits; `cap`: their soft cap, 0 for no cap."""
        picked = torch.randperm(len(self._rest), generator=generator)[: self._num_sampled]
        sampled = self._rest[picked]
        certain = torch.unique(torch.cat([self._frequent, labels.flatten().cpu()]))
        sampled = sampled[~torch.isin(sampled, certain)]
        columns, order = torch.sort(torch.cat([certain, sampled]))
        num_left = len(self._weight_VD) - len(certain)
        raised = float(torch.log(torch.tensor(num_left / max(1, len(sampled)))))
        offset = torch.cat([torch.zeros(len(certain)), torch.full((len(sampled),), raised)])[order]
        weight = self._weight_VD[columns.to(self._weight_VD.device)]
        return Head(weight, scale, cap, columns.to(weight.device), offset.to(weight.device, weight.dtype))


def unigram_entropy(counts_V: NDArray[np.int64], drafted: NDArray[np.int64] | None = None) -> float:
    """Returns a baseline for measured losses, in nats per token: the loss of a drafter that always predicts the overall
    frequencies of tokens. It is the entropy of the counts counts_V [V]. `drafted`: ids of the draft vocabulary, None
    for all tokens; tokens outside it count as loss 0."""
    total = counts_V.sum()
    counts = (counts_V if drafted is None else counts_V[drafted]).astype(np.float64)
    counts = counts[counts > 0]
    return float(-(counts / total * np.log(counts / counts.sum())).sum()) if len(counts) else 0.0
