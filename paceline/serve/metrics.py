"""What a server counts, for Prometheus: vLLM's names where vLLM has one, `paceline:*` for the rest.

The engine's thread calls `step`, `chunk` and `finished`; these add to plain numbers, a few microseconds a step, and take no
lock. Only a scrape (`render`) turns them into prometheus-client's families: totals, histograms by bucket, and what the engine
is doing right now. No series is labelled by what a client sends: tags stand in the traces (`serve/traces.py`).
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, Protocol

try:
    from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
    from prometheus_client.exposition import CONTENT_TYPE_LATEST
    from prometheus_client.registry import Collector
except ImportError as error:
    from paceline.errors import ConfigError

    raise ConfigError("metrics need prometheus-client: pip install 'paceline[serve]'") from error

from paceline.engine.engine import Engine
from paceline.types import Sequence

Outcome = Literal["stop", "length", "abort", "error"]
OUTCOMES: tuple[Outcome, ...] = ("stop", "length", "abort", "error")
REQUEST_BOUNDS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0,
)  # fmt: skip
TOKEN_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.04, 0.06, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)
MOST_DRAFTED = 16
"""Wider drafts share the last bucket; their tokens count all the same."""


class TraceCounts(Protocol):
    """What a scrape asks of the writer of traces."""

    @property
    def written(self) -> int: ...

    @property
    def dropped(self) -> Mapping[str, int]: ...


class _Histogram:
    """Counts by bucket; one writer."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


@dataclass(slots=True)
class _Request:
    """What was seen of a request so far."""

    prefill_s: float = 0.0
    last_s: float = 0.0
    """When its latest tokens came; 0 before the first."""


@dataclass(slots=True)
class _Totals:
    """Counters since the server began, by the name they are exported with."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    steps: int = 0
    rounds: int = 0
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    host_seconds: float = 0.0
    worker_restarts: int = 0
    finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))


class Metrics:
    """Counts for one model. One thread calls everything but `refused` and `render`, which any thread may."""

    def __init__(self, model: str, traces: TraceCounts | None = None) -> None:
        """`model` is the label model_name; `traces` is asked for its own counts at every scrape."""
        self.registry = CollectorRegistry()
        self.totals = _Totals()
        self.engine: Engine | None = None
        """The one that stepped last, for the gauges."""
        self.rounds: dict[tuple[int, int], int] = {}
        """(drafted, accepted) -> rounds of single requests. All figures of speculation follow from it."""
        self.refusals: Counter[str] = Counter()
        self.first_token, self.queue, self.prefill = (_Histogram(REQUEST_BOUNDS) for _ in range(3))
        self.decode, self.whole = _Histogram(REQUEST_BOUNDS), _Histogram(REQUEST_BOUNDS)
        self.between_chunks, self.per_token = _Histogram(TOKEN_BOUNDS), _Histogram(TOKEN_BOUNDS)
        self._open: dict[Sequence, _Request] = {}
        self._unsplit_s = 0.0
        """Time of the latest step besides drafting and verifying, as far as it is not known to be prefill."""
        self._lock = threading.Lock()
        self.registry.register(_Exposition(self, model, traces))
        ProcessCollector(registry=self.registry)

    def step(self, engine: Engine, seconds: float) -> None:
        """`engine.step()` took `seconds`. To be called before the step's chunks are reported."""
        self._settle_host()
        self.engine, totals = engine, self.totals
        totals.steps += 1
        self._unsplit_s += seconds
        if engine.scheduler.prefilling:  # a prompt that is done is seen by its first chunk
            self._count_prefill(engine.scheduler.prefilling[0])
        rounds = self.rounds
        for stats in engine.rounds:
            totals.rounds += 1
            totals.draft_seconds += stats.draft_s
            totals.verify_seconds += stats.verify_s
            self._unsplit_s -= stats.draft_s + stats.verify_s
            for pair in zip(stats.num_drafted_B, stats.num_accepted_B, strict=True):
                rounds[pair] = rounds.get(pair, 0) + 1

    def chunk(self, sequence: Sequence, num_tokens: int, now: float) -> None:
        """Tokens of a request went to its client at `now` (perf_counter)."""
        self.totals.generation_tokens += num_tokens
        request = self._open.get(sequence)
        if request is None or not request.last_s:
            request = self._count_prefill(sequence)
            self._count_prompt(sequence, now)
        elif now != request.last_s:  # a first token and the round behind it leave in one step
            self.between_chunks.observe(now - request.last_s)
        request.last_s = now

    def finished(self, sequence: Sequence, outcome: Outcome, tag: str | None = None) -> None:
        """A request is done with; every request that ever had a chunk ends here. `tag` labels nothing: clients choose it.

        Times of whole requests are those of answers that came to their end, not of those broken off.
        """
        self._count_prefill(sequence)
        del self._open[sequence]
        self._settle_host()
        self.totals.finished[outcome] += 1
        if outcome not in ("stop", "length"):
            return
        times = sequence.timings
        now = time.perf_counter()
        self.whole.observe(now - times.arrival_s)
        self.queue.observe(times.queue_s)
        self.prefill.observe(times.prefill_s)
        self.decode.observe(now - times.first_token_s)
        if sequence.num_output > 1:
            self.per_token.observe((times.token_s[-1] - times.first_token_s) / (sequence.num_output - 1))

    def refused(self, reason: str) -> None:
        """A request was turned away; `reason` is one of the server's own few words."""
        with self._lock:
            self.refusals[reason] += 1

    def crashed(self) -> None:
        """The engine is gone; a new one will follow."""
        self.totals.worker_restarts += 1
        self.engine = None
        self._open.clear()

    def render(self) -> tuple[bytes, str]:
        """Body and content type of /metrics."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def _count_prompt(self, sequence: Sequence, now: float) -> None:
        self.totals.prompt_tokens += sequence.prompt_len
        self.totals.prefix_cache_queries += sequence.prompt_len
        self.totals.prefix_cache_hits += sequence.num_reused
        self.first_token.observe(now - sequence.timings.arrival_s)

    def _count_prefill(self, sequence: Sequence) -> _Request:
        """Prefill time of a request that was not counted yet."""
        request = self._open.setdefault(sequence, _Request())
        new_s = sequence.timings.prefill_s - request.prefill_s
        request.prefill_s += new_s
        self.totals.prefill_seconds += new_s
        self._unsplit_s -= new_s
        return request

    def _settle_host(self) -> None:
        """What is left of the latest step is the host's; a remainder below zero is prefill that was reported late."""
        if self._unsplit_s > 0:
            self.totals.host_seconds += self._unsplit_s
            self._unsplit_s = 0.0

    def copy_of_refusals(self) -> dict[str, int]:
        with self._lock:
            return dict(self.refusals)


@dataclass(frozen=True, slots=True, eq=False)
class _Exposition(Collector):
    """The numbers of `Metrics` as Prometheus families, made anew at every scrape."""

    metrics: Metrics
    model: str
    traces: TraceCounts | None

    def collect(self) -> Iterator[Metric]:
        yield from self._requests()
        yield from self._times()
        yield from self._speculation()
        yield from self._now()
        yield from self._ours()

    def _requests(self) -> Iterator[Metric]:
        totals = self.metrics.totals
        yield self._counter("vllm:prompt_tokens", "Prompt tokens of requests that got a first token", totals.prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Tokens sent", totals.generation_tokens)
        queries, hits = totals.prefix_cache_queries, totals.prefix_cache_hits
        yield self._counter("vllm:prefix_cache_queries", "Prompt tokens looked for in the cache", queries)
        yield self._counter("vllm:prefix_cache_hits", "Prompt tokens taken over instead of computed", hits)
        yield self._counters("vllm:request_success", "Requests by how they ended", "finished_reason", totals.finished)

    def _times(self) -> Iterator[Metric]:
        metrics = self.metrics
        for name, doc, histogram in (
            ("time_to_first_token", "From arrival to the first token", metrics.first_token),
            ("inter_token_latency", "Between two chunks of an answer, of one token or more", metrics.between_chunks),
            ("request_time_per_output_token", "Mean of an answer's tokens after the first", metrics.per_token),
            ("e2e_request_latency", "From arrival to the end", metrics.whole),
            ("request_queue_time", "Waiting for a place in the cache", metrics.queue),
            ("request_prefill_time", "Computing the prompt", metrics.prefill),
            ("request_decode_time", "From the first token to the end", metrics.decode),
        ):
            counts = [*histogram.counts]
            yield self._histogram(f"vllm:{name}_seconds", doc, histogram.bounds, counts, histogram.sum)

    def _speculation(self) -> Iterator[Metric]:
        rounds = self.metrics.rounds.copy()  # one call, so that the engine's thread cannot come between
        drafted, accepted = Counter[int](), Counter[int]()
        for (num_drafted, num_accepted), count in rounds.items():
            drafted[num_drafted] += count
            accepted[num_accepted] += count
        tokens = Counter({1 + number: count for number, count in accepted.items()})
        most = max(MOST_DRAFTED, *drafted) if drafted else MOST_DRAFTED
        reached = [sum(count for number, count in accepted.items() if number > place) for place in range(most)]
        places = {str(place): count for place, count in enumerate(reached)}
        name = "vllm:spec_decode_num"
        yield self._counter(f"{name}_drafts", "Rounds with drafts, request by request", drafted.total() - drafted[0])
        yield self._counter(f"{name}_draft_tokens", "Drafted tokens", _sum(drafted))
        yield self._counter(f"{name}_accepted_tokens", "Drafted tokens that stood", _sum(accepted))
        yield self._counters(f"{name}_accepted_tokens_per_pos", "Those by place in the draft", "position", places)
        yield self._counted("paceline:draft_width", "Drafted tokens of a round, request by request", 0, drafted)
        yield self._counted("paceline:tokens_per_round", "Tokens a round brought, request by request", 1, tokens)

    def _now(self) -> Iterator[Metric]:
        engine, num_running, num_waiting, usage = self.metrics.engine, 0, 0, 0.0
        if engine is not None:
            cache, scheduler = engine.target.cache, engine.scheduler
            num_running = len(scheduler.running) + len(scheduler.prefilling)
            num_waiting = len(scheduler.waiting)
            usage = sum(cache.lengths) / (cache.num_rows * cache.max_len)
        yield self._gauge("vllm:num_requests_running", "Requests in prefill or decoding", num_running)
        yield self._gauge("vllm:num_requests_waiting", "Requests without a place in the cache", num_waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Part of the cache's positions in use; 1 is full", usage)

    def _ours(self) -> Iterator[Metric]:
        totals = self.metrics.totals
        yield self._counter("paceline:steps", "Engine steps", totals.steps)
        yield self._counter("paceline:rounds", "Decode rounds, each of all running requests", totals.rounds)
        yield self._counter("paceline:prefill_seconds", "Computing prompts", totals.prefill_seconds)
        yield self._counter("paceline:draft_seconds", "Drafting", totals.draft_seconds)
        yield self._counter("paceline:verify_seconds", "The target's pass over drafts, and the choice", totals.verify_seconds)
        yield self._counter("paceline:host_seconds", "The rest of the engine's steps", totals.host_seconds)
        yield self._counter("paceline:worker_restarts", "Engines that failed and were replaced", totals.worker_restarts)
        yield self._counters("paceline:refused", "Requests turned away", "reason", self.metrics.copy_of_refusals())
        written, dropped = (self.traces.written, dict(self.traces.dropped)) if self.traces else (0, {})
        yield self._counter("paceline:traces_written", "Traces on disk", written)
        yield self._counters("paceline:traces_dropped", "Traces lost", "reason", dropped)

    def _counter(self, name: str, doc: str, value: float) -> Metric:
        family = CounterMetricFamily(name, doc, labels=["model_name"])
        family.add_metric([self.model], value)
        return family

    def _counters(self, name: str, doc: str, label: str, values: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(name, doc, labels=["model_name", label])
        for key, value in values.items():
            family.add_metric([self.model, key], value)
        return family

    def _gauge(self, name: str, doc: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, doc, labels=["model_name"])
        family.add_metric([self.model], value)
        return family

    def _histogram(self, name: str, doc: str, bounds: Iterable[float], counts: list[int], total: float) -> Metric:
        """`counts`: one number a bound, and one of what is above them all."""
        family = HistogramMetricFamily(name, doc, labels=["model_name"])
        names = [*map(str, bounds), "+Inf"]
        family.add_metric([self.model], list(zip(names, accumulate(counts), strict=True)), total)
        return family

    def _counted(self, name: str, doc: str, first: int, values: Counter[int]) -> Metric:
        """A histogram of whole numbers, a bucket each."""
        bounds = range(first, first + MOST_DRAFTED + 1)
        counts = [values[bound] for bound in bounds]
        return self._histogram(name, doc, map(float, bounds), [*counts, values.total() - sum(counts)], _sum(values))


def _sum(values: Counter[int]) -> int:
    return sum(number * count for number, count in values.items())
