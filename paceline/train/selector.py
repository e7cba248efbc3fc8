"""What the selector of a DFlash 2 drafter is taught, beside what losses.py teaches the slots.

Of each slot the selector sees the drafting head's most likely tokens, behind the token that the target said before. Its loss is
the cross entropy of the target's token among them; a slot whose token is not among them is left out of it, and keeps its place
in the weights of the others (d-pace). Hidden states and logits are taken as they are: body and convolution learn as they would
without a selector, which makes what the selector adds a figure of its own.

Codebooks may be factored (`draft/dflash2.py`): two small matrices on the target's embedding, the same for every token, frequent
or not. `materialised` writes them out for a checkpoint that others read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.draft.dflash import DFlashNetwork
from paceline.draft.dflash2 import DFlash2Network
from paceline.draft.dflash2_selector import score
from paceline.train.config import LossConfig
from paceline.train.losses import CHUNK_ROWS, Head, SlotMetrics, Slots, slot_weights
from paceline.train.packs import DFlashTrainable, Pack


class DFlash2Trainable(DFlashTrainable):
    """As DFlashTrainable, with a selector that learns."""

    network: DFlash2Network

    @property
    def codebooks(self) -> str:
        return "factored" if self.network.candidate_selector.is_factored else "free"

    def selector_loss(
        self,
        hidden_TD: Tensor,
        pack: Pack,
        head: Head,
        embedding_VD: Tensor,
        config: LossConfig,
        num_slots: float,
        *,
        is_measured: bool,
        is_learning: bool,
    ) -> tuple[Tensor, SlotMetrics]:
        """Its loss as a share of a step of `num_slots` slots, and figures of the blocks that `head_loss` measures.

        head: the drafting head, of all tokens or of the draft vocabulary. Before it is `is_learning` its gradients are zeros.
        """
        selector, slots = self.network.candidate_selector, pack.slots
        per_block = slots.labels_AK.shape[1]
        metrics, total = SlotMetrics.zero(per_block), torch.zeros((), device=hidden_TD.device)
        is_training = torch.is_grad_enabled()
        if is_training and not is_learning:
            # Every weight gets a gradient: optimisers and other processes count on it.
            return sum((each.sum() for each in selector.parameters()), total) * 0.0, metrics
        hidden_AKD, step = hidden_TD.detach().unflatten(0, (-1, per_block)), max(1, CHUNK_ROWS // per_block)
        for first in range(0, len(slots.labels_AK), step):
            blocks = slice(first, first + step)
            part = Slots(slots.labels_AK[blocks], slots.valid_AK[blocks])
            is_now = is_measured and (not is_training or first == 0)
            with torch.autocast(hidden_TD.device.type, enabled=False):
                loss, measured = self._part(hidden_AKD[blocks], part, pack.anchors_A[blocks], head, embedding_VD, config)
            total = total + loss
            if is_now:
                metrics.flat += measured.flat
        return total * (config.selector / num_slots), metrics

    def _part(
        self, hidden_AKD: Tensor, slots: Slots, anchors_A: Tensor, head: Head, embedding_VD: Tensor, config: LossConfig
    ) -> tuple[Tensor, SlotMetrics]:
        """Loss (a sum) and figures of a few blocks."""
        valid_AK = slots.valid_AK
        local_AK, reached_AK = head.local(slots.labels_AK)
        with torch.no_grad():
            logits_AKV = head.logits(hidden_AKD.flatten(0, 1)).unflatten(0, valid_AK.shape).float()
            ce_AK = logits_AKV.logsumexp(-1) - logits_AKV.gather(-1, local_AK[..., None])[..., 0]
        scores_AKM, is_gold_AKM = self._scores(hidden_AKD, logits_AKV, slots, anchors_A, head, embedding_VD)
        found_AK = is_gold_AKM.any(-1) & reached_AK & valid_AK
        place_AK1 = is_gold_AKM.long().argmax(-1, keepdim=True)
        own_AK = -torch.log_softmax(scores_AKM, dim=-1).gather(-1, place_AK1)[..., 0]
        weight_AK = slot_weights(config, ce_AK, valid_AK) * found_AK
        right_AK = (scores_AKM.argmax(-1) == place_AK1[..., 0]) & found_AK
        metrics = SlotMetrics.zero(valid_AK.shape[1])
        metrics.told_2[0] = (own_AK.detach() * found_AK).sum(dtype=torch.float64).cpu()
        metrics.told_2[1] = found_AK.sum().cpu()
        metrics.picked_2K[0], metrics.picked_2K[1] = right_AK.sum(0).cpu(), right_AK.cumprod(dim=1).sum(0).cpu()
        return (own_AK * weight_AK).sum(), metrics

    def _scores(
        self, hidden_AKD: Tensor, logits_AKV: Tensor, slots: Slots, anchors_A: Tensor, head: Head, embedding_VD: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Scores of each slot's candidates behind the target's own token, and which of them is the target's token."""
        said_AK = torch.where(slots.valid_AK, slots.labels_AK, 0).long()
        before_AK = torch.cat([anchors_A[:, None], said_AK[:, :-1]], dim=1)
        picks = score(self.network.candidate_selector, hidden_AKD, logits_AKV, anchors_A, head.columns, before_AK, embedding_VD)
        return picks.scores_BKPM[:, :, 0], picks.chosen_BKM == head.local(slots.labels_AK)[0][..., None]

    @torch.no_grad()
    def right(self, hidden_TD: Tensor, pack: Pack, head: Head, embedding_VD: Tensor) -> Tensor:
        """As DFlashTrainable.right; a block whose first slots are right has walked along the target's own tokens."""
        slots = pack.slots
        hidden_AKD = hidden_TD.unflatten(0, slots.valid_AK.shape)
        logits_AKV = head.logits(hidden_TD).unflatten(0, slots.valid_AK.shape).float()
        scores_AKM, is_gold_AKM = self._scores(hidden_AKD, logits_AKV, slots, pack.anchors_A, head, embedding_VD)
        picked_AK = is_gold_AKM.gather(-1, scores_AKM.argmax(-1, keepdim=True))[..., 0]
        return picked_AK & head.local(slots.labels_AK)[1] & slots.valid_AK


def trainable_of(network: DFlashNetwork, raw: dict[str, Any], attention: str = "auto") -> DFlashTrainable:
    """What the loop needs of a network, by its kind."""
    return (DFlash2Trainable if isinstance(network, DFlash2Network) else DFlashTrainable)(network, raw, attention)
