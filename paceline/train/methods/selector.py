"""Training of a DFlash 2 drafter's selector, in addition to the slots' loss of train/learn/losses.py.

At each slot (draft position) the selector scores the drafting head's top tokens, given the target's previous token. Its
loss is the cross entropy of the target's token among them; a slot whose token is not a candidate has no loss, but
counts in the weights of the others (d-pace). Hidden states and logits are detached: body and convolution learn as
without a selector, so its gain is measured separately.

It learns from a sample of a step's blocks (`BlockSample`): it needs logits of the whole draft vocabulary, which would
take a third of a step for all blocks. Held-out evaluations use every block.

Codebooks may be factored (`draft/dflash2/drafter.py`): two small matrices on the target's embedding, the same for every
token. `materialised` expands them in checkpoints.
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
from paceline.draft.dspark.drafter import DSparkNetwork
from paceline.train.config import LossConfig
from paceline.train.learn.losses import CHUNK_ROWS, Head, SlotMetrics, Slots, slot_weights
from paceline.train.learn.packs import DFlashTrainable, Pack
from paceline.train.methods.dspark import DSparkTrainable


@dataclass(frozen=True, slots=True)
class BlockSample:
    """A random sample of a training step's blocks. DFlash 2's selector is trained only on these, to save time. Each
    block is in the sample with probability `share`; the loss is divided by `share` to compensate. The choice depends
    only on the block and on `key` (text that names the step), so it is the same however blocks are divided among packs
    and processes."""

    share: float = 1.0
    key: str = ""

    def of(self, pack: Pack) -> Tensor:
        """Returns the indices [N] of the pack's blocks that are in the sample, ascending."""
        if self.share >= 1:
            return torch.arange(len(pack.anchors_A), device=pack.anchors_A.device)
        tokens_AK = torch.where(pack.slots.valid_AK, pack.slots.labels_AK, -1).long()
        starts_A = torch.cat(list(pack.layout.anchors)).to(tokens_AK.device)
        rows = torch.cat([starts_A[:, None], pack.anchors_A[:, None], tokens_AK], dim=1).cpu().numpy()
        sampled = [number for number, row in enumerate(rows) if self._takes(row.tobytes())]
        return torch.tensor(sampled, dtype=torch.int64, device=tokens_AK.device)

    def _takes(self, block: bytes) -> bool:
        digest = hashlib.blake2b(block, digest_size=8, key=self.key.encode()).digest()
        return int.from_bytes(digest, "little") < self.share * 2**64


ALL_BLOCKS = BlockSample()


class DFlash2Trainable(DFlashTrainable):
    """Trains DFlash 2: DFlash with a selector, which chooses each draft from the candidates of its position."""

    network: DFlash2Network

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
        sample: BlockSample = ALL_BLOCKS,
    ) -> tuple[Tensor, SlotMetrics]:
        """Returns (loss, metrics) of the selector for one pack (batch of A blocks with K draft positions each). The
        loss is multiplied by the weight `config.selector`, and divided by `num_slots`, the draft positions of the whole
        step.
        - `hidden_TD` [A * K, D]: result of `hidden` for the pack.
        - `head`: LM head that proposes the candidates.
        - `embedding_VD`: the target's embedding matrix.
        - `is_measured`: if False, all metrics are zero.
        - `is_learning`: False for a training step without the selector: loss, gradients and metrics are zero.
        - `sample`: the blocks to train on.

        In an evaluation (without gradients), `is_learning` and `sample` have no effect: all blocks are used."""
        slots, is_training = pack.slots, torch.is_grad_enabled()
        per_block, sample = slots.labels_AK.shape[1], sample if is_training else ALL_BLOCKS
        metrics, total = SlotMetrics.zero(per_block), torch.zeros((), device=hidden_TD.device)
        sampled_A = sample.of(pack)
        if is_training and (not is_learning or not len(sampled_A)):
            # Every weight gets a gradient, which optimisers and other processes need.
            weights = self.network.candidate_selector.parameters()
            return sum((weight.sum() for weight in weights), total) * 0.0, metrics
        hidden_AKD, before_AK = hidden_TD.detach().unflatten(0, (-1, per_block)), pack.before_AK
        for number, blocks_A in enumerate(sampled_A.split(max(1, CHUNK_ROWS // per_block))):
            part = Slots(slots.labels_AK[blocks_A], slots.valid_AK[blocks_A])
            with torch.autocast(hidden_TD.device.type, enabled=False):
                inputs = before_AK[blocks_A], head, embedding_VD, config
                loss, measured = self._part(hidden_AKD[blocks_A], part, *inputs)
            total = total + loss
            if is_measured and (not is_training or number == 0):
                metrics.flat += measured.flat
        return total * (config.selector / (num_slots * sample.share)), metrics

    def _part(
        self, hidden_AKD: Tensor, slots: Slots, before_AK: Tensor, head: Head, embedding_VD: Tensor, config: LossConfig
    ) -> tuple[Tensor, SlotMetrics]:
        """Returns loss (a sum) and metrics of a few blocks."""
        valid_AK = slots.valid_AK
        local_AK, reached_AK = head.local(slots.labels_AK)
        with torch.no_grad():
            logits_AKV = head.logits(hidden_AKD.flatten(0, 1)).unflatten(0, valid_AK.shape).float()
            # On CPU twice as fast as logsumexp.
            ce_AK = -torch.log_softmax(logits_AKV, dim=-1).gather(-1, local_AK[..., None])[..., 0]
        scores_AKM, is_gold_AKM = self._scores(hidden_AKD, logits_AKV, slots, before_AK, head, embedding_VD)
        learned_AK = is_gold_AKM.any(-1) & reached_AK & valid_AK
        gold_AK1 = is_gold_AKM.long().argmax(-1, keepdim=True)
        own_AK = -torch.log_softmax(scores_AKM, dim=-1).gather(-1, gold_AK1)[..., 0]
        weight_AK = slot_weights(config, ce_AK, valid_AK) * learned_AK
        top1_AK = is_gold_AKM[..., 0] & learned_AK
        right_AK = (scores_AKM.argmax(-1) == gold_AK1[..., 0]) & learned_AK
        metrics = SlotMetrics.zero(valid_AK.shape[1])
        metrics.selector_2[0] = (own_AK.detach() * learned_AK).sum(dtype=torch.float64).cpu()
        metrics.selector_2[1] = learned_AK.sum().cpu()
        sums = (valid_AK, top1_AK.cumprod(dim=1), right_AK, right_AK.cumprod(dim=1))
        metrics.selector_4K[:] = torch.stack([values_AK.sum(0).cpu() for values_AK in sums])
        return (own_AK * weight_AK).sum(), metrics

    def _scores(
        self, hidden_AKD: Tensor, logits_AKV: Tensor, slots: Slots, before_AK: Tensor, head: Head, embedding_VD: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the scores of each slot's candidates after the target's previous token, and which is the target's
        token."""
        selector, anchors_A = self.network.candidate_selector, before_AK[:, 0]
        picks = score(selector, hidden_AKD, logits_AKV, anchors_A, head.columns, before_AK, embedding_VD)
        return picks.scores_BKPM[:, :, 0], picks.chosen_BKM == head.local(slots.labels_AK)[0][..., None]

    @torch.no_grad()
    def right(self, hidden_TD: Tensor, pack: Pack, head: Head, embedding_VD: Tensor) -> Tensor:
        """Returns bool [A, K] (A blocks, K draft positions each): True where the selector, given the target's tokens of
        the positions before, chooses the target's token. hidden_TD [A * K, D]: result of `hidden` for the same pack;
        `head`: LM head that proposes the candidates; embedding_VD: the target's embedding matrix."""
        slots = pack.slots
        hidden_AKD = hidden_TD.unflatten(0, slots.valid_AK.shape)
        logits_AKV = head.logits(hidden_TD).unflatten(0, slots.valid_AK.shape).float()
        scores_AKM, is_gold_AKM = self._scores(hidden_AKD, logits_AKV, slots, pack.before_AK, head, embedding_VD)
        picked_AK = is_gold_AKM.gather(-1, scores_AKM.argmax(-1, keepdim=True))[..., 0]
        return picked_AK & head.local(slots.labels_AK)[1] & slots.valid_AK


def trainable_of(network: DFlashNetwork, raw: dict[str, Any], attention: str = "auto") -> DFlashTrainable:
    """Returns the Trainable of a DFlash, DFlash 2 or DSpark network. `raw`: its config.json; `attention`: auto, split,
    sdpa or flex."""
    if isinstance(network, DSparkNetwork):
        return DSparkTrainable(network, raw, attention)
    return (DFlash2Trainable if isinstance(network, DFlash2Network) else DFlashTrainable)(network, raw, attention)
