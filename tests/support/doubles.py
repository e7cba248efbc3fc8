"""Test doubles: a target, a drafter and a tokenizer that need no model.

`FakeTarget` answers from what stands in its cache, so a missing rollback, a wrong position or rows that get mixed up
change its logits or fail an assertion. `ScriptedDrafter` knows the target's next tokens and is right as often as it is
told to be.

    target = FakeTarget(vocab_size=16, num_rows=2)
    drafter = ScriptedDrafter(target, num_drafted=4, accuracy=0.7)
    ... run the engine; then target.cache.check(seq), and tokens == target.greedy(prompt, n)
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, Literal

import torch
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from paceline.draft.base import Drafter, Observed
from paceline.model.kv_cache import KVCache
from paceline.model.target import ForwardBatch, ForwardOutput, Target
from paceline.model.text.tokenizer import Tokenizer
from paceline.plan.trees import MOST_NODES, Candidates
from paceline.rng import DRAFT, uniform
from paceline.train.tiny import byte_tokenizer
from paceline.types import Batch, DraftBlock
from paceline.types import Sequence as Request

DEAD = -1
"""Value of FakeCache at invalid positions."""


class FakeCache(KVCache):
    """The tokens themselves, row by row; whatever was rolled back, or freed unless `keeps_freed`, is overwritten with
    DEAD."""

    def __init__(self, num_rows: int, max_len: int, keeps_freed: bool = False) -> None:
        super().__init__(num_rows, max_len)
        self.keeps_freed = keeps_freed
        self.tokens = [[DEAD] * max_len for _ in range(num_rows)]

    @property
    def num_bytes(self) -> int:
        return 8 * self.num_rows * self.max_len

    def write(self, row: int, start: int, tokens: list[int]) -> None:
        """Put tokens behind the row's length; `start` must be that length."""
        assert row not in self._free, f"row {row} was never allocated"
        assert start == self.lengths[row], f"row {row} holds {self.lengths[row]} tokens, the pass starts at {start}"
        self.append([row], [len(tokens)])
        self.tokens[row][start : start + len(tokens)] = tokens

    def rollback(self, rows: list[int], lengths: list[int]) -> None:
        before = [self.lengths[row] for row in rows]
        super().rollback(rows, lengths)
        for row, old, new in zip(rows, before, lengths, strict=True):
            self.tokens[row][new:old] = [DEAD] * (old - new)

    def _move(self, row: int, start: int, slots: list[int]) -> None:
        self.tokens[row][start : start + len(slots)] = [self.tokens[row][start + slot] for slot in slots]

    def free(self, row: int) -> None:
        super().free(row)
        if not self.keeps_freed:
            self.tokens[row] = [DEAD] * self.max_len

    def adopt(self, source: int, row: int, length: int) -> None:
        taken = self.tokens[source][:length]
        assert self.lengths[row] == 0 and DEAD not in taken, f"row {source} does not hold {length} tokens"
        self.tokens[row] = taken + [DEAD] * (self.max_len - length)
        self.lengths[row] = length

    def content(self, row: int) -> list[int]:
        """The live tokens of a row."""
        return self.tokens[row][: self.lengths[row]]

    def check(self, seq: Request) -> None:
        """Assert that the row of a running sequence holds its tokens but the anchor, and nothing else."""
        assert seq.cached_len == len(seq.tokens) - 1, f"request {seq.request_id}: all but the anchor should be cached"
        assert self.content(seq.row) == seq.tokens[: seq.cached_len], (
            f"row {seq.row} holds other tokens than its sequence"
        )


class FakeTarget(Target):
    """A language model whose logits depend on the last `order` tokens in its cache, drawn once per context from a seed.

    `sharpness` is the standard deviation of the logits: greedy needs none, sampling tests want little (1 or 2).
    `calls` keeps every ForwardBatch it was given.
    """

    cache: KVCache
    takes_trees = True

    def __init__(
        self,
        vocab_size: int = 32,
        *,
        order: int = 2,
        num_rows: int = 4,
        max_len: int = 512,
        hidden_size: int = 16,
        num_layers: int = 4,
        sharpness: float = 3.0,
        seed: int = 0,
        is_width_invariant: bool = False,
    ) -> None:
        self.is_width_invariant = is_width_invariant
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.vocab_size, self.hidden_size, self.num_layers = vocab_size, hidden_size, num_layers
        self.order, self.sharpness, self.seed = order, sharpness, seed
        self.max_position = 1 << 20
        generator = torch.Generator().manual_seed(seed)
        self.embedding_VD = torch.randn(vocab_size, hidden_size, generator=generator)
        self.weight_bytes = 4 * self.embedding_VD.numel()
        self.calls: list[ForwardBatch] = []
        self._logits: dict[tuple[int, ...], Tensor] = {}
        self.allocate_cache(num_rows, max_len)

    def allocate_cache(self, num_rows: int, max_len: int) -> None:
        self.fake_cache = FakeCache(num_rows, max_len, keeps_freed=self.is_width_invariant)
        self.cache = self.fake_cache

    def logits_after(self, tokens: Sequence[int]) -> Tensor:
        """Logits [V] of the token that follows `tokens`; only the last `order` matter."""
        context = tuple(tokens[-self.order :])
        assert context and all(0 <= token < self.vocab_size for token in context), (
            f"context {context} is not all tokens"
        )
        if context not in self._logits:
            mixed = self.seed
            for token in context:
                mixed = (mixed * 1_000_003 + token + 1) % (1 << 63)
            generator = torch.Generator().manual_seed(mixed)
            self._logits[context] = self.sharpness * torch.randn(self.vocab_size, generator=generator)
        return self._logits[context]

    def greedy(self, tokens: Sequence[int], num_tokens: int) -> list[int]:
        """The most likely continuation, token by token."""
        grown = list(tokens)
        for _ in range(num_tokens):
            grown.append(int(self.logits_after(grown).argmax()))
        return grown[len(tokens) :]

    def taps_of(self, tokens: Sequence[int], start: int, tap_layers: Sequence[int] | None = None) -> Tensor:
        """The taps [N, F] that forward returns for these tokens at positions from `start`: for each layer the embedding
        plus layer + 1, with the position as its first feature."""
        embedded = self.embed(torch.tensor(list(tokens), dtype=torch.long))
        taps = []
        for layer in self.tap_layers if tap_layers is None else tap_layers:
            tap = embedded + (layer + 1)
            tap[:, 0] = torch.arange(start, start + len(tokens), dtype=torch.float32)
            taps.append(tap)
        return torch.cat(taps, dim=-1)

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        assert len(set(batch.rows)) == len(batch.rows), "a row stands twice in one batch"
        assert sum(batch.counts) == len(batch.tokens), "counts and tokens disagree"
        self.calls.append(batch)
        logits: list[Tensor] = []
        taps: list[Tensor] = []
        offset = 0
        for row, start, count in zip(batch.rows, batch.starts, batch.counts, strict=True):
            tokens = batch.tokens[offset : offset + count]
            parents = list(range(-1, count - 1)) if batch.parents is None else batch.parents[offset : offset + count]
            self.fake_cache.write(row, start, tokens)
            offset += count
            cached, paths = self.fake_cache.content(row)[:start], list[list[int]]()
            for token, parent in zip(tokens, parents, strict=True):
                paths.append([*(paths[parent] if parent >= 0 else []), token])
            firsts = {"all": range(count), "last": range(count - 1, count), "none": range(0)}
            logits += [self.logits_after([*cached, *paths[place]]) for place in firsts[batch.logits]]
            if self.tap_layers:
                taps += [self.taps_of(path[-1:], start + len(path) - 1) for path in paths]
        out = ForwardOutput(torch.stack(logits) if logits else None, torch.cat(taps) if taps else None)
        out.argmax_T = out.best_T() if logits else None  # as the native pass
        return out

    def matrix_embed(self, tokens_T: Tensor) -> Tensor:
        return self.embedding_VD[tokens_T]

    def matrix_head(self, hidden_TD: Tensor) -> Tensor:
        return hidden_TD @ self.embedding_VD.T


class ScriptedDrafter(Drafter):
    """Drafts the target's greedy token with probability `accuracy`, else any other one; `adversarial` drafts unlikely
    ones.

    With `with_probs` the drafts come with the distribution they were drawn from, else they count as certain. Draws
    depend on the request's seed and the position only. `observe` asserts that positions arrive once, in order, with the
    right taps.
    """

    name = "scripted"

    def __init__(
        self,
        target: FakeTarget,
        num_drafted: int = 4,
        *,
        accuracy: float = 1.0,
        mode: Literal["likely", "adversarial"] = "likely",
        with_probs: bool = False,
        tap_layers: tuple[int, ...] = (),
        seed: int = 0,
    ) -> None:
        self.target, self.num_drafted, self.tap_layers = target, num_drafted, tap_layers
        self.accuracy, self.mode, self.with_probs, self.seed = accuracy, mode, with_probs, seed
        self.num_observed: dict[int, int] = {}
        """Row -> positions seen, of the sequences that are running."""

    def start(self, seq: Request) -> None:
        assert seq.row not in self.num_observed, f"row {seq.row} was given away before it was dropped"
        self.num_observed[seq.row] = 0

    def adopt(self, seq: Request, source: int, length: int) -> int:
        assert self.num_observed[seq.row] == 0
        self.num_observed[seq.row] = length
        return length

    def propose(self, batch: Batch) -> DraftBlock:
        limits = batch.draft_limits_B(self.num_drafted)
        drafts = [self._draft(seq, limit) for seq, limit in zip(batch.sequences, limits, strict=True)]
        return DraftBlock([tokens for tokens, _ in drafts], [probs for _, probs in drafts])

    def chances_of(self, seq: Request, tokens: list[int], probs_KV: Tensor) -> list[float]:
        """Chances as DFlashDrafter computes them, for drafts independent of each other."""
        return [float(probs_V[token]) for probs_V, token in zip(probs_KV, tokens, strict=False)]

    def _draft(self, seq: Request, num_tokens: int) -> tuple[list[int], Tensor | None]:
        tokens: list[int] = []
        probs: list[Tensor] = []
        for slot in range(num_tokens):
            probs_V = self.distribution([*seq.tokens, *tokens])
            drawn = uniform(seq.seed ^ self.seed, DRAFT, len(seq.tokens) - 1, slot)
            below = int((probs_V.double().cumsum(0) <= drawn).sum())
            tokens.append(min(below, int(probs_V.nonzero()[-1])))
            probs.append(probs_V)
        return tokens, torch.stack(probs) if self.with_probs and probs else None

    def distribution(self, tokens: Sequence[int]) -> Tensor:
        """Distribution of the draft after `tokens`, [V]."""
        logits = self.target.logits_after(tokens)
        if self.mode == "adversarial":
            is_least = torch.nn.functional.one_hot(logits.argmin(), len(logits)).float()
            return torch.softmax(-logits, dim=0) if self.with_probs else is_least
        probs = torch.full_like(logits, (1 - self.accuracy) / (len(logits) - 1))
        probs[logits.argmax()] = self.accuracy
        return probs

    def observe(self, observed: list[Observed]) -> None:
        for item in observed:
            seq, end = item.sequence, item.start + item.count
            assert item.start == self.num_observed[seq.row], (
                f"row {seq.row}: saw {self.num_observed[seq.row]}, got {item.start}"
            )
            assert end <= seq.cached_len, f"row {seq.row}: positions to {end} are not all cached"
            if self.tap_layers:
                assert item.taps_NF is not None
                expected = self.target.taps_of(seq.tokens[item.start : end], item.start, self.tap_layers)
                torch.testing.assert_close(item.taps_NF, expected)
            self.num_observed[seq.row] = end

    def drop(self, seq: Request) -> None:
        self.num_observed.pop(seq.row, None)


class TreeDrafter(ScriptedDrafter):
    """Names `width` tokens for each slot; with probability `accuracy` the target's greedy one is among them, at any
    rank.

    Slots are told as a block drafter tells them: each for the text that the target's greedy tokens make.
    """

    name = "tree"

    def __init__(self, target: FakeTarget, num_drafted: int = 4, *, width: int = 3, **options: Any) -> None:
        super().__init__(target, num_drafted, **options)
        self.width = width

    def propose(self, batch: Batch) -> DraftBlock:
        block = super().propose(batch)
        if batch.num_candidates:
            limits = batch.draft_limits_B(self.num_drafted)
            block.candidates_B = [
                self._candidates(seq, limit, min(self.width, batch.num_candidates)) if limit else None
                for seq, limit in zip(batch.sequences, limits, strict=True)
            ]
            block.confidence_B = [each and [ranks[0] for ranks in each.logprobs_KM] for each in block.candidates_B]
        return block

    def _candidates(self, seq: Request, limit: int, width: int) -> Candidates:
        source = random.Random(seq.seed ^ self.seed ^ (len(seq.tokens) << 8))
        best = self.target.greedy(seq.tokens, limit)
        tokens_KM = []
        for token in best:
            others = [other for other in range(self.target.vocab_size) if other != token]
            tokens = source.sample(others, width)
            if source.random() < self.accuracy:
                tokens[source.randrange(width)] = token
            tokens_KM.append(tokens)
        chances = [0.5**rank * 0.4 for rank in range(width)]
        logprobs = [math.log(chance) for chance in chances]
        most = min(MOST_NODES, self.target.cache.max_len - seq.cached_len - 1)
        return Candidates(tokens_KM, [list(logprobs) for _ in best], most)


class ByteTokenizer(Tokenizer):
    """Bytes as tokens, then bos and eos: for any text and any model of 258 tokens. A conversation has one line a
    message."""

    bos_token_id, eos_token_id = 256, 257

    def __init__(self) -> None:
        backend = byte_tokenizer(["<bos>", "<eos>"])
        backend.post_processor = TemplateProcessing(
            single="<bos> $A", pair=None, special_tokens=[("<bos>", self.bos_token_id)]
        )
        template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
        template += "{% if add_generation_prompt %}assistant: {% endif %}"
        super().__init__(backend, eos_token_ids=(self.eos_token_id,), chat_template=template)
