"""Autoregressive drafting in fixed shapes, as a part of a decode round that is captured as one CUDA graph.

A round drafts K tokens in K - 1 steps of one cache entry per row, from the drafting states that the last round left.
After the target's pass it computes the entries of all K + 1 verified positions from the target's hidden states and the
tokens after them. Entries after the accepted drafts are never read: later entries overwrite them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.draft.dflash.reading import top_logprob
from paceline.draft.eagle3.path import TorchChain
from paceline.draft.foresight import Foresight
from paceline.draft.tapped import Verified
from paceline.model.sampling.device_race import FAILED, Draws, foreseen_tokens
from paceline.model.torch.kernels.attend import Sight
from paceline.model.torch.recorded_pass import StaticPlan, StaticWriter


class StaticChain:
    """Token-by-token drafting of EAGLE-3 and MTP within a decode round that is captured as one CUDA graph (see
    `tapped.StaticDrafting`)."""

    def __init__(
        self,
        path: TorchChain,
        states_RD: Tensor,
        foresight: Foresight,
        draft_ids: Tensor | None,
        num_rows: int,
        count: int,
    ) -> None:
        """`states_RD`: drafting state after the last entry of each cache row, which rounds read and write. `draft_ids`:
        token id of each column of the logits; None: column i is token i. `num_rows`: B. `count`: J = K + 1."""
        device, scratch = states_RD.device, path.cache.max_len
        self._path, self._states_BD, self._count = path, states_RD[:num_rows], count
        self._foresight, self._draft_ids = foresight, draft_ids
        self._step_writer = StaticWriter(num_rows, 1, scratch, device)
        self._writer = StaticWriter(num_rows, count, scratch, device)
        self._slot_J = torch.arange(count, device=device)

    def draft(
        self, anchor_B: Tensor, length_B: Tensor, is_live_B: Tensor, draws: Draws | None
    ) -> tuple[Tensor, Tensor]:
        """Returns drafts and their log-probabilities, as `StaticDrafting.draft` describes. To compute draft k, counted
        from 0, the network reads draft k - 1, which becomes the row's cache entry `length_B` + k - 1."""
        state_BD, tokens, confidence = self._states_BD, list[Tensor](), list[Tensor]()
        for slot in range(self._count - 1):
            if slot:
                start_B, token_B = length_B + (slot - 1), tokens[-1].clamp(min=0)
                state_BD = self._read(self._step_writer, start_B, is_live_B.long(), token_B, state_BD, 1)
            token_B, confidence_B = self._choose(self._path.logits(state_BD), draws, length_B + (slot + 1))
            tokens.append(token_B)
            confidence.append(confidence_B)
        return torch.stack(tokens, 1), torch.stack(confidence, 1)

    def _choose(self, logits_BV: Tensor, draws: Draws | None, position_B: Tensor) -> tuple[Tensor, Tensor]:
        """Returns one draft of each row, or FAILED, and its log-probability in float64. `position_B`: index of the
        draft in its text."""
        largest_B, best_B = logits_BV.max(-1)
        token_B = best_B if self._draft_ids is None else self._draft_ids[best_B]
        token_B = token_B.masked_fill(~largest_B.isfinite(), FAILED)
        confidence_B = top_logprob(logits_BV).double()
        if draws is None:
            return token_B, confidence_B
        settings = self._foresight.scale, self._foresight.spread, self._draft_ids
        own_B1, own_confidence_B1 = foreseen_tokens(logits_BV[:, None], draws, position_B[:, None], *settings)
        is_greedy_B = draws.is_greedy_B
        return (
            torch.where(is_greedy_B, token_B, own_B1[:, 0]),
            torch.where(is_greedy_B, confidence_B, own_confidence_B1[:, 0]),
        )

    def write_behind(self, verified: Verified) -> None:
        """Write the cache entries of the verified positions, and the drafting state after each row's last accepted
        position. Without a bonus token this position's entry and state are wrong, and the caller must compute them
        again (`DeviceRounds`)."""
        length_B, counts_B, tokens_BJ, accepted_B, bonus_B, taps_TF = verified
        is_last_BJ = self._slot_J == accepted_B[:, None]
        next_BJ = torch.where(is_last_BJ, bonus_B.clamp(min=0)[:, None], tokens_BJ.roll(-1, 1))
        features_TD = self._path.features(taps_TF)
        state_TD = self._read(self._writer, length_B, counts_B, next_BJ.flatten(), features_TD, self._count)
        last_B11 = accepted_B[:, None, None].expand(-1, 1, state_TD.shape[-1])
        state_BD = state_TD.unflatten(0, (-1, self._count)).gather(1, last_B11)[:, 0]
        self._states_BD.copy_(torch.where(counts_B[:, None] > 0, state_BD, self._states_BD))

    def _read(
        self, writer: StaticWriter, starts_B: Tensor, counts_B: Tensor, tokens_T: Tensor, hidden_TD: Tensor, count: int
    ) -> Tensor:
        """Computes `count` cache entries of each row from `starts_B` on, of which `counts_B` are valid; returns their
        drafting states."""
        entries_T = writer.point(starts_B, counts_B).flatten()
        plans = {
            window: StaticPlan(Sight(starts_B, counts_B, count, window=window), writer.own_BJ.flatten())
            for window in self._path.windows
        }
        return self._path.run(plans, writer, entries_T, tokens_T, hidden_TD)
