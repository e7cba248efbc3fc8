"""Drafters of one small network that drafts token after token, each step told what the step before found: EAGLE-3, MTP.

Verified positions are read with the target's own features, in one pass of all that a row has waiting (`TappedDrafter`), and
their keys and values stay; those of drafts stand behind them, and the next pass writes over them. So an entry of the cache is a
position of the target and the token behind it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from paceline import rng
from paceline.draft.base import Observed
from paceline.draft.tapped import TappedDrafter, features_of
from paceline.model.kv_cache import KVCache
from paceline.model.logits import sample, target_probs
from paceline.model.target import Target
from paceline.types import Batch, DraftBlock, Sequence


class ChainPath(Protocol):
    """A network made for decoding beside one target."""

    @property
    def cache(self) -> KVCache: ...
    @property
    def residual_dtype(self) -> torch.dtype: ...
    @property
    def weight_bytes(self) -> int: ...
    def extend(self, rows: list[int], starts: list[int], counts: list[int], tokens: list[int], taps_TF: Tensor) -> Tensor:
        """Append entries of newly verified positions, `tokens` those behind each of them; what each row's last one tells the
        draft after it [B, D]. `taps_TF` may be longer."""
        ...

    def step(self, rows: list[int], starts: list[int], tokens: list[int], told_BD: Tensor) -> Tensor:
        """The entry of one draft a row, written behind what counts: what it tells the draft after it [B, D]."""
        ...

    def logits(self, told_BD: Tensor) -> Tensor:
        """Over the draft vocabulary [B, V], float32 or the target's dtype."""
        ...


@dataclass(slots=True)
class _Chain:
    """One row's drafts on their way."""

    index: int
    """Of the row in its batch."""
    seq: Sequence
    limit: int
    tokens: list[int] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)
    """Of each draft that was drawn, the distribution it was drawn from."""


class ChainedDrafter(TappedDrafter):
    """Drafts chains. Greedy and seeded requests get certain drafts, sampled ones drafts with their distribution. `bind` of a
    subclass sets `_path` and calls `_begin`."""

    has_own_threads = False
    looks_ahead = 1
    _path: ChainPath

    def _begin(self, target: Target, size: int) -> None:
        """`size`: numbers that a step tells the next one."""
        self._overwrites_taps = target.overwrites_taps
        self._told = torch.zeros(target.cache.num_rows, size, dtype=self._path.residual_dtype, device=target.device)
        """By row, what its last entry tells the next draft."""
        self._forget_rows()

    @property
    def _cache(self) -> KVCache:
        return self._path.cache

    def _take_in(self, rows: list[int], starts: list[int], counts: list[int], observed: list[Observed]) -> None:
        tokens: list[int] = []
        for one in observed:
            behind = one.sequence.tokens[one.start + 1 : one.start + one.count + 1]
            # A text that was cut at a stop string lacks tokens that were said; nobody adopts positions beyond its end.
            tokens += behind + [0] * (one.count - len(behind))
        told_BD = self._path.extend(rows, starts, counts, tokens, features_of(observed))
        self._told[torch.tensor(rows, device=told_BD.device)] = told_BD

    @torch.inference_mode()
    def propose(self, batch: Batch) -> DraftBlock:
        """As Drafter.propose; logits that are not finite numbers end their row's drafts."""
        limits = batch.draft_limits_B(self.num_drafted)
        chains = [_Chain(index, batch.sequences[index], limit) for index, limit in enumerate(limits) if limit > 0]
        block = DraftBlock.certain([[] for _ in limits])
        if not chains:
            return block
        self._sort()
        self._inject([chain.seq.row for chain in chains])
        going = chains
        told_BD = self._told[torch.tensor([chain.seq.row for chain in going], device=self._told.device)]
        while True:
            places = self._extend(going, self._path.logits(told_BD))
            if not places:
                break
            going = [going[place] for place in places]
            rows, tokens = [chain.seq.row for chain in going], [chain.tokens[-1] for chain in going]
            starts = [self._cache.lengths[chain.seq.row] + len(chain.tokens) - 1 for chain in going]
            told_BD = self._path.step(rows, starts, tokens, told_BD[torch.tensor(places, device=told_BD.device)])
        for chain in chains:
            block.tokens_B[chain.index] = chain.tokens
            block.probs_B[chain.index] = torch.stack(chain.probs) if chain.probs else None
        return block

    def _extend(self, chains: list[_Chain], logits_BV: Tensor) -> list[int]:
        """Add a draft to each chain whose logits are finite; the places of those that go on."""
        largest_B, best_B = (each.tolist() for each in logits_BV.float().max(-1))
        going: list[int] = []
        for place, chain in enumerate(chains):
            if not math.isfinite(largest_B[place]):
                continue
            seq, token = chain.seq, self._token(best_B[place])
            if seq.kind == "sampled":
                probs_V = target_probs(self._over_all_tokens(logits_BV[place])[None], seq.params)[0]
                token = sample(probs_V, rng.uniform(seq.seed, rng.DRAFT, seq.cached_len, len(chain.tokens)))
                chain.probs.append(probs_V)
            chain.tokens.append(token)
            if len(chain.tokens) < chain.limit:
                going.append(place)
        return going

    def _token(self, place: int) -> int:
        """The token of a place of the logits."""
        return place

    def _over_all_tokens(self, logits_V: Tensor) -> Tensor:
        """Logits of every token of the target."""
        return logits_V
