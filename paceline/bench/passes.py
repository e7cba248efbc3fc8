"""Runs one timed pass: sends a fixed list of requests through the engine, at most `batch` at the same time."""

from __future__ import annotations

import random
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from paceline.data.prompts import Prompt
from paceline.draft.base import Drafter
from paceline.engine.engine import Engine
from paceline.engine.llm import LLM
from paceline.engine.round import RuleJudge
from paceline.errors import TOKEN_PROMPTS, ContextLengthError, way_out
from paceline.lossy import Price
from paceline.model.backends import form_of
from paceline.model.target import ForwardBatch, Target
from paceline.plan.marginals import Marginals, MockedPlanner, Tally
from paceline.report.statistics import first_difference, ratio_of_sums
from paceline.report.tables import ignore
from paceline.types import Round, SamplingParams
from paceline.verify.rules import mocked

CHUNK = 256
"""Maximum prompt tokens of one forward pass during prefill."""


def described(llm: LLM) -> dict[str, Any]:
    """Return a description of the loaded model, to be stored with results: "model", "device", "dtype", "backend", "isa"
    (instruction set), "weight_format" and "weight_bytes"."""
    settings = {name: getattr(llm.config, name) for name in ("model", "device", "dtype")}
    return {**settings, **asdict(form_of(llm.target)), "weight_bytes": llm.target.weight_bytes}


def mocked_engine(
    llm: LLM, drafter: Drafter, acceptance: float | Marginals, num_nodes: int = 0, device_rounds: bool | None = None
) -> Engine:
    """Return an engine with mocked acceptance: a set number of drafts is accepted, whatever their tokens. `num_nodes`:
    drafts per tree; 0 for chains of drafts. `acceptance`: for chains the mean tokens per round, bonus token included;
    for trees marginals (how often the candidate of each rank is accepted at each draft position).

    `device_rounds`: True runs each whole round as one CUDA graph; False does not. None does so if the target's passes
    run as CUDA graphs. Raises ConfigError for True if the target does not support it."""
    chunk, planner = llm.config.prefill_chunk, None
    if isinstance(acceptance, Marginals):
        planner = MockedPlanner(most_chunk=chunk, num_nodes=num_nodes, marginals=acceptance)
    options: dict[str, Any] = {"planner": planner, "prefill_chunk": chunk, "device_rounds": device_rounds}
    engine = Engine(llm.target, llm.tokenizer, drafter, judge=RuleJudge(mocked(acceptance)), **options)
    engine.record(grows_trees=num_nodes > 0)
    return engine


def random_prompt(seed: int | str, length: int, vocab_size: int) -> list[int]:
    """Return `length` random token ids below `vocab_size`. Give each prompt its own seed: equal prompts would reuse the
    KV cache of the earlier one."""
    draw = random.Random(seed)
    return [draw.randrange(vocab_size) for _ in range(length)]


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a benchmark. Its prompt is stored as token ids, so that all compared drafters and engines get the
    same tokens. A conversation becomes one request per user message, each with the conversation up to the end of that
    message."""

    name: str
    token_ids: list[int]
    turn: str = ""
    """Text of the user's last message, for reports."""


@dataclass(slots=True)
class Answer:
    token_ids: list[int]
    text: str
    seconds: float
    """Seconds from the start of the request's prefill to the last token."""
    rounds: list[Round] = field(default_factory=list)
    lossless: bool = True
    price: Price | None = None
    """Deviation from the target's distribution caused by a lossy rule; None without such a rule."""


@dataclass(slots=True)
class Pass:
    """One timed pass over all requests: the answers in the order of the requests, and the seconds of each stage."""

    answers: list[Answer]
    wall_s: float = 0.0
    prefill_s: float | None = None
    draft_s: float = 0.0
    verify_s: float = 0.0
    num_passes: int = 0
    """Number of the target's forward passes for decoding; each reads all weights."""
    marginals: Tally = field(default_factory=Tally)
    """How often the target's token had each rank among the drafter's candidates; empty if this was not recorded."""

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second of wall time, prefill included."""
        return self.num_tokens / self.wall_s if self.wall_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Output tokens per second of decoding alone: all tokens but the first of each answer, over the wall time
        without prefill. None if prefill was not timed separately."""
        if self.prefill_s is None or self.wall_s <= self.prefill_s:
            return None
        return (self.num_tokens - len(self.answers)) / (self.wall_s - self.prefill_s)

    @property
    def seconds(self) -> dict[str, float | None]:
        """Seconds by stage: "prefill", "draft", "verify", "host" (all other work) and "wall" (the whole pass). For
        Transformers all but "wall" are None."""
        if self.prefill_s is None:
            return {"prefill": None, "draft": None, "verify": None, "host": None, "wall": self.wall_s}
        stages = {"prefill": self.prefill_s, "draft": self.draft_s, "verify": self.verify_s}
        return {**stages, "host": max(self.wall_s - sum(stages.values()), 0.0), "wall": self.wall_s}


def run_pass(
    engine: Engine,
    requests: list[Request],
    params: list[SamplingParams],
    batch: int,
    on_answer: Callable[[], None] = ignore,
) -> Pass:
    """Answer all requests, at most `batch` at the same time, and return the answers and times. `params`: sampling
    parameters of each request. `on_answer`: called after each answer."""
    waiting = deque(range(len(requests)))
    texts: dict[int, list[str]] = {}
    index_of: dict[int, int] = {}
    answers: dict[int, Answer] = {}
    done = Pass([], prefill_s=0.0)
    started = time.perf_counter()
    try:
        with engine.whole_chunks():
            while waiting or index_of:
                while waiting and len(index_of) < batch:
                    index = waiting.popleft()
                    request_id = engine.add(requests[index].token_ids, params[index])
                    index_of[request_id], texts[request_id] = index, []
                chunks = engine.step()
                for one in engine.rounds:
                    done.draft_s += one.draft_s
                    done.verify_s += one.verify_s
                    done.num_passes += 1
                    for ranks in one.target_ranks_B or ():
                        if ranks:
                            done.marginals.add(ranks)
                for chunk in chunks:
                    seq = chunk.sequence
                    texts[seq.request_id].append(chunk.text)
                    if chunk.finish_reason is not None:
                        text = "".join(texts.pop(seq.request_id))
                        began = seq.timings.arrival_s + seq.timings.queue_s
                        ended = seq.timings.token_s[-1] if seq.timings.token_s else time.perf_counter()
                        answer = Answer(seq.output_ids, text, ended - began, seq.rounds, seq.lossless)
                        answer.price = seq.ledger.price(str(seq.params.lossy)) if seq.ledger else None
                        answers[index_of.pop(seq.request_id)] = answer
                        done.prefill_s = (done.prefill_s or 0.0) + seq.timings.prefill_s
                        on_answer()
    finally:
        for request_id in list(index_of):
            engine.abort(request_id)
    done.wall_s = time.perf_counter() - started
    done.answers = [answers[index] for index in range(len(requests))]
    return done


def rates(passes: list[Pass]) -> list[tuple[float, ...]]:
    """Return one pair (output tokens, median seconds) for each request. `passes`: repetitions of the same requests."""
    requests = zip(*(run.answers for run in passes), strict=True)
    return [(float(len(same[0].token_ids)), statistics.median(answer.seconds for answer in same)) for same in requests]


def pairs(ours: list[Pass], theirs: list[Pass]) -> list[tuple[float, ...]]:
    """Return, for each request, a tuple of four numbers: (tokens, seconds) in `ours`, then in `theirs`; see `rates`."""
    return [(*one, *other) for one, other in zip(rates(ours), rates(theirs), strict=True)]


def rate_ratio(items: list[tuple[float, ...]]) -> float:
    """Return how many times as fast the first of two measurements is as the second; 0.0 if the second one's speed is 0.
    A speed is total tokens over total seconds. `items`: for each request the tokens and seconds of both measurements,
    as `pairs` returns them."""
    own, other = ratio_of_sums([item[:2] for item in items]), ratio_of_sums([item[2:] for item in items])
    return own / other if other else 0.0


class Engines:
    """Holds one engine per drafter, so that a benchmark can switch drafters. All engines share one LLM's weights and KV
    cache."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._made: dict[str, Engine] = {}

    def __getitem__(self, name: str) -> Drafter:
        return self._made[name].drafter

    def add(self, name: str, drafter: Drafter) -> None:
        """Create an engine for this drafter and store it under `name`. Raises DrafterMismatchError if the drafter does
        not fit the target."""
        self._made[name] = self._llm.new_engine(drafter)

    def use(self, name: str) -> Engine:
        """Make the LLM use the drafter that was added under `name`, and return its engine. Also clears the KV cache, so
        that no prefix of an earlier pass is reused."""
        llm = self._llm
        llm.engine, llm.drafter = self._made[name], self[name]
        llm.target.set_taps(llm.drafter.tap_layers)
        llm.record_passes(llm.engine)  # CUDA graphs are dropped when a wider drafter is added later
        cache = llm.target.cache
        for row in [cache.allocate(row) for row in cache.free_rows]:
            if row is not None:  # allocating a row discards its content
                cache.free(row)
        return llm.engine


def make_requests(llm: LLM, prompts: list[Prompt], max_tokens: int) -> tuple[list[Request], int]:
    """Return (requests, number of user messages that were left out). Each user message of a prompt becomes one request,
    unless its tokens and an answer of `max_tokens` tokens exceed the context.

    The answers to a conversation's earlier messages are generated here, by plain greedy decoding, so that all drafters
    get the same tokens. Raises ContextLengthError if no request is left."""
    requests: list[Request] = []
    num_skipped = 0
    params = SamplingParams(max_tokens=max_tokens)
    for number, prompt in enumerate(prompts):
        messages, traced, variables = list(prompt.messages), list(prompt.token_ids), dict(prompt.variables)
        turns = prompt.turns or (llm.tokenizer.decode(traced),)
        for turn, user_text in enumerate(turns):
            name = f"{number}:{prompt.id}" + (f"/{turn + 1}" if turn else "")
            with way_out(TOKEN_PROMPTS):
                request = Request(name, traced or llm.encode_chat(messages, prompt.tools, variables), user_text)
            if len(request.token_ids) + max_tokens > llm.target.cache.max_len:
                num_skipped += len(turns) - turn
                break
            requests.append(request)
            if turn + 1 < len(turns):
                text = run_pass(llm.engine, [request], [params], 1).answers[0].text
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": turns[turn + 1]}]
    if not requests:
        raise ContextLengthError(
            f"no prompt fits with its answer of {max_tokens} tokens in a cache of {llm.target.cache.max_len}: "
            "raise max_len or lower max_tokens"
        )
    return requests, num_skipped


def parting(target: Target, prompt_ids: list[int], ours: list[int], theirs: list[int]) -> tuple[int, float] | None:
    """Find the first difference between two answers, `ours` and `theirs`, to one prompt. Returns None for equal
    answers, else (number of equal tokens before the difference, gap). The gap is the difference between the target's
    two largest logits at this position; a small gap is a near-tie. No request may be running, because the target runs
    one more pass."""
    index = first_difference(ours, theirs)
    if index is None:
        return None
    best, second = _logits_after(target, prompt_ids + theirs[:index]).topk(2).values.tolist()
    return index, best - second


@torch.inference_mode()
def _logits_after(target: Target, token_ids: list[int]) -> torch.Tensor:
    """Return the target's logits [V] in float32 after these tokens, computed in a temporary cache row."""
    row = target.cache.allocate()
    assert row is not None, "the engine still holds every row"
    try:
        *firsts, last = range(0, len(token_ids), CHUNK)
        for begin in firsts:
            target.forward(ForwardBatch([row], [begin], [CHUNK], token_ids[begin : begin + CHUNK], "none"))
        rest = token_ids[last:]
        out = target.forward(ForwardBatch([row], [last], [len(rest)], rest, "last"))
        assert out.logits_TV is not None
        return out.logits_TV[-1].float().clone()
    finally:
        target.cache.free(row)
