"""The decode round: guess, check in one target pass, keep what stands. The only loop; everything else plugs into it."""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.draft.base import Drafter, Observed
from paceline.draft.pool import Pool
from paceline.engine.grammar import within_grammars
from paceline.engine.judge import RuleJudge
from paceline.errors import NumericsError
from paceline.model.target import ForwardBatch, ForwardOutput, Target
from paceline.types import NONE, Batch, DraftBlock, RoundStats, Take, Verdict

Narrow = Callable[[list[list[float] | None]], list[int]]
"""How many drafts of each row to check, told from `DraftBlock.sure_B` (`Planner.narrow`)."""


def decode_round(
    batch: Batch, target: Target, drafter: Drafter | Pool, judge: RuleJudge, narrow: Narrow | None = None
) -> RoundStats:
    """One round for every sequence of the batch: draft K tokens, verify J = K+1 positions, commit what stands."""
    started = time.perf_counter()
    proposed = drafter.propose(batch)
    if narrow:
        proposed = proposed.cut(narrow(proposed.sure_B or [None] * len(batch)))
    draft = within_grammars(batch, proposed)
    drafted = time.perf_counter()
    out = target.forward(verify_input(batch, draft, judge.only_argmax(batch)))
    verdict = judge(batch, draft, out)
    verified = time.perf_counter()
    firsts = [seq.cached_len for seq in batch.sequences]
    num_committed_B = commit(batch, draft, verdict)
    target.cache.rollback(batch.rows, batch.cached_len_B)
    drafter.observe(_observed(batch, draft, firsts, num_committed_B, out))
    takes_B = batch.takes_B or [Take(NONE)] * len(batch)
    return RoundStats(
        num_drafted_B=[len(tokens) for tokens in proposed.tokens_B],
        num_accepted_B=[max(count - 1, 0) for count in num_committed_B],
        lossless=verdict.lossless,
        draft_s=drafted - started,
        verify_s=verified - drafted,
        host_s=time.perf_counter() - verified,
        source_B=[take.source if tokens else NONE for take, tokens in zip(takes_B, proposed.tokens_B, strict=True)],
        num_checked_B=[len(tokens) for tokens in draft.tokens_B],
        sure_B=proposed.sure_B,
    )


def fail(batch: Batch, verdict: Verdict) -> None:
    """End the requests that cannot go on; the others are none the worse."""
    for seq, reason in zip(batch.sequences, verdict.failed_B or (), strict=False):
        if reason is not None:
            seq.finish_reason, seq.error = "error", NumericsError(reason)


def verify_input(batch: Batch, draft: DraftBlock, only_argmax: bool = False) -> ForwardBatch:
    """Each row's anchor and its drafts, packed row after row."""
    counts = [1 + len(tokens) for tokens in draft.tokens_B]
    packed: list[int] = []
    for seq, tokens in zip(batch.sequences, draft.tokens_B, strict=True):
        packed.append(seq.tokens[-1])
        packed.extend(tokens)
    return ForwardBatch(batch.rows, batch.cached_len_B, counts, packed, only_argmax=only_argmax)


def commit(batch: Batch, draft: DraftBlock, verdict: Verdict) -> list[int]:
    """Append the accepted drafts and the bonus token to each sequence, up to a token that ends it.

    Returns how many tokens each row gained: at least 1, but 0 of a request that failed. `cached_len` follows: all of the
    sequence but its last token.
    """
    fail(batch, verdict)
    gained = []
    rows = zip(batch.sequences, draft.tokens_B, verdict.num_accepted_B, verdict.next_token_B, strict=True)
    for seq, drafted, num_accepted, bonus in rows:
        tokens = [] if seq.error else seq.accept([*drafted[:num_accepted], bonus])
        seq.lossless &= verdict.lossless
        gained.append(len(tokens))
    return gained


def _observed(
    batch: Batch, draft: DraftBlock, firsts: list[int], num_committed_B: list[int], out: ForwardOutput
) -> list[Observed]:
    """The anchor and the accepted drafts of each row: positions that the verify pass has put into the cache for good."""
    observed, begin = [], 0
    for seq, tokens, first, count in zip(batch.sequences, draft.tokens_B, firsts, num_committed_B, strict=True):
        if count:
            observed.append(Observed(seq, first, count, out.taps_TF, begin))
        begin += 1 + len(tokens)
    return observed
