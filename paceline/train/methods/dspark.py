"""Training of a DSpark drafter: its body and Markov head learn to draft, its confidence head whether drafts are
accepted.

The loss of a draft position is one of train/learn/losses.py, of logits with the Markov head's correction for the
target's previous token. The confidence's loss is the binary cross entropy with the chance that the draft is accepted:
the overlap of both distributions over the head's tokens if the loss has the target's distribution, else whether the
most probable token is the target's. It is weighted like the other; its inputs are detached.

The logits of a few blocks are computed at a time, and computed again in the backward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from paceline.draft.dflash2.codebooks import BOOKS
from paceline.draft.dspark.drafter import DSparkNetwork
from paceline.train.config import LossConfig
from paceline.train.learn.losses import CHUNK_ROWS, Head, SlotMetrics, Slots, measure, slot_losses, slot_weights
from paceline.train.learn.packs import DFlashTrainable, Pack

NEVER = 30.0
"""Cross entropy of a token that the drafter cannot draft."""


class DSparkTrainable(DFlashTrainable):
    """Trains DSpark: DFlash with a Markov head, which adds logits that depend on the previous token, and a confidence
    head, which predicts the probability that a draft is accepted."""

    network: DSparkNetwork

    def loss(
        self,
        hidden_TD: Tensor,
        pack: Pack,
        head: Head,
        embedding_VD: Tensor,
        config: LossConfig,
        num_slots: float,
        is_measured: bool = True,
    ) -> tuple[Tensor, SlotMetrics]:
        """Returns (loss, metrics) of one pack (batch of A blocks with K draft positions each). The loss is divided by
        `num_slots`, the draft positions of the whole step. It includes the loss of the confidence head; the metrics do
        not.
        - `hidden_TD` [A * K, D]: result of `hidden` for the pack.
        - `head`: LM head with the tokens over which the loss is computed.
        - `embedding_VD`: the target's embedding matrix.
        - `is_measured`: if False, all metrics are zero. If True, they cover the first blocks (about CHUNK_ROWS draft
          positions) in training, all blocks in an evaluation."""
        slots, is_training = pack.slots, torch.is_grad_enabled()
        per_block = slots.labels_AK.shape[1]
        metrics, total = SlotMetrics.zero(per_block), torch.zeros((), device=hidden_TD.device)
        hidden_AKD, before_AK = hidden_TD.unflatten(0, (-1, per_block)), pack.before_AK
        step = max(1, CHUNK_ROWS // per_block)
        for first in range(0, len(before_AK), step):
            blocks = slice(first, first + step)
            own = SlotMetrics.zero(per_block) if is_measured and (first == 0 or not is_training) else None
            inputs = hidden_AKD[blocks], before_AK[blocks], slots.of_blocks(blocks), head, embedding_VD, config
            if is_training:
                loss = checkpoint(self._part, *inputs, own, use_reentrant=False)
                assert isinstance(loss, Tensor)
            else:
                loss = self._part(*inputs, own)
            total = total + loss
            if own is not None:
                metrics.flat += own.flat
        return total / num_slots, metrics

    def _part(
        self,
        hidden_AKD: Tensor,
        before_AK: Tensor,
        slots: Slots,
        head: Head,
        embedding_VD: Tensor,
        config: LossConfig,
        metrics: SlotMetrics | None,
    ) -> Tensor:
        """Returns the loss (a sum) of a few blocks, and writes their metrics."""
        rows_AK, reached_AK = head.local(slots.labels_AK)
        learned_AK, label_R1 = slots.valid_AK & reached_AK, rows_AK.flatten()[:, None]
        with torch.autocast(hidden_AKD.device.type, enabled=False):
            logits_RV = self._logits(hidden_AKD, before_AK, head, embedding_VD).flatten(0, 1)
            ce_AK, loss_AK = slot_losses(logits_RV, label_R1, slots, head, config)
            weight_AK = slot_weights(config, ce_AK.detach(), learned_AK)
            total = (loss_AK * weight_AK).sum()
            if self.network.confidence_head is not None:
                # A token that the head lacks has no loss above, but its draft is never accepted.
                weight_AK = slot_weights(config, torch.where(reached_AK, ce_AK.detach(), NEVER), slots.valid_AK)
                rows_AKR = self.network.markov_head.rows(BOOKS[0], before_AK, embedding_VD).detach()
                sure_AK = self.network.confidence_head(hidden_AKD.detach().float(), rows_AKR)
                accepted_AK = self._accepted(logits_RV.detach(), label_R1, slots, head) * reached_AK
                own_AK = F.binary_cross_entropy_with_logits(sure_AK, accepted_AK, reduction="none")
                total = total + (own_AK * weight_AK).sum()
        if metrics is not None:
            metrics.flat.copy_(measure(logits_RV.detach(), label_R1, learned_AK).flat)
            metrics.sums_4K[0] = slots.valid_AK.sum(0).cpu()  # a token that the head lacks counts as missed
            metrics.flat[0] = (loss_AK.detach() * learned_AK).sum(dtype=torch.float64).cpu()
        return total

    def _logits(self, hidden_AKD: Tensor, before_AK: Tensor, head: Head, embedding_VD: Tensor) -> Tensor:
        """Logits [A, K, V] over the head's tokens, with the Markov head's part after the tokens `before_AK`."""
        return head.logits(hidden_AKD) + self.network.markov_head.added(before_AK, head.columns, embedding_VD)

    def _accepted(self, logits_RV: Tensor, label_R1: Tensor, slots: Slots, head: Head) -> Tensor:
        """Chance [A, K] that each position's draft is accepted, by the drafter's own logits: without the offset of a
        sampled vocabulary."""
        if head.offset_V is not None:
            logits_RV = logits_RV - head.offset_V
        if slots.final_AKD is None:
            return (logits_RV.argmax(-1) == label_R1[:, 0]).view(slots.labels_AK.shape).float()
        target_RV = head.target_logits(slots.final_AKD.flatten(0, 1)).float().softmax(-1)
        return torch.minimum(target_RV, logits_RV.float().softmax(-1)).sum(-1).view(slots.labels_AK.shape)

    @torch.no_grad()
    def right(self, hidden_TD: Tensor, pack: Pack, head: Head, embedding_VD: Tensor) -> Tensor:
        slots = pack.slots
        rows_AK, reached_AK = head.local(slots.labels_AK)
        logits_AKV = self._logits(hidden_TD.unflatten(0, rows_AK.shape), pack.before_AK, head, embedding_VD)
        return (logits_AKV.argmax(-1) == rows_AK) & reached_AK & slots.valid_AK
