"""Measures a server under load: sends the same requests at each load, alternately with speculation off and on.

    paceline bench serving --concurrency 1,4 --limit 8

A closed loop keeps a number of requests in flight. An open loop sends them at random times (Poisson) regardless of
earlier requests, as users do. This module does not import PyTorch, since the client shares the processor with the
server it measures.

Times to the first token and to the end start when a request was due. A chunk is one message of the stream: with
speculation it contains several tokens, so the time between chunks and the time between tokens differ.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

from paceline.bench.config import WARM_UP_TOKENS, LatencyConfig, ServingConfig
from paceline.data.prompts import Prompt
from paceline.net.streaming import Client, Stream, error_text
from paceline.report.statistics import Spread, doubt, possible_speedup
from paceline.report.tables import ignore
from paceline.simulate.server.load import Arrivals, poisson

BASELINE = "off"
"""Name of the contender (server setting) that the others are compared with."""
DONE = b"[DONE]"
ROUNDS_OF_REQUESTS = 4
"""Minimum number of requests in a closed loop, per request in flight."""
WARM_UP_REQUESTS = 8
"""Number of requests that are sent to a contender before it is measured, if no more are measured at a time."""
OPEN_SECONDS = 10.0
"""Minimum duration of an open loop, in seconds."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One of the things that a benchmark compares: a server, or a server with certain request fields. With different
    `fields`, such as `speculate`, one server can be several contenders."""

    name: str
    client: Client
    fields: dict[str, Any] = field(default_factory=dict)
    """JSON fields added to each request, such as `speculate`."""


@dataclass(slots=True)
class Answer:
    """Result of one request: counts and times, or an error."""

    error: str | None = None
    """Reason why the request failed; the other fields are then meaningless."""
    first_s: float = 0.0
    """Seconds from the due time (when the request should be sent) to the first text."""
    total_s: float = 0.0
    """Seconds from the due time to the end of the response."""
    due_s: float = 0.0
    """Due time in seconds after the start of the pass."""
    late_s: float = 0.0
    """Client-side delay between due time and sending, in seconds."""
    chunk_gaps_s: list[float] = field(default_factory=list)
    """Seconds between consecutive chunks (messages of the stream)."""
    num_prompt: int = 0
    num_reused: int = 0
    """Number of prompt tokens that the server found in its cache."""
    num_tokens: int = 0
    num_accepted: int | None = None
    """Number of accepted drafts; None if the server does not report it."""
    num_drafted: int | None = None
    num_rounds: int | None = None
    accepted_histogram: list[int] = field(default_factory=list)
    """Entry n: number of rounds in which exactly n drafts were accepted."""
    lossless: bool = True
    """False if the server reports mocked acceptance or a lossy rule."""
    rounds_by_source: dict[str, Any] = field(default_factory=dict)
    """Source of drafts ("dflash", "ngram") -> num_rounds, num_drafted and accepted_histogram of its rounds, as the
    server reports them."""
    text: str = ""
    timings: dict[str, Any] = field(default_factory=dict)
    """Durations that the server reported, unchanged."""

    @property
    def inter_token_s(self) -> float | None:
        """Mean seconds per token after the first token; None for an answer of fewer than two tokens."""
        return sum(self.chunk_gaps_s) / (self.num_tokens - 1) if self.num_tokens > 1 else None


@dataclass(slots=True)
class Pass:
    """Result of sending all requests once to one contender (a server or one setting of it) at one load."""

    wall_s: float
    client_cpu_s: float
    answers: list[Answer]
    steps: list[list[Any]] = field(default_factory=list)
    """[kind, size, count, total seconds] of the engine's steps during the pass, if the server reports them (`GET
    /steps`). Size is in positions for verify (target pass) and draft, in tokens for prefill, and 1 for step (a whole
    step)."""

    @property
    def tokens_per_s(self) -> float:
        return sum(answer.num_tokens for answer in self.answers if not answer.error) / self.wall_s

    @property
    def mean_total_s(self) -> float | None:
        """Mean total time of an answer in seconds; None if all requests failed."""
        totals = [answer.total_s for answer in self.answers if not answer.error]
        return statistics.fmean(totals) if totals else None


@dataclass(slots=True)
class ServingResult:
    """Throughput, latencies (seconds) and speed-up of one contender (a server or one setting of it) at one load, over
    the answers of all repetitions."""

    load: Arrivals
    speculate: str
    num_answers: int
    num_failed: int
    failures: dict[str, int]
    """Reason of a failure -> number of requests that failed."""
    tokens_per_s: float
    """Output tokens per second of a pass: median over repetitions."""
    tokens_per_s_range: tuple[float, float]
    first_token: Spread
    inter_token: Spread
    """Spread over answers of the mean seconds between tokens after the first."""
    inter_chunk: Spread
    total: Spread
    tokens_per_round: float | None
    speedup: float | None
    """Mean answer time with speculation off, divided by this contender's, on the same requests: median over
    repetitions. None if speculation off was not measured. In a closed loop it cannot exceed the acceptance length:
    if the measured value does, this is None, and `doubt` gives the reason."""
    identical: float | None
    """Share of greedy texts that are equal to those with speculation off."""
    reused: float | None
    """Share of prompt tokens that the server found in its cache."""
    client_cpu: float
    """CPU seconds of this client per second of wall time; 1.0 is one full core."""
    late: Spread
    """Spread of the client-side delay between due time and sending, in seconds."""
    lossless: bool = True
    """False if any answer was reported as not lossless, e.g. with mocked acceptance."""
    doubt: str | None = None
    """Reason not to trust the speed-up (machine busy, too few tokens), or None."""


class ServingBench:
    """Measures every contender (a server, or one setting of it) at every load: a number of requests in flight, or a
    rate of requests per second. Call `run()`, then `results()`."""

    def __init__(self, contenders: list[Contender], model: str, prompts: list[Prompt], config: ServingConfig) -> None:
        self.contenders, self.config, self._model, self._prompts = contenders, config, model, prompts
        self.loads = [*(Arrivals(None, count) for count in config.closed), *map(Arrivals, config.rates)]
        self.passes = {(load, contender.name): list[Pass]() for load in self.loads for contender in contenders}

    def num_requests(self, load: Arrivals) -> int:
        if self.config.num_requests:
            return self.config.num_requests
        least = math.ceil(OPEN_SECONDS * load.rate) if load.rate else ROUNDS_OF_REQUESTS * (load.concurrency or 1)
        return max(least, len(self._prompts))

    @property
    def num_answers(self) -> int:
        """Number of requests that `run` sends, which is the length of its progress bar."""
        return self.config.repeat * len(self.contenders) * sum(self.num_requests(load) for load in self.loads)

    def run(
        self,
        on_answer: Callable[[Arrivals, str], None] = ignore,
        on_pass: Callable[[Arrivals, str, Pass], None] = ignore,
    ) -> None:
        """Send all requests `repeat` times at each load. At each load the contenders run one after the other; every
        second time their order is reversed. `on_answer(load, name)` is called after each answer of the contender
        `name`, and `on_pass(load, name, timed_pass)` after each pass over all requests."""
        try:
            for contender in self.contenders:
                self._warm_up(contender)
            for number in range(self.config.repeat):
                for place, load in enumerate(self.loads):
                    for contender in self.contenders[:: -1 if (number + place) % 2 else 1]:
                        on_each = partial(on_answer, load, contender.name)
                        done = self._pass(contender, load, self.config.max_tokens, number, on_each)
                        self.passes[load, contender.name].append(done)
                        on_pass(load, contender.name, done)
        finally:
            for contender in self.contenders:
                contender.client.close()

    def _pass(
        self, contender: Contender, load: Arrivals, max_tokens: int, number: int, on_answer: Callable[[], None] = ignore
    ) -> Pass:
        requests = self._requests(contender, self.num_requests(load), max_tokens)
        before = _steps(contender.client)
        began, cpu_began = time.perf_counter(), time.process_time()
        due = None
        if load.rate:
            due = [began + offset_s for offset_s in poisson(load.rate, len(requests), self.config.seed + number)]
        streams = send_all(contender.client, requests, load.concurrency, due, on_answer)
        wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
        spans = [(key, *spent, *before.get(key, (0, 0.0))) for key, spent in _steps(contender.client).items()]
        steps = [[*key, count - old, seconds - old_s] for key, count, seconds, old, old_s in spans if count > old]
        return Pass(wall_s, cpu_s, [read_answer(stream, began) for stream in streams], steps)

    def _warm_up(self, contender: Contender) -> None:
        """Send the first requests for short answers, at no rate: a whole pass would take as long as it measures."""
        load = self.loads[0]
        number = min(self.num_requests(load), max(WARM_UP_REQUESTS, load.concurrency or 0))
        requests = self._requests(contender, number, WARM_UP_TOKENS)
        send_all(contender.client, requests, load.concurrency or len(requests), None, ignore)

    def _requests(self, contender: Contender, count: int, max_tokens: int) -> list[tuple[str, bytes]]:
        fields = {"model": self._model} | ({"ignore_eos": True} if self.config.ignore_eos else {}) | contender.fields
        prompts = [self._prompts[index % len(self._prompts)] for index in range(count)]
        return [api_request(prompt, index, self.config, max_tokens, fields) for index, prompt in enumerate(prompts)]

    def results(self) -> list[ServingResult]:
        return [self._result(load, name) for load, name in self.passes if self.passes[load, name]]

    def _result(self, load: Arrivals, name: str) -> ServingResult:
        passes, baseline = self.passes[load, name], self.passes.get((load, BASELINE), [])
        answers = [answer for run in passes for answer in run.answers]
        whole = [answer for answer in answers if not answer.error]
        rates = [run.tokens_per_s for run in passes]
        num_prompt = sum(answer.num_prompt for answer in whole)
        measured, acceptance_length = _speedup(passes, baseline), tokens_per_round(whole)
        most = None if load.rate or name == BASELINE else acceptance_length
        num_tokens = sum(answer.num_tokens for answer in whole)
        return ServingResult(
            load=load,
            speculate=name,
            num_answers=len(answers),
            num_failed=len(answers) - len(whole),
            failures=dict(Counter(answer.error for answer in answers if answer.error).most_common()),
            tokens_per_s=statistics.median(rates),
            tokens_per_s_range=(min(rates), max(rates)),
            first_token=Spread.of([answer.first_s for answer in whole]),
            inter_token=Spread.of([answer.inter_token_s for answer in whole if answer.inter_token_s is not None]),
            inter_chunk=Spread.of([gap for answer in whole for gap in answer.chunk_gaps_s]),
            total=Spread.of([answer.total_s for answer in whole]),
            tokens_per_round=acceptance_length,
            speedup=possible_speedup(measured, most),
            identical=_identical(passes, baseline) if self.config.temperature == 0 else None,
            reused=sum(answer.num_reused for answer in whole) / num_prompt if num_prompt else None,
            client_cpu=sum(run.client_cpu_s for run in passes) / sum(run.wall_s for run in passes),
            late=Spread.of([answer.late_s for answer in whole]),
            lossless=all(answer.lossless for answer in whole),
            doubt=None if name == BASELINE or measured is None else doubt(measured, most, num_tokens),
        )


def _steps(client: Client) -> dict[tuple[str, int], tuple[int, float]]:
    """Return (kind, size) -> (count, seconds) of the steps of a paceline server's engine; {} for other servers."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        steps = json.loads(client.get("/steps").body)["steps"]
        return {(kind, size): (count, seconds) for kind, size, count, seconds in steps}
    return {}


def api_request(
    prompt: Prompt, index: int, config: ServingConfig | LatencyConfig, max_tokens: int, fields: dict[str, Any]
) -> tuple[str, bytes]:
    """Return (API path, JSON body) of a streamed request for this prompt, with the seed `config.seed + index`.
    `fields`: further fields of the body, such as the model's name."""
    path, own = prompt.api_request()
    options = {"max_tokens": max_tokens, "temperature": config.temperature, "seed": config.seed + index}
    body = {"stream": True, "stream_options": {"include_usage": True}, **options, **fields, **own}
    return path, json.dumps(body).encode()


def send_all(
    client: Client,
    requests: Sequence[tuple[str, bytes]],
    concurrency: int | None,
    due: Sequence[float] | None,
    on_answer: Callable[[], None],
) -> list[Stream]:
    """Send requests, each an (API path, JSON body) pair, and return their responses in the same order. `on_answer`:
    called after each response.

    - Closed loop (`due` is None): `concurrency` requests are in flight at any time.
    - Open loop: `due` has the time to send each request, a value of time.perf_counter. Requests do not wait for earlier
      ones, and `concurrency` is ignored."""

    def send(index: int, due_s: float | None = None) -> Stream:
        stream = client.post(*requests[index], due_s)
        on_answer()
        return stream

    with ThreadPoolExecutor(concurrency if due is None else len(requests)) as threads:
        try:
            if due is None:
                return list(threads.map(send, range(len(requests))))
            futures = []
            for index, due_s in enumerate(due):
                time.sleep(max(due_s - time.perf_counter(), 0))
                futures.append(threads.submit(send, index, due_s))
            return [future.result() for future in futures]
        except BaseException:  # Ctrl-C: do not wait for requests in flight
            threads.shutdown(wait=False, cancel_futures=True)
            client.close()
            raise


def _speedup(passes: list[Pass], baseline: list[Pass]) -> float | None:
    pairs = [(theirs.mean_total_s, ours.mean_total_s) for theirs, ours in zip(baseline, passes, strict=False)]
    ratios = [theirs / ours for theirs, ours in pairs if theirs and ours]
    return statistics.median(ratios) if ratios else None


def _identical(passes: list[Pass], baseline: list[Pass]) -> float | None:
    same = [
        ours.text == theirs.text
        for one, other in zip(passes, baseline, strict=False)
        for ours, theirs in zip(one.answers, other.answers, strict=True)
        if not ours.error and not theirs.error
    ]
    return sum(same) / len(same) if same else None


def read_answer(stream: Stream, began_s: float = 0.0) -> Answer:
    """Parse the streamed response to a chat or text completion. A failed, invalid or incomplete response gives an
    Answer with `error`. `began_s`: start of the pass, a value of time.perf_counter; the result's `due_s` is relative to
    it."""
    if stream.failure:
        return Answer(error=stream.failure)
    if stream.status != 200:
        return Answer(error=f"status {stream.status}: {error_text(stream.body)}")
    events = list(stream.events())
    if not events or events[-1][1] != DONE:
        return Answer(error="the stream ended early")
    due_s = stream.due_s
    answer = Answer(total_s=stream.ended_s - due_s, due_s=due_s - began_s, late_s=stream.sent_s - due_s)
    times: list[float] = []
    has_ended = False
    for when, data in events[:-1]:
        try:
            chunk = json.loads(data)
        except (ValueError, RecursionError):
            return Answer(error="an event of the stream is no JSON")
        if "error" in chunk:
            return Answer(error=error_text(data))
        for choice in chunk.get("choices") or ():
            has_ended = has_ended or choice.get("finish_reason") is not None
            if text := _text(choice):
                answer.text += text
                times.append(when)
        _count(answer, chunk)
    if not has_ended:
        return Answer(error="the stream ended without a finish reason")
    answer.num_tokens = answer.num_tokens or len(times)
    answer.first_s = (times[0] if times else stream.ended_s) - stream.due_s
    answer.chunk_gaps_s = [later - sooner for sooner, later in pairwise(times)]
    return answer


def _text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta") or {}
    return delta.get("content") or delta.get("reasoning_content") or choice.get("text") or ""


def _count(answer: Answer, chunk: dict[str, Any]) -> None:
    answer.lossless = answer.lossless and chunk.get("lossless") is not False
    usage = chunk.get("usage")
    if usage:
        answer.num_prompt, answer.num_tokens = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
        answer.num_reused = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    answer.timings = chunk.get("timings") or answer.timings
    speculation = (chunk.get("metrics") or {}).get("speculative_decoding")
    if speculation:
        answer.accepted_histogram = list(speculation.get("acceptance_histogram") or ())
        answer.num_rounds = sum(answer.accepted_histogram)
        answer.num_accepted = speculation.get("num_accepted_draft_tokens")
        answer.num_drafted = speculation.get("num_draft_tokens")
        answer.rounds_by_source = speculation.get("rounds_by_source") or {}


def tokens_per_round(answers: Sequence[Answer]) -> float | None:
    """Return the acceptance length (mean tokens per round) over all answers; None if the server reports no rounds."""
    counts = [
        (answer.num_accepted, answer.num_rounds)
        for answer in answers
        if answer.num_accepted is not None and answer.num_rounds
    ]
    num_rounds = sum(rounds for _, rounds in counts)
    return 1 + sum(accepted for accepted, _ in counts) / num_rounds if num_rounds else None
