"""From the verify pass's logits to a verdict: each request's own distribution, judged by the chosen rule.

Rows that are greedy and unpenalised need only the argmax of each position, taken for the whole batch at once; every other
row gets its bias, penalties and filters first. The rules themselves are pure functions in `verify/`.
"""

from __future__ import annotations

from torch import Tensor

from paceline.model.logits import draw, logprobs_of, penalise, target_probs
from paceline.model.target import ForwardOutput
from paceline.types import Batch, DraftBlock, Sequence, Verdict
from paceline.verify.greedy import verify_argmax
from paceline.verify.match import verify_draws
from paceline.verify.mocked import MockedAcceptance
from paceline.verify.registry import rule_named
from paceline.verify.rule import RowVerdict, Rule, Uniforms


class LosslessJudge:
    """Greedy rows by longest match, sampled rows by `rule` ("auto", "match", "rejection" or "block")."""

    def __init__(self, rule: str = "auto") -> None:
        self.rule: Rule = rule_named(rule)
        self._matches_certain, self._matches_all = rule in ("auto", "match"), rule == "match"

    def only_argmax(self, batch: Batch) -> bool:
        return all(_is_plain(seq) and seq.params.logprobs is None for seq in batch.sequences)

    def __call__(self, batch: Batch, draft: DraftBlock, out: ForwardOutput) -> Verdict:
        plain = [_is_plain(seq) for seq in batch.sequences]
        argmax_T = out.best_T() if any(plain) else []
        accepted, bonus, begin = [], [], 0
        for index, (seq, tokens) in enumerate(zip(batch.sequences, draft.tokens_B, strict=True)):
            end = begin + len(tokens) + 1
            if plain[index]:
                verdict = verify_argmax(tokens, argmax_T[begin:end])
            else:
                assert out.logits_TV is not None
                verdict = self._judge_row(seq, tokens, draft.probs_B[index], out.logits_TV[begin:end])
            accepted.append(verdict.num_accepted)
            bonus.append(verdict.next_token)
            begin = end
        verdict = Verdict(accepted, bonus)
        if out.logits_TV is not None:
            report_logprobs(batch, draft, verdict, out.logits_TV)
        return verdict

    def _judge_row(self, seq: Sequence, tokens: list[int], draft_probs: Tensor | None, logits_JV: Tensor) -> RowVerdict:
        logits_JV = penalise(logits_JV, seq.params, seq.tokens, seq.counts, tokens)
        if seq.constraint is not None:
            logits_JV = seq.constraint.mask(seq, logits_JV)
        if seq.params.is_greedy:
            return verify_argmax(tokens, ForwardOutput(logits_JV, None).best_T())
        uniforms = Uniforms.of(seq)
        if self._matches_all or (self._matches_certain and draft_probs is None):
            return verify_draws(tokens, lambda slot: draw(logits_JV[slot], seq.params, uniforms.sample(slot)))
        return self.rule(tokens, draft_probs, target_probs(logits_JV, seq.params), uniforms)


class MockedJudge:
    """Accepts as many drafts as the mock says, whatever the target says: for modelling only, never lossless."""

    def __init__(self, acceptance: MockedAcceptance) -> None:
        self._acceptance = acceptance

    def only_argmax(self, batch: Batch) -> bool:
        return True

    def __call__(self, batch: Batch, draft: DraftBlock, out: ForwardOutput) -> Verdict:
        argmax_T = out.best_T()
        accepted, bonus, begin = [], [], 0
        for seq, tokens in zip(batch.sequences, draft.tokens_B, strict=True):
            count = self._acceptance.num_accepted(len(tokens), Uniforms.of(seq))
            accepted.append(count)
            bonus.append(argmax_T[begin + count])
            begin += len(tokens) + 1
        return Verdict(accepted, bonus, lossless=False)


def _is_plain(seq: Sequence) -> bool:
    """Greedy, and nothing changes its logits."""
    params = seq.params
    return params.is_greedy and params.grammar is None and not params.logit_bias and not params.has_penalties


def report_logprobs(batch: Batch, draft: DraftBlock, verdict: Verdict, logits_TV: Tensor) -> None:
    """Append the target's own log-probabilities of the tokens about to be committed, for requests that ask for them."""
    begin = 0
    rows = zip(batch.sequences, draft.tokens_B, verdict.num_accepted_B, verdict.next_token_B, strict=True)
    for seq, drafted, num_accepted, bonus in rows:
        if seq.params.logprobs is not None:
            for offset, token in enumerate([*drafted[:num_accepted], bonus]):
                seq.logprobs.append(logprobs_of(logits_TV[begin + offset], token, seq.params.logprobs))
        begin += len(drafted) + 1
