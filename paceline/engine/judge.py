"""From the verify pass's logits to a verdict: each request's own distribution, judged by the chosen rule.

Rows that are greedy and unpenalised need only the argmax of each position, taken for the whole batch at once; every other
row gets its bias, penalties and filters first. The rules themselves are pure functions in `verify/`.
"""

from __future__ import annotations

from torch import Tensor

from paceline.errors import NumericsError
from paceline.model.logits import draw, logprobs_of, penalise, target_probs
from paceline.model.target import ForwardOutput
from paceline.types import Batch, DraftBlock, Sequence, Verdict
from paceline.verify.lossless import RULES, match_prefix
from paceline.verify.rule import CheckedRow, RowVerdict, Rule, Uniforms


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
