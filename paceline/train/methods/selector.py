"""What the selector of a DFlash 2 drafter is taught, beside what train/learn/losses.py teaches the slots.

Of each slot the selector sees the drafting head's most likely tokens, behind the token that the target said before. Its loss is
the cross entropy of the target's token among them; a slot whose token is not among them is left out of it, and keeps its place
in the weights of the others (d-pace). Hidden states and logits are taken as they are: body and convolution learn as they would
without a selector, which makes what the selector adds a figure of its own.

It learns from a sample of a step's blocks (`BlockSample`): its logits are those of the whole draft vocabulary, where the slots'
own loss has a part of it, and those of all blocks would take a third of a step. Held-out looks see every block.

Codebooks may be factored (`draft/dflash2/drafter.py`): two small matrices on the target's embedding, the same for every
token, frequent or not. `materialised` writes them out for a checkpoint that others read.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.draft.dflash.drafter import DFlashNetwork
from paceline.draft.dflash2.drafter import DFlash2Network
from paceline.draft.dflash2.selector import score
from paceline.train.config import LossConfig
from paceline.train.learn.losses import CHUNK_ROWS, Head, SlotMetrics, Slots, slot_weights
from paceline.train.learn.packs import DFlashTrainable, Pack


@dataclass(frozen=True, slots=True)
class BlockSample:
    """Which blocks of a step a selector learns from: each with the chance `share`, by a hash of `key` (the step) and of what
    the block says, so that one process or several, and packs of any size, take the same ones. A sampled block weighs 1 / share:
    the expected gradient is that of all blocks."""

    share: float = 1.0
    key: str = ""

    def of(self, pack: Pack) -> Tensor:
        """Numbers of a pack's sampled blocks, ascending."""
        if self.share >= 1:
            return torch.arange(len(pack.anchors_A), device=pack.anchors_A.device)
        said_AK = torch.where(pack.slots.valid_AK, pack.slots.labels_AK, -1).long()
        starts_A = torch.cat(list(pack.layout.anchors)).to(said_AK.device)
        rows = torch.cat([starts_A[:, None], pack.anchors_A[:, None], said_AK], dim=1).cpu().numpy()
        taken = [number for number, row in enumerate(rows) if self._takes(row.tobytes())]
        return torch.tensor(taken, dtype=torch.int64, device=said_AK.device)

    def _takes(self, block: bytes) -> bool:
        digest = hashlib.blake2b(block, digest_size=8, key=self.key.encode()).digest()
        return int.from_bytes(digest, "little") < self.share * 2**64


WHOLE = BlockSample()


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
        sample: BlockSample = WHOLE,
    ) -> tuple[Tensor, SlotMetrics]:
        """Its loss as a share of a step of `num_slots` slots, and figures of some blocks; without gradients, of all of them.

        head: the drafting head, of all tokens or of the draft vocabulary. Before it is `is_learning` its gradients are zeros.
        """
        slots, is_training = pack.slots, torch.is_grad_enabled()
        per_block, sample = slots.labels_AK.shape[1], sample if is_training else WHOLE
        metrics, total = SlotMetrics.zero(per_block), torch.zeros((), device=hidden_TD.device)
        taken_A = sample.of(pack)
        if is_training and (not is_learning or not len(taken_A)):
            # Every weight gets a gradient: optimisers and other processes count on it.
            return sum((each.sum() for each in self.network.candidate_selector.parameters()), total) * 0.0, metrics
        hidden_AKD = hidden_TD.detach().unflatten(0, (-1, per_block))
        for number, blocks_A in enumerate(taken_A.split(max(1, CHUNK_ROWS // per_block))):
            part = Slots(slots.labels_AK[blocks_A], slots.valid_AK[blocks_A])
            with torch.autocast(hidden_TD.device.type, enabled=False):
                own = pack.anchors_A[blocks_A], head, embedding_VD, config
                loss, measured = self._part(hidden_AKD[blocks_A], part, *own)
            total = total + loss
            if is_measured and (not is_training or number == 0):
                metrics.flat += measured.flat
        return total * (config.selector / (num_slots * sample.share)), metrics

    def _part(
        self, hidden_AKD: Tensor, slots: Slots, anchors_A: Tensor, head: Head, embedding_VD: Tensor, config: LossConfig
    ) -> tuple[Tensor, SlotMetrics]:
        """Loss (a sum) and figures of a few blocks."""
        valid_AK = slots.valid_AK
        local_AK, reached_AK = head.local(slots.labels_AK)
        with torch.no_grad():
            logits_AKV = head.logits(hidden_AKD.flatten(0, 1)).unflatten(0, valid_AK.shape).float()
            # On CPU twice as fast as logsumexp.
            ce_AK = -torch.log_softmax(logits_AKV, dim=-1).gather(-1, local_AK[..., None])[..., 0]
        scores_AKM, is_gold_AKM = self._scores(hidden_AKD, logits_AKV, slots, anchors_A, head, embedding_VD)
        found_AK = is_gold_AKM.any(-1) & reached_AK & valid_AK
        place_AK1 = is_gold_AKM.long().argmax(-1, keepdim=True)
        own_AK = -torch.log_softmax(scores_AKM, dim=-1).gather(-1, place_AK1)[..., 0]
        weight_AK = slot_weights(config, ce_AK, valid_AK) * found_AK
        first_AK = is_gold_AKM[..., 0] & found_AK
        right_AK = (scores_AKM.argmax(-1) == place_AK1[..., 0]) & found_AK
        metrics = SlotMetrics.zero(valid_AK.shape[1])
        metrics.told_2[0] = (own_AK.detach() * found_AK).sum(dtype=torch.float64).cpu()
        metrics.told_2[1] = found_AK.sum().cpu()
        walked = (valid_AK, first_AK.cumprod(dim=1), right_AK, right_AK.cumprod(dim=1))
        metrics.walked_4K[:] = torch.stack([each.sum(0).cpu() for each in walked])
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
