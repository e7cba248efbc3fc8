"""Drafts with a smaller language model that has the target's tokenizer: one forward pass per draft, batched over rows.

The model is a Target with its own cache, whose rows are the target's rows. It reads prompts chunk by chunk in
`observe`. After a round the rejected drafts are removed from its cache, and the next `propose` begins with the tokens
missing there: the last token, and also the last draft if all were accepted.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from paceline.draft.base import Drafter, Observed, checked_num_drafted, sample_draft
from paceline.errors import DrafterMismatchError
from paceline.model.target import ForwardBatch, Target
from paceline.report.statistics import num_common
from paceline.types import Batch, DraftBlock, Sequence


class SmallModelDrafter(Drafter):
    """Drafts with a smaller language model. Greedy and seeded requests get deterministic drafts; sampled requests get
    drafts sampled with the request's parameters, with their distributions."""

    name, is_stepwise = "small_model", True

    def __init__(self, model: Target, *, num_drafted: int | None = None) -> None:
        """`model`: the smaller model, as a Target of its own. Raises ConfigError if `num_drafted` is not between
        0 and 1024."""
        self.model, self.has_own_threads = model, model.has_own_threads
        self._drafted: dict[int, tuple[int, list[int]]] = {}
        """Row -> (position of its first draft, drafts) of the latest round."""
        self.num_drafted = checked_num_drafted(4 if num_drafted is None else num_drafted)

    def bind(self, target: Target) -> None:
        """Check that the model's vocabulary is as large as the target's, and allocate the model's cache. Raises
        DrafterMismatchError if the sizes differ or the model is the target object itself, ContextLengthError if the
        model's context is shorter than the target's."""
        if self.model is target:
            raise DrafterMismatchError("the drafter is the target object itself: load the model a second time")
        if self.model.vocab_size != target.vocab_size:
            raise DrafterMismatchError(
                f"vocabulary: the drafter has {self.model.vocab_size} tokens, the target {target.vocab_size}: "
                "give a model with the target's tokenizer"
            )
        self.model.allocate_cache(target.cache.num_rows, target.cache.max_len)
        while self.model.cache.allocate() is not None:  # take all rows: the model uses the target's row numbers
            pass

    def record(self) -> None:
        """Capture the model's passes of one and of two tokens per row as CUDA graphs, if the device uses them. Two
        tokens are read after a round whose drafts were all accepted: the last draft and the bonus token."""
        self.model.record(2)

    @property
    def weight_bytes(self) -> int:
        return self.model.weight_bytes

    def cache_bytes(self, target: Target) -> int:
        own, other = self.model.cache, target.cache
        return own.num_bytes * other.num_rows * other.max_len // (own.num_rows * own.max_len)

    def start(self, seq: Sequence) -> None:
        self.model.cache.free(seq.row)
        self._drafted.pop(seq.row, None)
        row = self.model.cache.allocate()
        assert row == seq.row

    def adopt(self, seq: Sequence, source: int, length: int) -> int:
        """Returns `length`, although nothing is copied: `observe` runs the whole prompt through the model, including
        these positions."""
        return length

    def observe(self, observed: list[Observed]) -> None:
        """Update the model's cache for newly verified positions. First removes the entries of drafts that did not
        become part of the text: rejected ones, and those that a grammar replaced. Then runs new prompt tokens through
        the model. New tokens of the answer are run later, by `propose`."""
        cache = self.model.cache
        rows, ends = [one.sequence.row for one in observed], [one.start + one.count for one in observed]
        kept = [min(cache.lengths[one.sequence.row], self._sound(one)) for one in observed]
        cache.rollback(rows, kept)
        prompts = [
            (one.sequence, end) for one, end in zip(observed, ends, strict=True) if end <= one.sequence.prompt_len
        ]
        if prompts:
            self.model.forward(
                self._lacking([seq for seq, _ in prompts], [seq.tokens[:end] for seq, end in prompts], "none")
            )

    def _sound(self, one: Observed) -> int:
        """Returns the number of positions at which the model's cache may hold the sequence's own tokens. A grammar may
        have replaced a draft, and then the replacement was accepted."""
        end = one.start + one.count
        first, drafts = self._drafted.pop(one.sequence.row, (end, []))
        return min(end, first + num_common(drafts, one.sequence.tokens[first:]))

    def propose(self, batch: Batch) -> DraftBlock:
        limits = batch.draft_limits_B(self.num_drafted)
        block = DraftBlock.certain([[] for _ in limits])
        drafting = [index for index, limit in enumerate(limits) if limit > 0]
        probs_BK: dict[int, list[Tensor]] = {index: [] for index in drafting}
        while drafting:
            sequences = [batch.sequences[index] for index in drafting]
            texts = [batch.sequences[index].tokens + block.tokens_B[index] for index in drafting]
            logits_BV = self.model.forward(self._lacking(sequences, texts, "last")).logits_TV
            assert logits_BV is not None
            best_B = logits_BV.max(-1).indices.tolist()
            for index, seq, best, logits_V in zip(drafting, sequences, best_B, logits_BV, strict=True):
                token = best
                if seq.kind == "sampled":
                    token, probs_V = sample_draft(seq, logits_V, len(probs_BK[index]))
                    probs_BK[index].append(probs_V)
                block.tokens_B[index].append(token)
            drafting = [index for index in drafting if len(block.tokens_B[index]) < limits[index]]
        for index, probs_K in probs_BK.items():
            seq = batch.sequences[index]
            self._drafted[seq.row] = len(seq.tokens), block.tokens_B[index]
            block.probs_B[index] = torch.stack(probs_K) if probs_K else None
        return block

    def _lacking(
        self, sequences: list[Sequence], texts: list[list[int]], logits: Literal["last", "none"]
    ) -> ForwardBatch:
        """A batch with the tokens of each text that the model's cache lacks."""
        rows = [seq.row for seq in sequences]
        starts = [self.model.cache.lengths[row] for row in rows]
        rests = [text[start:] for text, start in zip(texts, starts, strict=True)]
        return ForwardBatch(rows, starts, list(map(len, rests)), [token for rest in rests for token in rest], logits)
