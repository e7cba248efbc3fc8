"""The decode round: draft, verify in one target pass, accept and commit. It calls the drafters, the planner, the
grammars and the verification rules.

`device_round.py` computes the same on the device, for batches that qualify.

`RuleJudge` decides from the verify pass's logits which drafts are accepted. It computes the distribution of each
request and applies the engine's rule, or the request's own lossy rule, to it. Greedy rows without penalties need only
the argmax of each position, computed for the whole batch at once; the logits of every other row first get its bias,
penalties and filters. The rules themselves are pure functions in `verify/rules.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

from paceline.draft.base import Drafter, Observed
from paceline.draft.pool import Pool
from paceline.engine.grammar import within_grammars
from paceline.engine.lossy import NO_TOKEN as _NONE
from paceline.engine.lossy import checked_row, judge_lossy
from paceline.engine.shape import shape
from paceline.errors import NumericsError
from paceline.lossy import LOSSY
from paceline.model.sampling.logits import logprobs_of, penalise
from paceline.model.sampling.race import race
from paceline.model.target import ForwardBatch, ForwardOutput, Target
from paceline.plan.trees import Candidates, Outcome, TargetRanks, Tree, target_ranks
from paceline.types import NONE, Batch, DraftBlock, RoundStats, Sequence, Take, Verdict
from paceline.verify.rules import RULES, CheckedRow, RowVerdict, Rule, Uniforms, match, match_prefix

Narrow = Callable[[list[list[float] | None], list[Candidates | None] | None], list[int | Tree]]
"""Function (confidence_B, candidates_B of a DraftBlock) -> for each row the number of drafts, or the tree, to verify.
See `Planner.narrow`."""


def decode_round(
    batch: Batch, target: Target, drafter: Drafter | Pool, judge: RuleJudge, narrow: Narrow | None = None
) -> RoundStats:
    """Runs one round for all sequences of the batch: draft K tokens, verify J = K+1 positions, commit the accepted
    drafts and the bonus token. Returns statistics of the round. `narrow`: function (drafter's confidences, tree
    candidates) -> number of drafts, or draft tree, that each row verifies (see `Planner.narrow`); None: all drafts are
    verified."""
    started, recording_s = time.perf_counter(), target.recording_s
    proposed = drafter.propose(batch)
    if narrow:
        proposed = proposed.cut(narrow(proposed.confidence_B or [None] * len(batch), proposed.candidates_B))
    draft = within_grammars(batch, proposed)
    drafted, recording_draft_s = time.perf_counter(), target.recording_s - recording_s
    out = target.forward(verify_input(batch, draft, judge.only_argmax(batch)))
    verdict = judge(batch, draft, out)
    verified, recording_verify_s = time.perf_counter(), target.recording_s - recording_s - recording_draft_s
    firsts = [seq.cached_len for seq in batch.sequences]  # before `commit`, which advances it
    num_committed_B = commit(batch, draft, verdict)
    slots_B = _slots(verdict, num_committed_B)
    if verdict.accepted_paths_B:
        target.cache.keep(batch.rows, firsts, slots_B)
    else:
        target.cache.rollback(batch.rows, batch.cached_len_B)  # lengths after the commit
    drafter.observe(_observed(batch, draft, firsts, slots_B, out))
    takes_B = batch.takes_B or [Take(NONE)] * len(batch)
    return RoundStats(
        num_drafted_B=_lengths(proposed),
        num_accepted_B=[max(count - 1, 0) for count in num_committed_B],
        lossless=all(seq.lossless for seq in batch.sequences),
        draft_s=drafted - started - recording_draft_s,  # without recordings, which must not affect plans
        verify_s=verified - drafted - recording_verify_s,
        host_s=time.perf_counter() - verified,
        source_B=[take.source if tokens else NONE for take, tokens in zip(takes_B, proposed.tokens_B, strict=True)],
        num_checked_B=[len(tokens) for tokens in draft.tokens_B],
        confidence_B=proposed.confidence_B,
        source_s=proposed.source_s,
        drafter_B=[LOSSY if seq.params.lossy else seq.drafter for seq in batch.sequences],
        trees_B=_outcomes(draft, verdict),
        target_ranks_B=_ranks(batch, proposed, num_committed_B)
        if batch.reports_target_ranks and verdict.lossless
        else None,
    )


def fail(batch: Batch, verdict: Verdict) -> None:
    """End the requests for which the verdict has no next token, with an error; other rows continue."""
    for seq, reason in zip(batch.sequences, verdict.failed_B or (), strict=False):
        if reason is not None:
            seq.finish_reason, seq.error = "error", NumericsError(reason)


def verify_input(batch: Batch, draft: DraftBlock, only_argmax: bool = False) -> ForwardBatch:
    """Returns the input of the target's verify pass: for each row, its last committed token and then its drafts.
    `only_argmax`: the pass need not compute logits, only each position's most probable token."""
    counts = [1 + len(tokens) for tokens in draft.tokens_B]
    rows = zip(batch.sequences, draft.tokens_B, strict=True)
    packed = [token for seq, tokens in rows for token in (seq.tokens[-1], *tokens)]
    parents = _parents(draft) if draft.trees_B else None
    return ForwardBatch(batch.rows, batch.cached_len_B, counts, packed, only_argmax=only_argmax, parents=parents)


def _parents(draft: DraftBlock) -> list[int]:
    """Returns the parents as in ForwardBatch: the anchor is the first token of each row."""
    parents: list[int] = []
    for tokens, tree in zip(draft.tokens_B, draft.trees_B or [], strict=True):
        own = range(-1, len(tokens) - 1) if tree is None else tree.parents
        parents += [-1, *(parent + 1 for parent in own)]
    return parents


def _slots(verdict: Verdict, num_committed_B: list[int]) -> list[list[int]]:
    """Returns the tokens of each row's pass that stay in the cache: the anchor and the committed drafts."""
    accepted_paths_B = verdict.accepted_paths_B or [None] * len(num_committed_B)
    # Of `count` new tokens the last is not in the cache yet, but the anchor is: `count` positions stay.
    return [
        list(range(count)) if path is None else [0, *(node + 1 for node in path)][:count]
        for path, count in zip(accepted_paths_B, num_committed_B, strict=True)
    ]


def _lengths(block: DraftBlock) -> list[int]:
    trees_B = block.trees_B or [None] * len(block.tokens_B)
    return [tree.depth if tree else len(tokens) for tokens, tree in zip(block.tokens_B, trees_B, strict=True)]


def _ranks(batch: Batch, proposed: DraftBlock, num_committed_B: list[int]) -> list[TargetRanks | None] | None:
    if not proposed.candidates_B:
        return None
    rows = zip(batch.sequences, proposed.candidates_B, num_committed_B, strict=True)
    return [
        target_ranks(candidates, seq.tokens[-count:]) if candidates and count and not seq.params.lossy else None
        for seq, candidates, count in rows
    ]


def _outcomes(draft: DraftBlock, verdict: Verdict) -> list[Outcome | None] | None:
    if not draft.trees_B or not verdict.accepted_paths_B:
        return None
    return [
        None if tree is None else Outcome(tree, path or [])
        for tree, path in zip(draft.trees_B, verdict.accepted_paths_B, strict=True)
    ]


def commit(batch: Batch, draft: DraftBlock, verdict: Verdict) -> list[int]:
    """Append the accepted drafts and the bonus token to each sequence, up to a token that ends the answer. Also updates
    `cached_len`: afterwards the target's cache has all tokens but the last one.

    Returns the number of new tokens of each row; 0 for a failed request.
    """
    fail(batch, verdict)
    gained = []
    accepted_paths_B = verdict.accepted_paths_B or [None] * len(batch)
    rows = zip(
        batch.sequences, draft.tokens_B, verdict.num_accepted_B, accepted_paths_B, verdict.next_token_B, strict=True
    )
    for seq, drafted, num_accepted, path, bonus in rows:
        accepted = drafted[:num_accepted] if path is None else [drafted[node] for node in path]
        tokens = [] if seq.error else seq.accept([*accepted, bonus])
        seq.lossless &= verdict.lossless
        gained.append(len(tokens))
    return gained


def _observed(
    batch: Batch, draft: DraftBlock, firsts: list[int], slots_B: list[list[int]], out: ForwardOutput
) -> list[Observed]:
    """Returns the anchor and the accepted drafts of each row: the positions that stay in the cache."""
    observed, begin = [], 0
    for seq, tokens, first, slots in zip(batch.sequences, draft.tokens_B, firsts, slots_B, strict=True):
        if slots and slots[-1] == len(slots) - 1:  # contiguous: the taps need no copy
            observed.append(Observed(seq, first, len(slots), out.taps_TF, begin))
        elif slots:
            taps_NF = None if out.taps_TF is None else out.taps_TF[[begin + slot for slot in slots]]
            observed.append(Observed(seq, first, len(slots), taps_NF))
        begin += 1 + len(tokens)
    return observed


class RuleJudge:
    """Decides which drafts are accepted. Normally the verification rule `rule` decides, such as rejection sampling. It
    does not decide for a row in one of these cases; the first one that applies counts:

    1. The request has its own lossy rule (`SamplingParams.lossy`): this rule decides.
    2. The drafts form a tree: the path that equals the tokens that the target itself generates is accepted. If `rule`
       has a function `walk`, it selects the path instead.
    3. The row is greedy, and `rule` needs the drafts' probabilities: the leading drafts that equal the target's most
       probable tokens are accepted.
    4. The row is sampled with certain (deterministic) drafts, and `rule` is lossless and needs the drafts'
       probabilities: the leading drafts that equal the tokens sampled from the target are accepted.
    """

    def __init__(self, rule: Rule = RULES["auto"]) -> None:
        self.rule = rule

    @property
    def takes_trees(self) -> bool:
        return self.rule.takes_trees

    def only_argmax(self, batch: Batch) -> bool:
        """True if judging this batch needs only the most probable token of each position, not all logits: all requests
        are greedy, without log-probabilities, and without settings such as penalties or a grammar (`is_shaped`)."""
        return all(_is_plain(seq) and seq.params.logprobs is None for seq in batch.sequences)

    def __call__(self, batch: Batch, draft: DraftBlock, out: ForwardOutput) -> Verdict:
        """Judges a verify pass of a batch with the drafts `draft`. `out`: the target's output, packed row after row.
        Appends the log-probabilities of the tokens to be committed to the sequences that request them."""
        plain = [_is_plain(seq) for seq in batch.sequences]
        argmax_T = out.best_T() if any(plain) else []
        accepted: list[int] = []
        bonus: list[int] = []
        failed_B: list[str | None] = [None] * len(batch)
        accepted_paths_B: list[list[int] | None] = [None] * len(batch)
        begin = 0
        for index, (seq, tokens) in enumerate(zip(batch.sequences, draft.tokens_B, strict=True)):
            end = begin + len(tokens) + 1
            path, tree = range(len(tokens)), draft.trees_B[index] if draft.trees_B else None
            if seq.params.lossy:
                assert out.logits_TV is not None
                probs_KV = draft.probs_B[index] if self.rule.needs_probs else None
                row_verdict, path = judge_lossy(seq, tokens, tree, probs_KV, out.logits_TV[begin:end])
                accepted_paths_B[index] = list(path) if tree else None
            elif tree:
                logits_JV = None if out.logits_TV is None else out.logits_TV[begin:end]
                row_verdict, path = self._judge_tree(
                    seq, tree, argmax_T[begin:end] if plain[index] else None, logits_JV
                )
                accepted_paths_B[index] = list(path)
            elif plain[index]:
                row_verdict = self._judge_greedy(seq, tokens, argmax_T[begin:end])
            else:
                assert out.logits_TV is not None
                row_verdict = self._judge_row(seq, tokens, draft.probs_B[index], out.logits_TV[begin:end])
            if row_verdict.next_token == _NONE:
                logits_JV = None if plain[index] or out.logits_TV is None else out.logits_TV[begin:end]
                if logits_JV is not None and accepted_paths_B[index] is not None:
                    logits_JV = logits_JV[[0, *(node + 1 for node in path)]]
                failed_B[index] = failure_reason(seq, row_verdict.num_accepted, logits_JV)
                row_verdict, accepted_paths_B[index] = RowVerdict(0, _NONE), None
            accepted.append(row_verdict.num_accepted)
            bonus.append(row_verdict.next_token)
            if seq.params.logprobs is not None and out.logits_TV is not None and bonus[-1] != _NONE:
                path = path[: accepted[-1]]
                slots, committed = [0, *(node + 1 for node in path)], [*(tokens[node] for node in path), bonus[-1]]
                count, scale = seq.params.logprobs, seq.params.logprob_temperature
                for slot, token in zip(slots, committed, strict=True):
                    seq.logprobs.append(logprobs_of(out.logits_TV[begin + slot], token, count, scale))
            begin = end
        paths_B = accepted_paths_B if draft.trees_B else None
        return Verdict(accepted, bonus, self.rule.lossless, paths_B, failed_B if any(failed_B) else None)

    def _judge_tree(
        self, seq: Sequence, tree: Tree, argmax_J: list[int] | None, logits_JV: Tensor | None
    ) -> tuple[RowVerdict, list[int]]:
        """Returns the accepted path of a tree, which the target's own samples follow, each with its position's noise,
        and the next token; if the rule has a `walk`, the target samples only the last token."""
        children = {} if self.rule.walk else tree.children()
        path = self.rule.walk(tree, Uniforms.of(seq)) if self.rule.walk else []
        while True:
            node = path[-1] if path else -1
            if argmax_J is not None:
                token = argmax_J[node + 1]  # row 0 is the anchor's
            else:
                assert logits_JV is not None
                token = self._draw(
                    seq, [tree.tokens[each] for each in path], [0, *(each + 1 for each in path)], logits_JV
                )
            child = children.get((node, token))
            if child is None:
                return RowVerdict(len(path), token), path
            path.append(child)

    def _draw(self, seq: Sequence, path: list[int], slots: list[int], logits_JV: Tensor) -> int:
        """Returns the target's token after the accepted drafts, or -1. `slots`: rows of the logits of the last
        committed token and the drafts."""
        if seq.params.logit_bias or seq.params.has_penalties or seq.shapes_logits:
            logits_JV = shape(seq, penalise(logits_JV[slots], seq.params, seq.tokens, seq.counts, path), path)
            slots = list(range(len(slots)))  # `shape` and `penalise` returned the path's rows only
        if seq.params.is_greedy:
            return ForwardOutput(logits_JV[slots[-1] :][:1], None).best_T()[0]
        return sampled_token(seq, len(path), logits_JV[slots[-1]])

    def _judge_greedy(self, seq: Sequence, tokens: list[int], argmax_J: list[int]) -> RowVerdict:
        if self.rule.needs_probs:
            return match_prefix(tokens, argmax_J.__getitem__)
        return self.rule.verify(CheckedRow(tokens, None, Uniforms.of(seq), argmax_J.__getitem__, _no_probs))

    def _judge_row(
        self, seq: Sequence, tokens: list[int], draft_probs_KV: Tensor | None, logits_JV: Tensor
    ) -> RowVerdict:
        logits_JV = shape(seq, penalise(logits_JV, seq.params, seq.tokens, seq.counts, tokens), tokens)
        if seq.constraint is not None:
            logits_JV = seq.constraint.mask(seq, logits_JV)
        if seq.params.is_greedy:
            return self._judge_greedy(seq, tokens, ForwardOutput(logits_JV, None).best_T())
        probs_KV = draft_probs_KV if self.rule.needs_probs else None
        # Certain drafts by match: it accepts as many as the other lossless rules, and a seed fixes the text.
        verify = match if self.rule.needs_probs and self.rule.lossless and probs_KV is None else self.rule.verify
        try:
            return verify(checked_row(seq, tokens, probs_KV, logits_JV))
        except NumericsError:
            return RowVerdict(0, _NONE)


def sampled_token(seq: Sequence, slot: int, logits_V: Tensor) -> int:
    """Samples the target's own token at a slot (draft position); returns -1 if the logits give no distribution."""
    try:
        return race(logits_V, seq.params, Uniforms.of(seq).noise(slot))
    except NumericsError:
        return _NONE


def failure_reason(seq: Sequence, num_accepted: int, logits_JV: Tensor | None) -> str:
    """Returns the error message for a row without a next token: either its logits are not finite, or its settings
    forbid every token. `num_accepted`: accepted drafts before the missing token. `logits_JV`: the model's own logits,
    before penalties and grammar; None for a row whose settings forbid no token."""
    best_J = [_NONE] * (num_accepted + 1) if logits_JV is None else ForwardOutput(logits_JV, None).best_T()
    if _NONE not in best_J:
        place = len(seq.tokens) + num_accepted
        return (
            f"no token is left to choose at position {place}: logit_bias, bad_words, min_tokens or the grammar forbid "
            "all"
        )
    slot = num_accepted if logits_JV is None else best_J.index(_NONE)
    return (
        f"the model's logits are not finite at position {len(seq.tokens) + slot}: its weights are damaged, or too "
        "large for their dtype; check the model's files, or try float32"
    )


def _no_probs() -> Tensor:
    raise AssertionError("a rule with needs_probs=False read probabilities")


def _is_plain(seq: Sequence) -> bool:
    """True for a greedy request whose logits and acceptance nothing else changes."""
    return seq.params.is_greedy and not is_shaped(seq)


def is_shaped(seq: Sequence) -> bool:
    """True if a setting other than temperature, top-k, top-p and min-p affects the request's logits, or which drafts
    are accepted: bias, penalties, bad words, a minimum length, a grammar or a lossy rule."""
    params = seq.params
    return (
        params.lossy is not None
        or params.grammar is not None
        or bool(params.logit_bias)
        or params.has_penalties
        or seq.shapes_logits
    )
