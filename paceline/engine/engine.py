"""The engine: add requests at any time, call `step` while there is work, read the tokens that each step committed.
`LLM` and the server use it this way. Not thread-safe: one thread owns an engine."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch

from paceline.draft.base import Drafter, NoDrafter, Observed
from paceline.draft.ngram import NgramDrafter, PredictionDrafter, predicted_ids
from paceline.draft.pool import LOOKUP_MATCH, Pool
from paceline.engine.device_round import DeviceRounds
from paceline.engine.grammar import Grammars
from paceline.engine.round import RuleJudge, decode_round, fail
from paceline.engine.scheduler import PrefixReuse, Scheduler
from paceline.engine.shape import forbidden_ids
from paceline.engine.threads import limit_threads, restore_threads
from paceline.errors import ContextLengthError, PromptError, SamplingError, shown
from paceline.lossy import NOT_ALLOWED, Ledger
from paceline.model.sampling.logits import logprobs_of_rows
from paceline.model.target import ForwardBatch, ForwardOutput, Target
from paceline.model.text.tokenizer import TextStream, Tokenizer
from paceline.plan.planner import AdaptivePlanner, FixedPlanner, Plan, Planner, Row
from paceline.plan.routes import Router
from paceline.plan.trees import MOST_NODES
from paceline.sampling import SamplingParams
from paceline.types import Batch, Constraint, DraftBlock, FinishReason, Round, RoundStats, Route, Sequence
from paceline.verify.rules import MOCKED


@dataclass(slots=True)
class Chunk:
    """New output of one request in one engine step: tokens and text."""

    sequence: Sequence
    token_ids: list[int]
    text: str
    """Text that became final in this step; an incomplete character or a possible stop string is withheld."""
    finish_reason: FinishReason | None = None
    """Reason why the answer ended; None if it goes on. For "error", `sequence.error` has the exception."""


class Engine:
    """Generates answers to many requests together (continuous batching) with one target model. In each step, `planner`
    decides how many prompt tokens are prefilled and how many tokens each request drafts."""

    def __init__(
        self,
        target: Target,
        tokenizer: Tokenizer,
        drafter: Drafter | Mapping[str, Drafter] | None = None,
        *,
        router: Router | None = None,
        judge: RuleJudge | None = None,
        planner: Planner | None = None,
        lookups: bool = False,
        most_predicted: int | None = None,
        eos_token_ids: tuple[int, ...] = (),
        prefill_chunk: int = 256,
        allow_lossy: bool = False,
        max_tv: float | None = None,
        device_rounds: bool | None = None,
    ) -> None:
        """`drafter`: the drafter, or a pool of drafters by name, the default first. `router` chooses one for requests
        with a `Route` that names none, unless they set `max_drafted`. `judge` decides which drafts are accepted; None:
        by the rule "auto". `planner` None: every round verifies all drafts, and chunks have `prefill_chunk` prompt
        tokens. `lookups` adds prompt lookup drafts. `most_predicted`: maximum drafts per round from a request's
        prediction; None: 31. `eos_token_ids`: tokens that end answers. `allow_lossy` permits lossy rules, with at most
        `max_tv` mean total variation per answer. `device_rounds`: compute each qualifying round as one CUDA graph
        (`device_round.py`); None: if the target's passes are captured.

        Raises DrafterMismatchError if a drafter does not fit the target, ConfigError if the target cannot do
        `device_rounds`.
        """
        self.target, self.tokenizer = target, tokenizer
        self.planner = planner or FixedPlanner(most_chunk=prefill_chunk)
        self.pool = Pool(
            target,
            NoDrafter() if drafter is None else drafter,
            NgramDrafter(min_match=LOOKUP_MATCH) if lookups else None,
            PredictionDrafter(num_drafted=most_predicted),
        )
        self.router = router
        if router:
            router.begin()
        self.judge = judge or RuleJudge()
        self.device_rounds = DeviceRounds.of(target, self.pool, self.judge, device_rounds)
        self.eos_token_ids = eos_token_ids
        self.allow_lossy, self.max_tv = allow_lossy, max_tv
        self.scheduler = Scheduler(target.cache)
        self.prefix = PrefixReuse(target, self.pool) if target.is_width_invariant else None
        self.grammars = Grammars(tokenizer, target.vocab_size, eos_token_ids)
        self.rounds: list[RoundStats] = []
        """Statistics of the round in the latest step; empty if it had no round."""
        self.read = (0, 0.0)
        """Prefill of the latest step: (prompt tokens, seconds)."""
        self._requests: dict[int, tuple[Sequence, TextStream]] = {}
        self._trial_drafters: dict[int, Drafter] = {}
        """Request id -> drafter that is tried on this request alone."""
        self.ids = itertools.count()
        """Counter of request ids. An engine that replaces this one continues it, so that ids stay unique."""

    @property
    def drafter(self) -> Drafter:
        """The pool's default drafter, for new requests."""
        return self.pool.drafter

    def swap(self, drafter: Drafter) -> None:
        """Replace the default drafter for new requests. Raises DrafterMismatchError, and changes nothing, if the
        drafter does not fit the target."""
        self.pool.swap(drafter)
        self._forget(drafter.name)

    def put(self, name: str, drafter: Drafter) -> None:
        """Add a drafter to the pool under this name; an earlier one of this name serves only its running requests.
        Raises DrafterMismatchError, or ConfigError for a reserved name, and changes nothing then."""
        self.pool.put(name, drafter)
        self._forget(name)

    def remove(self, name: str) -> None:
        """Remove a drafter from the pool; running requests keep it. Raises ConfigError for an unknown name."""
        self.pool.remove(name)
        self._forget(name)

    def _forget(self, name: str) -> None:
        self.planner.forget(name)
        if self.router:
            self.router.forget(name)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(
        self,
        prompt_ids: list[int],
        params: SamplingParams | None = None,
        constraint: Constraint | None = None,
        route: Route | None = None,
        trial_drafter: Drafter | None = None,
    ) -> int:
        """Queue a request; returns its id. `constraint`: the request's grammar, compiled by `grammars.compile`; if
        None, it is compiled here. `route`: selects the drafter; None: the default one. `trial_drafter`: a drafter
        outside the pool, bound to the target, that serves only this request; the request then goes to the front of the
        queue. Raises PromptError, ContextLengthError or SamplingError for invalid input."""
        params = SamplingParams() if params is None else params
        self._check(prompt_ids, params)
        if params.grammar and constraint is None:
            constraint = self.grammars.compile(params.grammar)
        ignores_eos = params.ignore_eos and not params.grammar
        stop, stop_tokens = self.tokenizer.split_stop(params.stop, are_hidden=params.skip_special_tokens)
        ends = (*(() if ignores_eos else self.eos_token_ids), *params.stop_token_ids, *stop_tokens)
        seq = Sequence(next(self.ids), list(prompt_ids), len(prompt_ids), params, eos_token_ids=ends)
        seq.constraint, seq.route, seq.drafter = constraint, route, route.drafter if route else ""
        seq.prediction = predicted_ids(self.tokenizer, params, self.target.vocab_size)
        if params.lossy:
            seq.ledger, seq.lossless = Ledger(params.lossy.within(self.max_tv).max_tv), False
        seq.timings.arrival_s, seq.forbidden = time.perf_counter(), forbidden_ids(self.tokenizer, params)
        stream = TextStream(self.tokenizer.stream(params.skip_special_tokens), stop, params.min_tokens)
        self._requests[seq.request_id] = seq, stream
        if trial_drafter:
            self._trial_drafters[seq.request_id] = trial_drafter
            self.scheduler.waiting.appendleft(seq)
        else:
            self.scheduler.waiting.append(seq)
        self._admit()
        return seq.request_id

    def _check(self, prompt_ids: list[int], params: SamplingParams) -> None:
        if not isinstance(params, SamplingParams):
            raise SamplingError(f"params must be SamplingParams(...), not {shown(params)}")
        if not prompt_ids:
            raise PromptError("the prompt is empty: give at least one token")
        vocab_size, max_len = self.target.vocab_size, self.target.cache.max_len
        if wrong := next((token for token in prompt_ids if not 0 <= token < vocab_size), None):
            raise PromptError(f"token {shown(wrong)} is outside the vocabulary of {vocab_size}: check the tokenizer")
        for name in ("logit_bias", "stop_token_ids"):
            if wrong := next((token for token in getattr(params, name) or () if not 0 <= token < vocab_size), None):
                raise SamplingError(
                    f"{name} names token {shown(wrong)}, outside the vocabulary of {vocab_size}: remove it", name
                )
        if params.lossy and not self.allow_lossy:
            raise SamplingError(NOT_ALLOWED)
        if self.judge.rule.name == MOCKED:
            for name in ("grammar", "min_tokens", "bad_words", "lossy"):
                if getattr(params, name):
                    looks_at = "cannot hold with a mocked acceptance, which looks at no token"
                    raise SamplingError(f"{name} {looks_at}: leave one of them out")
        needed = len(prompt_ids) + params.max_tokens
        if needed > max_len:
            raise ContextLengthError(
                f"prompt of {len(prompt_ids)} and answer of {params.max_tokens} tokens need {needed}, the cache holds "
                f"{max_len}: shorten the prompt, lower max_tokens, or raise max_len (this model: "
                f"{self.target.max_position})"
            )

    def abort(self, request_id: int) -> Sequence | None:
        """End a waiting or running request at once. Returns its sequence; None if there is no such request."""
        if request_id not in self._requests:
            return None
        seq, _ = self._requests[request_id]
        seq.finish_reason = "abort"
        self._release(seq)
        self._admit()
        return seq

    def record(self, most_drafted: int = 0, *, grows_trees: bool = False) -> None:
        """Capture the passes of target and drafters as CUDA graphs, if the device uses them; takes seconds. Verify
        passes are captured for up to `most_drafted` drafts per row, or up to a drafter's maximum if that is larger.
        `grows_trees`: capture them for draft trees of any size too."""
        most = max(most_drafted, *(drafter.num_drafted for drafter in self.pool.drafters))
        for source in (self.pool.lookups, self.pool.predictions):
            most = max(most, source.num_drafted) if most and source else most
        self.target.record(1 + (MOST_NODES if grows_trees and most else most))
        for drafter in self.pool.drafters:
            drafter.record()
        if self.device_rounds:
            self.device_rounds.record()

    def whole_chunks(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager within which prefill chunks have the maximum size. Use it for answers that are not
        streamed: they finish sooner, but the tokens of each one are generated less evenly."""
        return self.planner.chunks.whole() if isinstance(self.planner, AdaptivePlanner) else contextlib.nullcontext()

    @torch.inference_mode()
    def step(self) -> list[Chunk]:
        """Run at most one prefill chunk and one decode round. Returns a chunk for each request that has new tokens or
        has ended."""
        self.rounds, self.read = [], (0, 0.0)
        if not (self.target.has_own_threads and self.pool.has_own_threads):
            return self._advance()
        before = limit_threads()  # the others would spin after each operation, on the cores that the next pass needs
        try:
            return self._advance()
        finally:
            restore_threads(before)

    def _advance(self) -> list[Chunk]:
        reading = self.scheduler.prefilling
        if reading and self.prefix:
            self.prefix.reads(reading[0])
        prompt_left = reading[0].prompt_len - reading[0].cached_len if reading else 0
        plan = self.planner.next([self._row(seq) for seq in self.scheduler.running], prompt_left)
        chunks = self._prefill(plan.chunk)
        begun = {chunk.sequence.request_id for chunk in chunks}
        if not chunks or any(seq.request_id not in begun for seq in self.scheduler.running):
            chunks += self._decode(plan)  # with no other row, a first token is sent before its first round
        self._admit()
        return chunks

    def _row(self, seq: Sequence) -> Row:
        return Row(seq.request_id, seq.planned_kind, ask=partial(self.pool.offers, seq, self.planner))

    def _admit(self) -> None:
        for seq in self.scheduler.admit(self.prefix.best_row if self.prefix else None):
            with contextlib.ExitStack() as on_error:
                on_error.callback(self._release, seq)
                if self.router and seq.route and not seq.drafter and seq.params.max_drafted is None:
                    seq.drafter, seq.cluster = self.router.choose(seq.request_id, seq.route.clusters, self.pool.open)
                chosen = seq.drafter
                self.pool.start(seq, self._trial_drafters.get(seq.request_id))
                if self.router and seq.drafter != chosen:
                    self.router.cancel(seq.request_id)  # the chosen one is released
                if self.prefix:
                    self.prefix.admitted(seq)
                on_error.pop_all()

    def _prefill(self, num_tokens: int) -> list[Chunk]:
        if not self.scheduler.prefilling:
            return []
        seq = self.scheduler.prefilling[0]
        started = time.perf_counter()
        begin = seq.cached_len
        end = min(begin + num_tokens, seq.prompt_len)
        is_last, batch = end == seq.prompt_len, Batch([seq])
        tokens, scores = seq.tokens[begin:end], seq.params.prompt_logprobs
        logits = "all" if scores is not None else "last" if is_last else "none"
        only_argmax = scores is None and self.judge.only_argmax(batch)
        part = ForwardBatch([seq.row], [begin], [end - begin], tokens, logits, only_argmax=only_argmax)
        out = self.target.forward(part)
        seq.cached_len = end
        if scores is not None and out.logits_TV is not None:
            following = seq.tokens[begin + 1 : end + 1]
            seq.prompt_logprobs += logprobs_of_rows(out.logits_TV[: len(following)], following, scores)
            out = ForwardOutput(out.logits_TV[-1:], out.taps_TF, out.argmax_T and out.argmax_T[-1:])
        if is_last:
            verdict = self.judge(batch, DraftBlock.certain([[]]), out)
            fail(batch, verdict)
            if seq.error:
                return [self._publish(seq, *self._decode_text(seq, time.perf_counter()))]
            self.scheduler.start_decoding(seq)
            seq.accept(verdict.next_token_B)
            seq.lossless &= verdict.lossless
        self.pool.observe([Observed(seq, begin, end - begin, out.taps_TF)])
        now = time.perf_counter()
        self.read = end - begin, now - started
        for each in (*self.scheduler.prefilling, *self.scheduler.running):
            if each is not seq:
                each.timings.waited(now)
        seq.timings.read(started, now)
        self.planner.prefilled(*self.read)
        if not is_last:
            return []
        seq.timings.first_token_s = now
        return [self._publish(seq, *self._decode_text(seq, now))]

    def _decode(self, plan: Plan) -> list[Chunk]:
        batch = Batch(list(self.scheduler.running))
        if not batch.sequences:
            return []
        for place, seq in enumerate(batch.sequences):
            if place == len(plan.rows) or plan.rows[place].key != seq.request_id:
                self.planner.join(plan, place, self._row(seq))  # its prompt ended in this step
        batch.takes_B, batch.whole_blocks = plan.drafts, plan.whole_blocks
        takes_trees = self.target.takes_trees and self.judge.takes_trees
        batch.noise_aware = self.judge.rule.draws
        batch.num_candidates = self.planner.num_candidates if takes_trees else 0
        batch.reports_target_ranks = self.planner.reports_target_ranks
        stats = self.device_rounds(batch) if self.device_rounds else None
        if stats is None:
            stats = decode_round(batch, self.target, self.pool, self.judge, partial(self.planner.narrow, plan))
        self.planner.learn(plan, stats)  # before the cut: drafts behind a stop string were accepted all the same
        now = time.perf_counter()
        counts_B = zip(stats.num_drafted_B, stats.num_accepted_B, stats.source_B, strict=True)
        for seq, counts in zip(batch.sequences, counts_B, strict=True):
            seq.rounds.append(Round(*counts))
        texts = [self._decode_text(seq, now) for seq in batch.sequences]
        stats.num_accepted_B = [seq.rounds[-1].num_accepted for seq in batch.sequences]
        if self.router:
            self.router.learn(batch.sequences, stats, partial(self.planner.price, plan))
        self.rounds.append(stats)
        chunks = [self._publish(seq, *text) for seq, text in zip(batch.sequences, texts, strict=True)]
        ended = time.perf_counter()
        host_s, is_plain = stats.host_s + ended - now, not any(stats.num_drafted_B)
        for seq in self.scheduler.prefilling:
            seq.timings.waited(ended)
        for seq in batch.sequences:
            seq.timings.decoded(stats.draft_s, stats.verify_s, host_s, ended)
            seq.timings.num_plain += is_plain
            seq.timings.plain_s += is_plain * (stats.draft_s + stats.verify_s + host_s)
        return chunks

    def _decode_text(self, seq: Sequence, now: float) -> tuple[list[int], str]:
        """Returns the new tokens and their text; ends the answer at a stop string."""
        _, stream = self._requests[seq.request_id]
        tokens = seq.tokens[seq.prompt_len + len(seq.timings.token_s) :]
        ended_by_token = seq.finish_reason == "stop"
        started = time.perf_counter()
        text, stopped_after = stream.push(tokens[:-1] if ended_by_token else tokens)
        seq.timings.text_s += time.perf_counter() - started
        if stopped_after is not None:
            seq.cut(len(tokens) - stopped_after)
            tokens = tokens[:stopped_after]
            seq.finish_reason = "stop"
        elif seq.finish_reason is not None:
            text += stream.finish()
        seq.timings.token_s.extend([now] * len(tokens))
        seq.stopped_by = stream.stopped_by
        return tokens, text

    def _publish(self, seq: Sequence, tokens: list[int], text: str) -> Chunk:
        """Returns the chunk of a request's new tokens; releases a finished request."""
        if seq.finish_reason is not None:
            try:
                self._release(seq)
            except Exception as error:  # noqa: BLE001  (a drafter's; the step's other chunks are not lost)
                seq.finish_reason, seq.error = "error", error
        return Chunk(seq, tokens, text, seq.finish_reason)

    def _release(self, seq: Sequence) -> None:
        try:
            if seq.row >= 0:
                if self.prefix:
                    self.prefix.released(seq, is_sound=seq.error is None)
                self.pool.drop(seq)
        finally:  # also if the drafter raised
            if self.router:
                self.router.ended(seq.request_id)
            self.scheduler.remove(seq)
            if seq.constraint is not None and seq.constraint.has_failed and seq.finish_reason == "stop":
                seq.finish_reason = "length"  # cut short: the answer does not match its grammar
            seq.constraint = None
            del self._requests[seq.request_id]
            self._trial_drafters.pop(seq.request_id, None)

    def check_integrity(self) -> None:
        """Assert that the engine's bookkeeping is consistent; fast enough for every step of a test."""
        self.scheduler.check_integrity()
        alive = {
            seq.request_id for seq in (*self.scheduler.waiting, *self.scheduler.prefilling, *self.scheduler.running)
        }
        assert alive == set(self._requests), "a request leaked"
        assert not self.prefix or self.prefix.deferred <= alive, "a deferred request is no longer queued"
