"""Scores a drafter on stored traces: computes the rounds that it would have had. This is exact where the text of an
answer does not depend on the drafter.

    scored = score(llm, llm.make_drafter("runs/mine/drafter"), read_requests(Path("traces"))[0])
    scored[0].figures.tokens_per_round

The target reads a stored answer in wide passes, which give the same bits as serving (where the target
`is_width_invariant`); the drafter drafts round by round at each anchor, as in the engine. The number of accepted drafts
follows from the stored text:

- Greedy: drafts are deterministic and are accepted as far as they match the text. Exact to the token.
- Sampled, with a rule that compares drafts with the target's draws: likewise. Drafts are sampled with the target's
  noise (common random numbers), which follows from the seed in every paceline trace. Texts sampled by versions without
  an exponential race score lower than they did when served.
- Sampled with other rules, or with unknown noise: drafts are sampled from q, position by position. Given the text x, at
  least i drafts are accepted with probability s_i = s_(i-1) min(1, q_i / (p_i w_(i-1))), where q_i and p_i are the
  drafter's and the target's probability of x_i given the tokens before it; w is 1 for `rejection`, for `block` w_i =
  min(1, w_(i-1) p_i / q_i), w_0 = 1: Bayes' rule applied to P(the first i are accepted and equal x) = q_1..q_i w_i (Sun
  et al. 2403.10444, section 4). The number of accepted drafts is then sampled with the request's own random number: as
  representative as a served request.

Every round verifies all drafts, as with `--speculate full`; for `--speculate N` create the drafter with `num_drafted`
N. A planner that measures time verifies fewer drafts where that is faster: `gate.py` computes acceptance at any width.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.draft.base import Drafter, Observed
from paceline.draft.dflash.drafter import DFlashDrafter
from paceline.engine.grammar import Grammars, within_grammars
from paceline.engine.llm import LLM
from paceline.engine.shape import forbidden_ids, shape
from paceline.errors import ConfigError
from paceline.loop.adapt.traffic.stored import Request
from paceline.model.sampling.logits import penalise, target_probs
from paceline.model.target import ForwardBatch, Target
from paceline.report.statistics import Rounds, num_common
from paceline.rng import ACCEPT, uniform
from paceline.types import Batch, Round, Sequence
from paceline.verify.rules import RULES, drafted_probs

CHUNK = 256
"""Positions per forward pass."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A stored request, and the rounds in which the scored drafter would have generated its answer."""

    request: Request
    rounds: tuple[Round, ...]

    @property
    def figures(self) -> Rounds:
        return Rounds.counted(self.rounds)


@dataclass(slots=True)
class _Answer:
    """State of one stored answer while its rounds are computed one after the other."""

    request: Request
    seq: Sequence
    taps_TF: Tensor | None
    logits_TV: Tensor | None
    """Target logits [T, V] over the answer; row j predicts answer token j + 1. None if drafts are not sampled."""
    rounds: list[Round] = field(default_factory=list)

    @property
    def at(self) -> int:
        """Index in the answer of the anchor: the last token before the next drafts."""
        return self.seq.num_output - 1

    @property
    def rest(self) -> list[int]:
        return self.request.answer_ids[self.seq.num_output :]

    @property
    def knows_noise(self) -> bool:
        """True if the noise that sampled the tokens is known. It is unknown for answers of other servers."""
        return self.request.params.seed is not None or self.request.seed != 0


class Scorer:
    """Simulates serving stored answers with one drafter, to compute the acceptance that it would have had. Processes as
    many requests at a time as the target's KV cache has rows."""

    def __init__(self, llm: LLM, drafter: Drafter, rule: str = "auto") -> None:
        """Bind the drafter to the target of `llm`, whose cache must be free while the scorer is used. `rule`:
        verification rule. Raises DrafterMismatchError if they do not fit."""
        self._target: Target = llm.target
        self._drafter, self._rule = drafter, RULES[rule]
        self._tokenizer, self._eos = llm.tokenizer, llm.tokenizer.eos_token_ids
        self._grammars = Grammars(llm.tokenizer, llm.target.vocab_size, self._eos)
        drafter.bind(llm.target)
        llm.target.set_taps(drafter.tap_layers)

    @torch.inference_mode()
    def score(self, requests: Rows[Request]) -> list[Scored]:
        """Compute in which rounds (drafted and accepted tokens) the drafter would have generated each stored answer.
        Returns the results in the order of `requests`. Raises ConfigError in three cases:
        - A request is longer than the KV cache.
        - A request has tokens outside the target's vocabulary.
        - The drafter is not a DFlash drafter, and its drafts are sampled and would be judged by their probabilities.
          Drafts are sampled if the answer is not greedy and its client gave no seed. The rules `rejection` and `block`
          always judge them by probabilities, `auto` only if the answer's random numbers are unknown."""
        scored: list[Scored] = []
        size = self._target.cache.num_rows
        for begin in range(0, len(requests), size):
            answers = [self._begin(number, request) for number, request in enumerate(requests[begin : begin + size])]
            running = [answer for answer in answers if answer.rest]
            while running:
                for is_known in (True, False):
                    if batch := [answer for answer in running if answer.knows_noise is is_known]:
                        self._round(batch, noise_aware=is_known and self._rule.draws)
                running = [answer for answer in running if answer.rest]
            for answer in answers:
                self._drafter.drop(answer.seq)
                self._target.cache.free(answer.seq.row)
                scored.append(Scored(answer.request, tuple(answer.rounds)))
        return scored

    def _begin(self, number: int, request: Request) -> _Answer:
        """Run the target on prompt and answer, the drafter on the prompt; the first answer token is the first
        anchor."""
        params, prompt_len = request.params, len(request.prompt_ids)
        tokens = request.prompt_ids + request.answer_ids
        if len(tokens) > self._target.cache.max_len:
            raise ConfigError(f"request {request.key} has {len(tokens)} tokens: raise max_len, or leave it out")
        if max(tokens) >= self._target.vocab_size or min(tokens) < 0:
            raise ConfigError(
                f"request {request.key} holds tokens that this model does not have: it is another's trace"
            )
        ignores_eos = params.ignore_eos and not params.grammar
        _, stop_tokens = self._tokenizer.split_stop(params.stop, are_hidden=False)
        ends = (*(() if ignores_eos else self._eos), *params.stop_token_ids, *stop_tokens)
        seq = Sequence(number, tokens[: prompt_len + 1], prompt_len, params, eos_token_ids=ends)
        seq.forbidden = forbidden_ids(self._tokenizer, params)
        seq.seed, seq.cached_len = request.seed, prompt_len
        if params.grammar:
            seq.constraint = self._grammars.compile(params.grammar)
        if params.has_penalties:
            seq.counts.update(request.answer_ids[:1])
        row = self._target.cache.allocate()
        assert row is not None, "the cache is not free"
        seq.row = row
        taps_TF, logits_TV = self._read(row, tokens[:-1], prompt_len, seq.kind == "sampled")
        self._drafter.start(seq)
        for start in range(0, prompt_len, CHUNK):
            self._observe(seq, start, min(CHUNK, prompt_len - start), taps_TF)
        return _Answer(request, seq, taps_TF, logits_TV)

    def _read(
        self, row: int, tokens: list[int], prompt_len: int, with_logits: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Run the target. Returns taps of all positions and, if requested, logits of the answer's positions."""
        taps: list[Tensor] = []
        logits: list[Tensor] = []
        for start in range(0, len(tokens), CHUNK):
            part = tokens[start : start + CHUNK]
            wanted = with_logits and start + len(part) > prompt_len
            out = self._target.forward(ForwardBatch([row], [start], [len(part)], part, "all" if wanted else "none"))
            if out.taps_TF is not None:
                taps.append(out.taps_TF.clone())
            if wanted and out.logits_TV is not None:
                logits.append(out.logits_TV[max(prompt_len - start, 0) :].clone())
        return torch.cat(taps) if taps else None, torch.cat(logits) if logits else None

    def _observe(self, seq: Sequence, start: int, count: int, taps_TF: Tensor | None) -> None:
        self._drafter.observe([Observed(seq, start, count, taps_TF, start)])

    def _round(self, running: list[_Answer], *, noise_aware: bool) -> None:
        """Run one round of every answer: draft, count the drafts accepted by the stored text, advance past them."""
        batch = Batch([answer.seq for answer in running], noise_aware=noise_aware)
        proposed = self._drafter.propose(batch)
        draft = within_grammars(batch, proposed)
        for answer, proposed_ids, tokens, probs_KV in zip(
            running, proposed.tokens_B, draft.tokens_B, draft.probs_B, strict=True
        ):
            seq = answer.seq
            if probs_KV is None or not self._rule.needs_probs:
                num_accepted = num_common(tokens, answer.rest)
            else:
                num_accepted = self._num_accepted(answer, tokens, probs_KV)
            new_tokens = answer.rest[: num_accepted + 1]
            answer.rounds.append(
                Round(len(proposed_ids), len(new_tokens) - 1, self._drafter.name if proposed_ids else "none")
            )
            first = seq.cached_len
            seq.tokens += new_tokens
            seq.cached_len = len(seq.tokens) - 1
            if seq.params.has_penalties:
                seq.counts.update(new_tokens)
            if answer.rest:
                self._observe(seq, first, len(new_tokens), answer.taps_TF)

    def _num_accepted(self, answer: _Answer, tokens: list[int], draft_probs_KV: Tensor) -> int:
        """Count the accepted drafts among sampled ones: one random number is compared with the module docstring's
        s_i."""
        if not isinstance(self._drafter, DFlashDrafter):
            raise ConfigError(
                f"drafts of {self._drafter.name} depend on those before them: score requests at temperature 0 or with "
                "a seed"
            )
        text_ids = answer.rest[: len(tokens)]
        targets = self._target_probs(answer, text_ids)
        drafts = self._drafter.chances_of(answer.seq, text_ids, draft_probs_KV)
        drawn = uniform(answer.seq.seed, ACCEPT, answer.seq.cached_len)
        survival = weight = 1.0
        for place, (target, draft) in enumerate(zip(targets, drafts, strict=True)):
            survival *= min(1.0, draft / (target * weight)) if target > 0 else 0.0
            if not drawn < survival:
                return place
            if self._rule.name != "rejection":
                weight = min(1.0, weight * target / draft)
        return len(text_ids)

    def _target_probs(self, answer: _Answer, text_ids: list[int]) -> list[float]:
        """Target probability of each text token after the anchor, given the tokens before it."""
        seq = answer.seq
        assert answer.logits_TV is not None
        logits_JV = answer.logits_TV[answer.at : answer.at + len(text_ids)].float()
        logits_JV = shape(seq, penalise(logits_JV, seq.params, seq.tokens, seq.counts, text_ids[:-1]), text_ids[:-1])
        if seq.constraint is not None:
            seq.constraint.follow(seq, text_ids)
            logits_JV = seq.constraint.mask(seq, torch.cat([logits_JV, logits_JV[-1:]]))[: len(text_ids)]
        return drafted_probs(text_ids, target_probs(logits_JV, seq.params))


def score(llm: LLM, drafter: Drafter, requests: Rows[Request]) -> list[Scored]:
    """Computes in which rounds (drafted and accepted tokens) `drafter` would have generated each stored answer. Returns
    the results in the order of `requests`; requests longer than the KV cache are left out.

    The engine of `llm` must be idle; its state is reset afterwards. Raises ConfigError for a request that cannot be
    scored (see `Scorer.score`), DrafterMismatchError if the drafter does not fit the target."""
    most = llm.target.cache.max_len
    fitting = [request for request in requests if len(request.prompt_ids) + len(request.answer_ids) <= most]
    try:
        return Scorer(llm, drafter, llm.config.rule).score(fitting)
    finally:
        llm.renew()
