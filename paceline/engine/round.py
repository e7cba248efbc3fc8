"""The decode round: guess, check in one target pass, keep what stands. The only loop; everything else plugs into it.

The judge makes a verdict of the verify pass's logits: each request's own distribution, judged by the chosen rule. Rows that
are greedy and unpenalised need only the argmax of each position, taken for the whole batch at once; every other row gets its
bias, penalties and filters first. The rules themselves are pure functions in `verify/rules.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

from paceline.draft.base import Drafter, Observed
from paceline.draft.pool import Pool
from paceline.engine.grammar import within_grammars
from paceline.errors import NumericsError
from paceline.model.logits import draw, logprobs_of, penalise, target_probs
from paceline.model.target import ForwardBatch, ForwardOutput, Target
from paceline.types import NONE, Batch, DraftBlock, RoundStats, Sequence, Take, Verdict
from paceline.verify.rules import RULES, CheckedRow, RowVerdict, Rule, Uniforms, match_prefix

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
        source_s=proposed.source_s,
        drafter_B=[seq.drafter for seq in batch.sequences],
    )


def fail(batch: Batch, verdict: Verdict) -> None:
    """End the requests that cannot go on; the others are none the worse."""
    for seq, reason in zip(batch.sequences, verdict.failed_B or (), strict=False):
        if reason is not None:
            seq.finish_reason, seq.error = "error", NumericsError(reason)


def verify_input(batch: Batch, draft: DraftBlock, only_argmax: bool = False) -> ForwardBatch:
    """Each row's anchor and its drafts, packed row after row."""
    counts = [1 + len(tokens) for tokens in draft.tokens_B]
    rows = zip(batch.sequences, draft.tokens_B, strict=True)
    packed = [token for seq, tokens in rows for token in (seq.tokens[-1], *tokens)]
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


class RuleJudge:
    """Decides which drafts stand: of sampled rows by `rule`, of greedy rows too unless it weighs probabilities, then by the
    longest match."""

    def __init__(self, rule: Rule = RULES["auto"]) -> None:
        self.rule = rule

    def only_argmax(self, batch: Batch) -> bool:
        """Whether the largest logit of each position is all it will look at."""
        return all(_is_plain(seq) and seq.params.logprobs is None for seq in batch.sequences)

    def __call__(self, batch: Batch, draft: DraftBlock, out: ForwardOutput) -> Verdict:
        """`out` is the verify pass's, positions packed row after row. Log-probabilities of the tokens about to be committed are
        added to the sequences that ask for them."""
        plain = [_is_plain(seq) for seq in batch.sequences]
        argmax_T = out.best_T() if any(plain) else []
        accepted: list[int] = []
        bonus: list[int] = []
        failed_B: list[str | None] = [None] * len(batch)
        begin = 0
        for index, (seq, tokens) in enumerate(zip(batch.sequences, draft.tokens_B, strict=True)):
            end = begin + len(tokens) + 1
            if plain[index]:
                row_verdict = self._judge_greedy(seq, tokens, argmax_T[begin:end])
            else:
                assert out.logits_TV is not None
                row_verdict = self._judge_row(seq, tokens, draft.probs_B[index], out.logits_TV[begin:end])
            if row_verdict.next_token == _NONE:
                logits_JV = None if plain[index] or out.logits_TV is None else out.logits_TV[begin:end]
                failed_B[index] = _why(seq, row_verdict.num_accepted, logits_JV)
                row_verdict = RowVerdict(0, _NONE)
            accepted.append(row_verdict.num_accepted)
            bonus.append(row_verdict.next_token)
            if seq.params.logprobs is not None and out.logits_TV is not None and bonus[-1] != _NONE:
                for logits_V, token in zip(out.logits_TV[begin:end], [*tokens[: accepted[-1]], bonus[-1]], strict=False):
                    seq.logprobs.append(logprobs_of(logits_V, token, seq.params.logprobs))
            begin = end
        return Verdict(accepted, bonus, self.rule.lossless, failed_B=failed_B if any(failed_B) else None)

    def _judge_greedy(self, seq: Sequence, tokens: list[int], argmax_J: list[int]) -> RowVerdict:
        if self.rule.needs_probs:
            return match_prefix(tokens, argmax_J.__getitem__)
        return self.rule.verify(CheckedRow(tokens, None, Uniforms.of(seq), argmax_J.__getitem__, _no_probs))

    def _judge_row(self, seq: Sequence, tokens: list[int], draft_probs_KV: Tensor | None, logits_JV: Tensor) -> RowVerdict:
        logits_JV = penalise(logits_JV, seq.params, seq.tokens, seq.counts, tokens)
        if seq.constraint is not None:
            logits_JV = seq.constraint.mask(seq, logits_JV)
        if seq.params.is_greedy:
            return self._judge_greedy(seq, tokens, ForwardOutput(logits_JV, None).best_T())
        uniforms = Uniforms.of(seq)
        row = CheckedRow(
            tokens,
            draft_probs_KV if self.rule.needs_probs else None,
            uniforms,
            draw=lambda slot: draw(logits_JV[slot], seq.params, uniforms.sample(slot)),
            target_probs=lambda: target_probs(logits_JV, seq.params),
        )
        try:
            return self.rule.verify(row)
        except NumericsError:
            return RowVerdict(0, _NONE)


_NONE = -1
"""In place of a token where there is none to choose; `ForwardOutput.best_T` has it too."""


def _why(seq: Sequence, num_accepted: int, logits_JV: Tensor | None) -> str:
    """Why there is no token to choose; `logits_JV` are the model's own, before penalties and grammar, if they matter."""
    best_J = [_NONE] * (num_accepted + 1) if logits_JV is None else ForwardOutput(logits_JV, None).best_T()
    if _NONE not in best_J:
        return f"no token is left to choose at position {len(seq.tokens) + num_accepted}: logit_bias or the grammar forbids all"
    slot = num_accepted if logits_JV is None else best_J.index(_NONE)
    return (
        f"the model's logits are not finite at position {len(seq.tokens) + slot}: its weights are damaged, or too large for "
        "their dtype; check the model's files, or try float32"
    )


def _no_probs() -> Tensor:
    raise AssertionError("a rule that needs no probabilities asked for them")


def _is_plain(seq: Sequence) -> bool:
    """Greedy, and nothing changes its logits."""
    params = seq.params
    return params.is_greedy and params.grammar is None and not params.logit_bias and not params.has_penalties
