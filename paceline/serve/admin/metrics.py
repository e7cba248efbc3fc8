"""What a server counts, for Prometheus: vLLM's names where vLLM has one, `paceline:*` for the rest.

The engine's thread calls `step`, `chunk` and `finished`; these add to plain numbers, a few microseconds a step, and take no
lock. Only a scrape (`render`) turns them into prometheus-client's families: totals, histograms by bucket, and what the engine
is doing right now. No series is labelled by what a client sends: tags stand in the traces (`serve/admin/traces.py`).
"""

from __future__ import annotations

import json
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, get_args

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from paceline.lossy import LOSSY, Ledger
from paceline.serve.admin.drafter_counts import DrafterCounts
from paceline.serve.worker.engine import Engine
from paceline.types import LOOKUP, NONE, FinishReason, RoundStats, Sequence

if TYPE_CHECKING:  # pyarrow is only needed where traces are
    from paceline.serve.admin.traces import TraceWriter

TOLD: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
TOTALS, TIMES, BOUNDS = TOLD["totals"], TOLD["times"], TOLD["bounds"]
MOST_DRAFTED = 16
"""Wider drafts share the last bucket; their tokens count all the same."""


class _Histogram:
    """Counts by bucket; one writer."""

    def __init__(self, bounds: list[float]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Metrics(Collector):
    """Counts for one model, told by the worker what it does. One thread calls everything but `refused` and `render`, which any
    thread may."""

    def __init__(self, model: str, traces: TraceWriter | None = None, *, lossless: bool = True) -> None:
        """`model` is the label model_name; `traces` is offered each request that ends, and its own counts are shown too. Every
        series of what is not `lossless` has a label that says so."""
        self.lossless = lossless
        self.registry = CollectorRegistry()
        self.totals = SimpleNamespace(**{name: 0 for names in TOTALS.values() for name in names})
        self.ended: dict[str, int] = dict.fromkeys(get_args(FinishReason), 0)
        self.engine: Engine | None = None
        """The one that stepped last, for the gauges."""
        self.rounds: dict[tuple[int, int], int] = {}
        """(drafted, accepted) -> rounds of single requests. All figures of speculation follow from it; none of a lossy rule is
        in it."""
        self.step_times: dict[tuple[str, int], tuple[int, float]] = {}
        """(kind, size) -> how often, and seconds in all: "verify" by positions of the target's pass, "draft" by drafts of the
        longest row times the rows that drafted, "prefill" by tokens of the chunk, "step" (all of it, of size 1)."""
        self.drafters = DrafterCounts()
        self._refusals: Counter[str] = Counter()
        self._model, self._traces = model, traces
        self._times = {name: _Histogram(BOUNDS[told["bounds"]]) for name, told in TIMES.items()}
        self._open: dict[Sequence, float] = {}
        """When the latest tokens of each request under way came."""
        self._lock = threading.Lock()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def step(self, engine: Engine, seconds: float) -> None:
        """An engine step, with what lay between it and the one before, took `seconds`; to be called before its chunks are
        reported."""
        self.engine, totals, (num_read, read_s) = engine, self.totals, engine.read
        totals.steps += 1
        totals.prefill_seconds += read_s
        host_s, rounds = seconds - read_s, self.rounds
        self._time("step", 1, seconds)
        self._time("prefill", num_read, read_s)
        for stats in engine.rounds:
            totals.rounds += 1
            totals.draft_seconds += stats.draft_s
            totals.verify_seconds += stats.verify_s
            host_s -= stats.draft_s + stats.verify_s
            self._time("verify", len(stats.num_drafted_B) + sum(stats.num_checked_B), stats.verify_s)
            self._time("draft", _num_slots(stats), stats.draft_s)
            names = stats.drafter_B or [""] * len(stats.num_drafted_B)
            for name, *pair in zip(names, stats.num_drafted_B, stats.num_accepted_B, strict=True):
                if name == LOSSY:
                    totals.lossy_rounds += 1
                else:
                    key = pair[0], pair[1]
                    rounds[key] = rounds.get(key, 0) + 1
            self.drafters.round(stats)
        totals.host_seconds += host_s

    def _time(self, kind: str, size: int, seconds: float) -> None:
        if size:
            count, before_s = self.step_times.get((kind, size), (0, 0.0))
            self.step_times[kind, size] = count + 1, before_s + seconds

    def chunk(self, sequence: Sequence, num_tokens: int, now: float) -> None:
        """A request gained tokens at `now` (perf_counter)."""
        self.totals.generation_tokens += num_tokens
        last_at = self._open.get(sequence)
        if last_at is None:
            self.totals.prompt_tokens += sequence.prompt_len
            self.totals.prefix_cache_queries += sequence.prompt_len
            self.totals.prefix_cache_hits += sequence.num_reused
            self._times["time_to_first_token"].observe(now - sequence.timings.arrival_s)
        elif now != last_at:  # a first token and the round behind it leave in one step
            self._times["inter_token_latency"].observe(now - last_at)
        self._open[sequence] = now

    def finished(self, sequence: Sequence, outcome: FinishReason, tag: str | None = None) -> None:
        """Every request that ever had a chunk ends here. `tag` labels nothing: clients choose it.

        Times of whole requests are those of answers that came to their end, not of those broken off.
        """
        self._open.pop(sequence, None)
        self.ended[outcome] += 1
        self.drafters.finished(sequence)
        if sequence.ledger:
            self._lossy(sequence, sequence.ledger)
        if outcome in ("stop", "length"):
            seen, times, now = self._times, sequence.timings, time.perf_counter()
            seen["e2e_request_latency"].observe(now - times.arrival_s)
            seen["request_queue_time"].observe(times.queue_s)
            seen["request_prefill_time"].observe(times.prefill_s)
            seen["request_decode_time"].observe(now - times.first_token_s)
            if sequence.num_output > 1:
                mean_s = (times.token_s[-1] - times.first_token_s) / (sequence.num_output - 1)
                seen["request_time_per_output_token"].observe(mean_s)
        if self._traces:
            self._traces.offer(sequence, outcome, tag)

    def _lossy(self, sequence: Sequence, ledger: Ledger) -> None:
        totals, spent = self.totals, ledger.spent
        totals.lossy_requests += 1
        totals.lossy_tokens += sequence.num_output
        totals.lossy_tokens_changed += spent.num_changed
        totals.lossy_total_variation += spent.tv

    def refused(self, reason: str) -> None:
        """A request was turned away before it reached the engine; `reason` is one of the server's own few words."""
        with self._lock:
            self._refusals[reason] += 1

    def crashed(self) -> None:
        self.totals.worker_restarts += 1
        self.engine = None
        self._open.clear()

    def render(self) -> tuple[bytes, str]:
        """Body and content type of /metrics."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    # A scrape, from any thread

    def collect(self) -> Iterator[Metric]:
        for family in self._families():
            if not self.lossless:
                family.samples = [each._replace(labels={**each.labels, "lossless": "false"}) for each in family.samples]
            yield family

    def _families(self) -> Iterator[Metric]:
        yield self._family("paceline:lossless", TOLD["lossless"], float(self.lossless), kind=GaugeMetricFamily)
        for prefix, totals in TOTALS.items():
            for name, doc in totals.items():
                yield self._family(f"{prefix}:{name}", doc, getattr(self.totals, name))
        yield self._family("vllm:request_success", "Requests by how they ended", self.ended, "finished_reason")
        for name, times in self._times.items():
            yield self._histogram(f"vllm:{name}_seconds", TIMES[name]["doc"], times.bounds, [*times.counts], times.sum)
        yield from self._speculation()
        yield from self._now()
        yield from self.drafters.collect(self._model, self.engine)
        with self._lock:
            refusals = dict(self._refusals)
        yield self._family("paceline:refused", "Requests turned away", refusals, "reason")
        written, dropped = (self._traces.written, dict(self._traces.dropped)) if self._traces else (0, {})
        yield self._family("paceline:traces_written", "Traces on disk", written)
        yield self._family("paceline:traces_dropped", "Traces lost", dropped, "reason")

    def _speculation(self) -> Iterator[Metric]:
        rounds = self.rounds.copy()  # one call, so that the engine's thread cannot come between
        drafted, accepted = Counter[int](), Counter[int]()
        for (num_drafted, num_accepted), count in rounds.items():
            drafted[num_drafted] += count
            accepted[num_accepted] += count
        tokens = Counter({1 + number: count for number, count in accepted.items()})
        depth = max(MOST_DRAFTED, *drafted, 0)
        places = {str(place): sum(accepted[number] for number in accepted if number > place) for place in range(depth)}
        name = "vllm:spec_decode_num"
        yield self._family(f"{name}_drafts", "Rounds with drafts, request by request", drafted.total() - drafted[0])
        yield self._family(f"{name}_draft_tokens", "Drafted tokens", _sum(drafted))
        yield self._family(f"{name}_accepted_tokens", "Drafted tokens that stood", _sum(accepted))
        yield self._family(f"{name}_accepted_tokens_per_pos", "Those by place in the draft", places, "position")
        yield self._counted("paceline:draft_width", "Drafted tokens of a round, request by request", 0, drafted)
        yield self._counted("paceline:tokens_per_round", "Tokens a round brought, request by request", 1, tokens)

    def _now(self) -> Iterator[Metric]:
        engine, num_running, num_waiting, usage = self.engine, 0, 0, 0.0
        if engine is not None:
            cache, requests = engine.target.cache, engine.scheduler
            num_running, num_waiting = len(requests.running) + len(requests.prefilling), len(requests.waiting)
            usage = sum(cache.lengths) / (cache.num_rows * cache.max_len)
        for (name, doc), value in zip(TOLD["now"].items(), (num_running, num_waiting, usage), strict=True):
            yield self._family(f"vllm:{name}", doc, value, kind=GaugeMetricFamily)

    def _family(
        self,
        name: str,
        doc: str,
        values: float | Mapping[str, float],
        label: str | None = None,
        kind: type[CounterMetricFamily | GaugeMetricFamily] = CounterMetricFamily,
    ) -> Metric:
        """One number, or one for each value of `label`."""
        family = kind(name, doc, labels=["model_name", label] if label else ["model_name"])
        for key, value in values.items() if isinstance(values, Mapping) else [(None, values)]:
            family.add_metric([self._model, key] if key is not None else [self._model], value)
        return family

    def _histogram(self, name: str, doc: str, bounds: Iterable[float], counts: list[int], total: float) -> Metric:
        """`counts`: one number a bound, and one of what is above them all."""
        family = HistogramMetricFamily(name, doc, labels=["model_name"])
        names = [*map(str, bounds), "+Inf"]
        family.add_metric([self._model], list(zip(names, accumulate(counts), strict=True)), total)
        return family

    def _counted(self, name: str, doc: str, first: int, values: Counter[int]) -> Metric:
        """A histogram of whole numbers, a bucket each."""
        bounds = range(first, first + MOST_DRAFTED + 1)
        counts = [values[bound] for bound in bounds]
        return self._histogram(name, doc, map(float, bounds), [*counts, values.total() - sum(counts)], _sum(values))


def _num_slots(stats: RoundStats) -> int:
    """Drafts that were computed, not looked up: of the longest row, for each row that drafted."""
    sure_B = stats.sure_B or [None] * len(stats.source_B)
    computed = zip(stats.num_drafted_B, stats.source_B, sure_B, strict=False)
    slots = [len(sure) if sure else count for count, source, sure in computed if sure or source not in (NONE, LOOKUP)]
    return len(slots) * max(slots, default=0)


def _sum(values: Counter[int]) -> int:
    return sum(number * count for number, count in values.items())
