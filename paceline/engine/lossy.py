"""Judges requests with a lossy rule: computes the distributions that `verify/lossy.py` needs from the logits.

Each decision is added at once to the sequence's ledger (the account of its deviation from the target's distribution).
`Sequence.accept` removes decisions about tokens that were not committed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.errors import NumericsError
from paceline.model.sampling.logits import penalise, target_probs
from paceline.model.sampling.race import race
from paceline.model.target import ForwardOutput
from paceline.plan.trees import Tree
from paceline.types import Sequence
from paceline.verify.lossy import drawn, follow
from paceline.verify.rules import CheckedRow, RowVerdict, Uniforms

NO_TOKEN = -1
"""Value that replaces a missing token id; also used by `ForwardOutput.best_T`."""


def checked_row(seq: Sequence, tokens: list[int], draft_probs_KV: Tensor | None, logits_JV: Tensor) -> CheckedRow:
    """Collects the input that a verification rule needs to judge the drafts of one sampled row. `tokens`: the drafts.
    `draft_probs_KV`: distributions that they were sampled from, [K, V]; None for deterministic drafts. `logits_JV`: the
    target's logits at the J verified positions, after bias, penalties and grammar."""
    uniforms = Uniforms.of(seq)
    return CheckedRow(
        tokens,
        draft_probs_KV,
        uniforms,
        draw=lambda slot: race(logits_JV[slot], seq.params, uniforms.noise(slot)),
        target_probs=lambda: target_probs(logits_JV, seq.params),
    )


def judge_lossy(
    seq: Sequence, tokens: list[int], tree: Tree | None, draft_probs_KV: Tensor | None, logits_JV: Tensor
) -> tuple[RowVerdict, list[int]]:
    """Judges one row's drafts by the request's lossy rule. Returns (verdict, indices of the accepted drafts in order).
    The verdict's next token is NO_TOKEN if the logits give no valid distribution.

    - `tokens`: the drafts, which are the nodes of `tree`, or a chain if `tree` is None.
    - `draft_probs_KV`: distributions that they were sampled from; None for deterministic drafts.
    - `logits_JV`: the target's logits after the last committed token, then after each draft, before penalties and
      grammar.
    """
    assert seq.params.lossy is not None and seq.ledger is not None
    params, uniforms, lossy = seq.params, Uniforms.of(seq), seq.params.lossy
    if tree is None:
        logits_JV = penalise(logits_JV, params, seq.tokens, seq.counts, tokens)
        if seq.constraint is not None:
            logits_JV = seq.constraint.mask(seq, logits_JV)

    def logits_1V(path: list[int]) -> Tensor:
        if tree is None:
            return logits_JV[len(path)].unsqueeze(0)
        slots, drafts = [0, *(node + 1 for node in path)], [tokens[node] for node in path]
        return penalise(logits_JV[slots], params, seq.tokens, seq.counts, drafts)[-1:]

    def own(path: list[int]) -> int:
        if params.is_greedy:
            return ForwardOutput(logits_1V(path), None).best_T()[0]
        return race(logits_1V(path)[0], params, uniforms.noise(len(path)))

    def probs(path: list[int]) -> Tensor:
        if params.is_greedy:  # in double precision, so that different logits stay different
            return torch.softmax(logits_1V(path)[0], dim=-1, dtype=torch.float64)
        return target_probs(logits_1V(path), params)[0]

    try:
        if draft_probs_KV is not None and not params.is_greedy and tree is None:
            verdict = drawn(lossy, checked_row(seq, tokens, draft_probs_KV, logits_JV), seq.ledger)
            return verdict, list(range(verdict.num_accepted))
        parents = range(-1, len(tokens) - 1) if tree is None else tree.parents
        accepted, token = follow(lossy, tokens, parents, own, probs, uniforms.accept, seq.ledger, params.is_greedy)
        return RowVerdict(len(accepted), token), accepted
    except NumericsError:
        return RowVerdict(0, NO_TOKEN), []
