"""Drafters of one small network that drafts token after token, each step told what the step before found: EAGLE-3, MTP.

Verified positions are read with the target's own features, in one pass of all that a row has waiting (`TappedDrafter`), and
their keys and values stay; those of drafts stand behind them, and the next pass writes over them. So an entry of the cache is a
position of the target and the token behind it.

Where trees are asked for, a step reads several drafts of a row, each behind its own ancestors: the likeliest of all that the
step before has named (EAGLE-2, arXiv 2406.16858, section 4.1), the chain's next draft among them. A tree then takes as many
passes as a chain, of more tokens each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from paceline import rng
from paceline.draft.base import Observed
from paceline.draft.dflash.reading import inverse_temperature
from paceline.draft.foresight import Foresight, ranked
from paceline.draft.level import Level
from paceline.draft.tapped import TappedDrafter, features_of
from paceline.model.kv_cache import KVCache
from paceline.model.sampling.logits import likeliest, sample, target_probs
from paceline.model.sampling.race import FIELD
from paceline.model.target import Target
from paceline.plan.trees import LEAST_GAIN, MOST_NODES, Candidates, Likely
from paceline.types import Batch, DraftBlock, Sequence

MOST_BRANCHES = 4
"""Drafts of one row that a step reads."""


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

    def step(self, level: Level, tokens: list[int], told_TD: Tensor) -> Tensor:
        """The entries of some drafts, written behind what counts: what each tells the drafts after it [T, D]."""
        ...

    def logits(self, told_TD: Tensor) -> Tensor:
        """Over the draft vocabulary [T, V], float32 or the target's dtype."""
        ...


@dataclass(slots=True)
class _Node:
    """A draft that was read, or the anchor."""

    path: tuple[int, ...]
    """The drafts up to it, itself the last; none of the anchor."""
    chance: float = 0.0
    """Log-probability that all of them stand, as the drafter tells it."""
    seen: tuple[int, ...] = ()
    """Its ancestors' places among the row's entries of drafts, and its own."""


@dataclass(slots=True)
class _Row:
    """One row's drafts on their way."""

    index: int
    """Of the row in its batch."""
    seq: Sequence
    limit: int
    grows: bool
    """Whether a tree may be made of what it drafts."""
    guesses: bool
    """Whether it drafts what the target will most likely draw, by the numbers that it draws with."""
    tokens: list[int] = field(default_factory=list)
    """The chain: behind each draft the likeliest one, or the one that was drawn."""
    sure: list[float] = field(default_factory=list)
    """Log-probabilities along it; not of drafts that are drawn, of which each depends on those before it: how many are checked
    may not depend on what was drawn (`DraftBlock.sure_B`)."""
    probs: list[Tensor] = field(default_factory=list)
    """Of each draft that was drawn, the distribution it was drawn from."""
    branches: dict[tuple[int, ...], Likely] = field(default_factory=dict)
    nodes: list[_Node] = field(default_factory=lambda: [_Node(())])
    """Those that the latest step read."""
    num_entries: int = 0
    """Of drafts, behind the row's verified ones."""

    @property
    def is_drawn(self) -> bool:
        """Whether drafts are drawn, each with its distribution."""
        return self.seq.kind == "sampled" and not (self.grows or self.guesses)

    def next_nodes(self) -> list[tuple[int, _Node]]:
        """What the next step reads, each with the place of its parent among `nodes`: the chain's next draft, and for trees the
        likeliest others; nothing where the row has drafted enough."""
        if len(self.tokens) >= self.limit or len(self.tokens) == len(self.nodes[0].path):
            return []
        found: list[tuple[float, int, tuple[int, ...]]] = []
        if self.grows:
            for place, node in enumerate(self.nodes):
                for token, logprob in zip(*self.branches.get(node.path, ([], [])), strict=True):
                    found.append((node.chance + logprob, place, (*node.path, token)))
            chain = next(each for each in found if each[2] == tuple(self.tokens))
            others = sorted((each for each in found if each is not chain and each[0] >= math.log(LEAST_GAIN)), reverse=True)
            found = [chain, *others[: MOST_BRANCHES - 1]]
        else:
            found = [(0.0, 0, tuple(self.tokens))]
        first, self.num_entries = self.num_entries, self.num_entries + len(found)
        return [
            (place, _Node(path, chance, (*self.nodes[place].seen, first + number)))
            for number, (chance, place, path) in enumerate(found)
        ]


class ChainedDrafter(TappedDrafter):
    """Greedy and seeded requests get certain drafts, sampled ones drafts with their distribution, or guesses where the target's
    own draws decide. `bind` of a subclass sets `_path` and calls `_begin`."""

    is_stepwise, has_own_threads = True, False
    looks_ahead = 1
    foresight = Foresight()
    _path: ChainPath

    def _begin(self, target: Target, size: int) -> None:
        """`size`: numbers that a step tells the next one."""
        self._overwrites_taps = target.overwrites_taps
        self._most_len = target.cache.max_len
        self._told = torch.zeros(target.cache.num_rows, size, dtype=self._path.residual_dtype, device=target.device)
        """By row, what its last entry tells the next draft."""
        self._forget_rows()

    @property
    def _cache(self) -> KVCache:
        return self._path.cache

    @property
    def _slack(self) -> int:
        """Entries of drafts behind a row's longest text."""
        return MOST_BRANCHES * max(self.num_drafted, 1)

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
        rows = [self._row(index, limit, batch) for index, limit in enumerate(limits) if limit > 0]
        block = DraftBlock.certain([[] for _ in limits])
        if not rows:
            return block
        self._sort()
        self._inject([row.seq.row for row in rows])
        going = rows
        told_TD = self._told[torch.tensor([row.seq.row for row in rows], device=self._told.device)]
        while going:
            self._extend(going, self._path.logits(told_TD), batch.num_candidates)
            going, told_TD = self._step(going, told_TD)
        grows = any(row.grows for row in rows)
        sure_B: list[list[float] | None] = [None] * len(limits)
        block.sure_B = sure_B
        candidates_B: list[Candidates | None] = [None] * len(limits)
        block.candidates_B = candidates_B if grows else None
        for row in rows:
            block.tokens_B[row.index] = row.tokens
            sure_B[row.index] = row.sure or None
            block.probs_B[row.index] = torch.stack(row.probs) if row.probs else None
            if row.grows:
                candidates_B[row.index] = self._candidates(row)
        return block

    def _row(self, index: int, limit: int, batch: Batch) -> _Row:
        seq = batch.sequences[index]
        grows = bool(batch.num_candidates) and seq.constraint is None
        guesses = batch.foresees and seq.kind != "greedy" and seq.params.lossy is None
        return _Row(index, seq, limit, grows, guesses)

    def _step(self, rows: list[_Row], told_TD: Tensor) -> tuple[list[_Row], Tensor]:
        """Read the next drafts of the rows that go on; these rows, and what their entries tell."""
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
            return going, told_TD
        return going, self._path.step(level, tokens, told_TD[torch.tensor(places, device=told_TD.device)])

    def _extend(self, rows: list[_Row], logits_TV: Tensor, count: int) -> None:
        """Add a draft to each chain, and what is likely behind every node, where logits are finite."""
        first = 0
        certain = [row for row in rows if not (row.grows or row.guesses or row.is_drawn)]
        best = iter(self._best(rows, logits_TV)) if certain else iter(())
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
                    row.sure.append(logprob)

    def _best(self, rows: list[_Row], logits_TV: Tensor) -> list[tuple[int, float]]:
        """The likeliest token, and how likely it is, of the rows that get certain drafts."""
        firsts, first = list[int](), 0
        for row in rows:
            if not (row.grows or row.guesses or row.is_drawn):
                firsts.append(first)
            first += len(row.nodes)
        own_BV = logits_TV[torch.tensor(firsts, device=logits_TV.device)].float()
        largest_B, best_B = own_BV.max(-1)
        sure_B = (largest_B - own_BV.logsumexp(-1)).tolist()
        return [(self._token(place), sure) for place, sure in zip(best_B.tolist(), sure_B, strict=True)]

    def _draw(self, row: _Row, logits_NV: Tensor) -> None:
        if not math.isfinite(float(logits_NV[0].float().max())):
            return
        seq = row.seq
        probs_V = target_probs(self._over_all_tokens(logits_NV[:1]), seq.params)[0]
        row.tokens.append(sample(probs_V, rng.uniform(seq.seed, rng.DRAFT, seq.cached_len, len(row.tokens))))
        row.probs.append(probs_V)

    def _name(self, row: _Row, logits_NV: Tensor, count: int) -> None:
        """What is likely behind each node that was read; the chain goes on with the likeliest behind its end."""
        looked_at = max(count, FIELD) if row.guesses else count
        ids_NM, logprobs_NM = likeliest(logits_NV.float(), looked_at, inverse_temperature(row.seq))
        noise = rng.Noise(row.seq.seed, len(row.seq.tokens) + len(row.nodes[0].path)) if row.guesses else None
        for number, (node, ids, logprobs) in enumerate(zip(row.nodes, ids_NM, logprobs_NM, strict=True)):
            if not math.isfinite(logprobs[0]):
                continue
            tokens = [self._token(place) for place in ids]
            if noise:
                logprobs = self.foresight.chances(logprobs, noise.exponentials(tokens))
                tokens, logprobs = ranked(tokens, logprobs, count)
            row.branches[node.path] = tokens, logprobs
            if number == 0:
                row.tokens.append(tokens[0])
                row.sure.append(logprobs[0])

    def _candidates(self, row: _Row) -> Candidates:
        chain = [row.branches[tuple(row.tokens[:length])] for length in range(len(row.tokens))]
        most = min(self._most_len - row.seq.cached_len - 1, MOST_NODES)
        return Candidates([tokens for tokens, _ in chain], [logprobs for _, logprobs in chain], most, branches=row.branches)

    def _token(self, place: int) -> int:
        """The token of a place of the logits."""
        return place

    def _over_all_tokens(self, logits_KV: Tensor) -> Tensor:
        """Logits of every token of the target."""
        return logits_KV
