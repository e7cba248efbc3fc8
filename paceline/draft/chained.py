"""Base class of autoregressive drafters (EAGLE-3, MTP): one small network drafts token by token.

Verified positions are read together with the target's hidden states (features), in one pass over all new positions of a
row. Their keys and values stay in the cache. Entries of drafts follow them; the next pass overwrites these. A cache
entry belongs to one target position and the token after it.

For trees, a step reads several drafts of a row, each attending to its ancestors: the most probable ones that the
previous step proposed (EAGLE-2, arXiv 2406.16858, section 4.1), including the chain's next draft.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline import rng
from paceline.draft.base import Observed, sample_draft
from paceline.draft.dflash.reading import inverse_temperature, over_vocabulary
from paceline.draft.eagle3.native import NativeChain
from paceline.draft.eagle3.path import TorchChain
from paceline.draft.eagle3.static import StaticChain
from paceline.draft.foresight import Foresight, ranked
from paceline.draft.level import Level
from paceline.draft.tapped import StaticDrafting, TappedDrafter, features_of
from paceline.model.sampling.logits import top_logprobs
from paceline.model.sampling.race import FIELD
from paceline.model.target import Target
from paceline.plan.trees import LEAST_GAIN, MOST_NODES, Candidates, Likely
from paceline.types import Batch, DraftBlock, Sequence

MOST_BRANCHES = 4
"""Maximum drafts of one row that one drafting step reads (tree nodes of one depth)."""


@dataclass(slots=True)
class _Node:
    """A tree node that the network has read: a draft, or the root (the last verified token)."""

    path: tuple[int, ...]
    """Drafted tokens from the root to this node; empty for the root."""
    chance: float = 0.0
    """The drafter's log-probability that all tokens of `path` are accepted."""
    seen: tuple[int, ...] = ()
    """Indices, among the row's entries of drafts, of this node and its ancestors."""


@dataclass(slots=True)
class _Row:
    """Drafting state of one row during a round."""

    index: int
    """Index in the batch."""
    seq: Sequence
    limit: int
    grows: bool
    """True if candidates for a tree are collected."""
    guesses: bool
    """True if drafts predict the target's samples from its sampling noise (common random numbers)."""
    tokens: list[int] = field(default_factory=list)
    """The chain: at every draft position the most probable token, or the sampled one."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probabilities along the chain. Empty for sampled drafts (see `DraftBlock.confidence_B`)."""
    probs: list[Tensor] = field(default_factory=list)
    """For each sampled draft, the distribution it was sampled from."""
    branches: dict[tuple[int, ...], Likely] = field(default_factory=dict)
    nodes: list[_Node] = field(default_factory=lambda: [_Node(())])
    """Nodes read by the latest step."""
    num_entries: int = 0
    """Number of cache entries of drafts, after the row's verified entries."""

    @property
    def is_drawn(self) -> bool:
        """True if drafts are sampled, each with its distribution."""
        return self.seq.kind == "sampled" and not (self.grows or self.guesses)

    @property
    def is_certain(self) -> bool:
        """True if drafts are deterministic and the row needs no candidates."""
        return not (self.grows or self.guesses or self.is_drawn)

    def next_nodes(self) -> list[tuple[int, _Node]]:
        """Nodes for the next step, each with its parent's index in `nodes`. The first is the chain's next draft; in
        trees the most probable others follow. Empty once the row has enough drafts."""
        if len(self.tokens) >= self.limit or len(self.tokens) == len(self.nodes[0].path):
            return []
        nodes: list[tuple[float, int, tuple[int, ...]]] = []
        if self.grows:
            for place, node in enumerate(self.nodes):
                for token, logprob in zip(*self.branches.get(node.path, ([], [])), strict=True):
                    nodes.append((node.chance + logprob, place, (*node.path, token)))
            chain = next(each for each in nodes if each[2] == tuple(self.tokens))
            others = sorted(
                (each for each in nodes if each is not chain and each[0] >= math.log(LEAST_GAIN)), reverse=True
            )
            nodes = [chain, *others[: MOST_BRANCHES - 1]]
        else:
            nodes = [(0.0, 0, tuple(self.tokens))]
        first, self.num_entries = self.num_entries, self.num_entries + len(nodes)
        return [
            (place, _Node(path, chance, (*self.nodes[place].seen, first + number)))
            for number, (chance, place, path) in enumerate(nodes)
        ]


class ChainedDrafter(TappedDrafter):
    """Base class of drafters whose network drafts token by token: EAGLE-3, MTP. Each request gets deterministic or
    sampled drafts by the rules that `DFlashDrafter` describes.

    For subclasses: `bind` calls `_bind_path`, which makes the decode path, and then `_begin`, which allocates drafting
    states (hidden states that one drafting step passes to the next).
    """

    is_stepwise, has_own_threads = True, False
    looks_ahead = 1
    foresight = Foresight()
    _path: TorchChain | NativeChain

    _states_of: TorchChain | NativeChain | None = None
    """The decode path for which the drafting states were allocated."""

    def _begin(self, target: Target, size: int, ids: Tensor | None = None) -> None:
        """Allocate drafting states [rows, size] for a new decode path. `ids`: token id of each column of the logits;
        None: column i is token i."""
        self.has_own_threads = isinstance(self._path, NativeChain)
        self._ids, self._vocab_size = None if ids is None else ids.to(target.device), target.vocab_size
        self._token_of = range(target.vocab_size) if ids is None else ids.tolist()
        if self._states_of is self._path:
            return  # CUDA graphs that contain this path read and write the states at their address
        self._states_of = self._path
        self._states = torch.zeros(target.cache.num_rows, size, dtype=self._path.residual_dtype, device=target.device)
        """Drafting state after each row's last entry."""

    @property
    def recorded_rounds(self) -> dict[Any, Any] | None:
        """Decode rounds captured as CUDA graphs that contain this drafter, as in `TappedDrafter.recorded_rounds`. None
        unless its decode path uses PyTorch operations, because native calls cannot be captured."""
        return self._rounds if isinstance(self._path, TorchChain) else None

    def static_drafting(self, num_rows: int, count: int) -> StaticDrafting:
        assert isinstance(self._path, TorchChain)
        return StaticChain(self._path, self._states, self.foresight, self._ids, num_rows, count)

    @property
    def _slack(self) -> int:
        """Cache entries reserved for drafts after a row's longest text."""
        return MOST_BRANCHES * max(self.num_drafted, 1)

    def _take_in(self, rows: list[int], starts: list[int], counts: list[int], observed: list[Observed]) -> None:
        tokens: list[int] = []
        for one in observed:
            behind = one.sequence.tokens[one.start + 1 : one.start + one.count + 1]
            # A text cut at a stop string lacks its last generated tokens; positions beyond its end are never adopted.
            tokens += behind + [0] * (one.count - len(behind))
        state_BD = self._path.extend(rows, starts, counts, tokens, features_of(observed))
        self._states[torch.tensor(rows, device=state_BD.device)] = state_BD

    @torch.inference_mode()
    def propose(self, batch: Batch) -> DraftBlock:
        """Drafts token by token for each sequence, at most `self.num_drafted` tokens. A row's drafts end before the
        first position with non-finite logits. If `batch.num_candidates` is above 0, rows without a grammar also get
        that number of candidate tokens at each position, from which draft trees are built."""
        limits = batch.draft_limits_B(self.num_drafted)
        rows = [self._row(index, limit, batch) for index, limit in enumerate(limits) if limit > 0]
        block = DraftBlock.certain([[] for _ in limits])
        if not rows:
            return block
        self._sort()
        self._inject([row.seq.row for row in rows])
        going = rows
        state_TD = self._states[torch.tensor([row.seq.row for row in rows], device=self._states.device)]
        while going:
            self._extend(going, self._path.logits(state_TD), batch.num_candidates)
            going, state_TD = self._step(going, state_TD)
        grows = any(row.grows for row in rows)
        confidence_B: list[list[float] | None] = [None] * len(limits)
        block.confidence_B = confidence_B
        candidates_B: list[Candidates | None] = [None] * len(limits)
        block.candidates_B = candidates_B if grows else None
        for row in rows:
            block.tokens_B[row.index] = row.tokens
            confidence_B[row.index] = row.logprobs or None
            block.probs_B[row.index] = torch.stack(row.probs) if row.probs else None
            if row.grows:
                candidates_B[row.index] = self._candidates(row)
        return block

    def _row(self, index: int, limit: int, batch: Batch) -> _Row:
        seq = batch.sequences[index]
        grows = bool(batch.num_candidates) and seq.constraint is None
        guesses = batch.noise_aware and seq.kind != "greedy" and seq.params.lossy is None
        return _Row(index, seq, limit, grows, guesses)

    def _step(self, rows: list[_Row], state_TD: Tensor) -> tuple[list[_Row], Tensor]:
        """Read the next drafts of the rows that continue; returns these rows and their new drafting states."""
        going, places, level, tokens, first = list[_Row](), list[int](), Level(), list[int](), 0
        for row in rows:
            behind, num_read = row.num_entries, len(row.nodes)
            following = row.next_nodes()
            if following:
                places += [first + place for place, _ in following]
                row.nodes = [node for _, node in following]
                tokens += [node.path[-1] for node in row.nodes]
                level.add(row.seq.row, self._cache.lengths[row.seq.row], behind, [node.seen for node in row.nodes])
                going.append(row)
            first += num_read
        if not going:
            return going, state_TD
        return going, self._path.step(level, tokens, state_TD[torch.tensor(places, device=state_TD.device)])

    def _extend(self, rows: list[_Row], logits_TV: Tensor, count: int) -> None:
        """Append a draft to every chain and candidates to every node, where logits are finite."""
        first = 0
        best = iter(self._best(rows, logits_TV) if any(row.is_certain for row in rows) else ())
        for row in rows:
            logits_NV = logits_TV[first : first + len(row.nodes)]
            first += len(row.nodes)
            if row.grows or row.guesses:
                self._name(row, logits_NV, max(count, 1))
            elif row.is_drawn:
                self._draw(row, logits_NV)
            else:
                token, logprob = next(best)
                if math.isfinite(logprob):
                    row.tokens.append(token)
                    row.logprobs.append(logprob)

    def _best(self, rows: list[_Row], logits_TV: Tensor) -> list[tuple[int, float]]:
        """Most probable token and its log-probability, for the rows with deterministic drafts."""
        firsts, first = list[int](), 0
        for row in rows:
            if row.is_certain:
                firsts.append(first)
            first += len(row.nodes)
        own_BV = logits_TV[torch.tensor(firsts, device=logits_TV.device)].float()
        largest_B, best_B = own_BV.max(-1)
        logprob_B = (largest_B - own_BV.logsumexp(-1)).tolist()
        return [(self._token_of[place], logprob) for place, logprob in zip(best_B.tolist(), logprob_B, strict=True)]

    def _draw(self, row: _Row, logits_NV: Tensor) -> None:
        if not math.isfinite(float(logits_NV[0].float().max())):
            return
        token, probs_V = sample_draft(row.seq, self._over_all_tokens(logits_NV[:1])[0], len(row.tokens))
        row.tokens.append(token)
        row.probs.append(probs_V)

    def _name(self, row: _Row, logits_NV: Tensor, count: int) -> None:
        """Store the candidates after every node; the chain continues with the most probable one after its end."""
        num_candidates = max(count, FIELD) if row.guesses else count
        ids_NM, logprobs_NM = top_logprobs(logits_NV.float(), num_candidates, inverse_temperature(row.seq))
        noise = rng.Noise(row.seq.seed, len(row.seq.tokens) + len(row.nodes[0].path)) if row.guesses else None
        for number, (node, ids, logprobs) in enumerate(zip(row.nodes, ids_NM, logprobs_NM, strict=True)):
            if not math.isfinite(logprobs[0]):
                continue
            tokens = [self._token_of[place] for place in ids]
            if noise:
                logprobs = self.foresight.chances(logprobs, noise.exponentials(tokens))
                tokens, logprobs = ranked(tokens, logprobs, count)
            row.branches[node.path] = tokens, logprobs
            if number == 0:
                row.tokens.append(tokens[0])
                row.logprobs.append(logprobs[0])

    def _candidates(self, row: _Row) -> Candidates:
        chain = [row.branches[tuple(row.tokens[:length])] for length in range(len(row.tokens))]
        most = min(self._cache.max_len - row.seq.cached_len - 1, MOST_NODES)
        return Candidates(
            [tokens for tokens, _ in chain], [logprobs for _, logprobs in chain], most, branches=row.branches
        )

    def _over_all_tokens(self, logits_KV: Tensor) -> Tensor:
        """Expand logits over the draft vocabulary to the target's whole vocabulary."""
        return logits_KV if self._ids is None else over_vocabulary(logits_KV, self._ids, self._vocab_size)
