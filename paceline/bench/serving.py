"""A server under load: the same requests at each load, with speculation off and on taking turns.

    paceline bench serving --concurrency 1,4 --limit 8

A closed loop keeps a number of requests in flight; an open loop sends them at random times (Poisson) whatever becomes of
those before, as users do. Nothing here imports PyTorch: the client shares the processor with the server it measures.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from paceline.bench.client import Client, Stream
from paceline.bench.config import WARM_UP_TOKENS, ServingConfig
from paceline.bench.serving_figures import Answer, read_answer, tokens_per_round
from paceline.figures import Spread
from paceline.progress import ignore
from paceline.prompts import Prompt
from paceline.simulate.arrivals import poisson

BASELINE = "off"
ROUNDS_OF_REQUESTS = 4
"""A closed loop's requests for each one in flight, when the prompts are fewer."""
OPEN_SECONDS = 10.0
"""How long an open loop sends, at least."""


@dataclass(frozen=True, slots=True)
class Load:
    """Either of the two."""

    concurrency: int | None = None
    rate: float | None = None

    def __str__(self) -> str:
        return f"{self.concurrency} in flight" if self.concurrency else f"{self.rate:g} per second"


@dataclass(frozen=True, slots=True)
class Contender:
    """A server, or a way to ask it."""

    name: str
    client: Client
    fields: dict[str, Any] = field(default_factory=dict)
    """Added to each request."""


@dataclass(slots=True)
class Pass:
    """All requests of one load to one contender, once."""

    wall_s: float
    client_cpu_s: float
    answers: list[Answer]

    @property
    def tokens_per_s(self) -> float:
        return sum(each.num_tokens for each in self.answers if not each.error) / self.wall_s

    @property
    def mean_total_s(self) -> float | None:
        """None when nothing was answered."""
        totals = [each.total_s for each in self.answers if not each.error]
        return statistics.fmean(totals) if totals else None


@dataclass(slots=True)
class ServingResult:
    """The figures of one load and contender. Times in seconds, over the answers of all repetitions."""

    load: Load
    speculate: str
    num_answers: int
    num_failed: int
    failures: dict[str, int]
    """Reason -> how often."""
    tokens_per_s: float
    """Output tokens over the wall time of a pass: median over repetitions."""
    tokens_per_s_range: tuple[float, float]
    first_token: Spread
    inter_token: Spread
    """Of each answer's mean time between tokens after the first."""
    inter_chunk: Spread
    total: Spread
    tokens_per_round: float | None
    speedup: float | None
    """Mean time of an answer with speculation off over the one here, the same requests: median over repetitions."""
    identical: float | None
    """Greedy: share of texts that equal those with speculation off."""
    reused: float | None
    """Share of prompt tokens that the server did not compute again."""
    client_cpu: float
    """Share of one core that this client took."""
    late: Spread
    """How late requests were sent."""


class ServingBench:
    """Requests, contenders, and the passes run so far. `run()`, then `results()`."""

    def __init__(self, contenders: list[Contender], model: str, prompts: list[Prompt], config: ServingConfig) -> None:
        self.contenders, self.config, self._model, self._prompts = contenders, config, model, prompts
        self.loads = [Load(concurrency=each) for each in config.closed] + [Load(rate=each) for each in config.rates]
        self.passes: dict[tuple[Load, str], list[Pass]] = {(load, each.name): [] for load in self.loads for each in contenders}

    def num_requests(self, load: Load) -> int:
        """Of one pass."""
        if self.config.num_requests:
            return self.config.num_requests
        least = math.ceil(OPEN_SECONDS * load.rate) if load.rate else ROUNDS_OF_REQUESTS * (load.concurrency or 1)
        return max(least, len(self._prompts))

    @property
    def num_answers(self) -> int:
        """Answers that `run` will ask for: the length of its progress bar."""
        return self.config.repeat * len(self.contenders) * sum(self.num_requests(load) for load in self.loads)

    def run(
        self,
        on_answer: Callable[[Load, str], None] = ignore,
        on_pass: Callable[[Load, str, Pass], None] = ignore,
    ) -> None:
        """All loads, `repeat` times; at each load the contenders follow one another, in an order that turns around."""
        try:
            for contender in self.contenders:
                self._pass(contender, self.loads[0], WARM_UP_TOKENS, 0)
            for number in range(self.config.repeat):
                for place, load in enumerate(self.loads):
                    for contender in self.contenders[:: -1 if (number + place) % 2 else 1]:
                        told = partial(on_answer, load, contender.name)
                        done = self._pass(contender, load, self.config.max_tokens, number, told)
                        self.passes[load, contender.name].append(done)
                        on_pass(load, contender.name, done)
        finally:
            for contender in self.contenders:
                contender.client.close()

    def _pass(
        self, contender: Contender, load: Load, max_tokens: int, number: int, on_answer: Callable[[], None] = ignore
    ) -> Pass:
        requests = [self._request(index, contender.fields, max_tokens) for index in range(self.num_requests(load))]
        began, cpu_began = time.perf_counter(), time.process_time()

        def send(index: int, due_s: float | None = None) -> Stream:
            path, body = requests[index]
            stream = contender.client.post(path, body, due_s)
            on_answer()
            return stream

        with ThreadPoolExecutor(load.concurrency or len(requests)) as threads:
            try:
                if load.rate:
                    due = [began + each for each in poisson(load.rate, len(requests), self.config.seed + number)]
                    streams = _open_loop(threads, send, due)
                else:
                    streams = list(threads.map(send, range(len(requests))))
            except BaseException:  # Ctrl-C: what is under way need not end
                threads.shutdown(wait=False, cancel_futures=True)
                contender.client.close()
                raise
        wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
        return Pass(wall_s, cpu_s, [read_answer(each, began) for each in streams])

    def _request(self, index: int, fields: dict[str, Any], max_tokens: int) -> tuple[str, bytes]:
        """Path and body of a pass's request; prompts begin again when they are fewer."""
        prompt = self._prompts[index % len(self._prompts)]
        body: dict[str, Any] = {
            "model": self._model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": max_tokens,
            "temperature": self.config.temperature,
            "seed": self.config.seed + index,
            **({"ignore_eos": True} if self.config.ignore_eos else {}),
            **fields,
        }
        if prompt.token_ids:
            return "/v1/completions", json.dumps(body | {"prompt": list(prompt.token_ids)}).encode()
        return "/v1/chat/completions", json.dumps(body | {"messages": prompt.messages}).encode()

    def results(self) -> list[ServingResult]:
        """One for each load and contender that has run."""
        return [self._result(load, name) for load, name in self.passes if self.passes[load, name]]

    def _result(self, load: Load, name: str) -> ServingResult:
        passes, baseline = self.passes[load, name], self.passes.get((load, BASELINE), [])
        answers = [answer for each in passes for answer in each.answers]
        whole = [answer for answer in answers if not answer.error]
        rates = [each.tokens_per_s for each in passes]
        num_prompt = sum(each.num_prompt for each in whole)
        return ServingResult(
            load=load,
            speculate=name,
            num_answers=len(answers),
            num_failed=len(answers) - len(whole),
            failures=dict(Counter(answer.error for answer in answers if answer.error).most_common()),
            tokens_per_s=statistics.median(rates),
            tokens_per_s_range=(min(rates), max(rates)),
            first_token=Spread.of([each.first_s for each in whole]),
            inter_token=Spread.of([each.inter_token_s for each in whole if each.inter_token_s is not None]),
            inter_chunk=Spread.of([gap for each in whole for gap in each.chunk_gaps_s]),
            total=Spread.of([each.total_s for each in whole]),
            tokens_per_round=tokens_per_round(whole),
            speedup=_speedup(passes, baseline),
            identical=_identical(passes, baseline) if self.config.temperature == 0 else None,
            reused=sum(each.num_reused for each in whole) / num_prompt if num_prompt else None,
            client_cpu=sum(each.client_cpu_s for each in passes) / sum(each.wall_s for each in passes),
            late=Spread.of([each.late_s for each in whole]),
        )


def _open_loop(threads: ThreadPoolExecutor, send: Callable[[int, float], Stream], due: list[float]) -> list[Stream]:
    sent = []
    for index, due_s in enumerate(due):
        time.sleep(max(due_s - time.perf_counter(), 0))
        sent.append(threads.submit(send, index, due_s))
    return [each.result() for each in sent]


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
