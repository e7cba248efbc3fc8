"""Prometheus metrics of the server, under vLLM's names where vLLM has the metric, else `paceline:*`.

The engine's thread calls `step`, `chunk` and `finished`, which add to plain numbers without a lock, in a few
microseconds per step. Only a scrape (`render`) converts them to prometheus-client's metric families. Labels never
contain text from clients; tags are recorded in the traces (`serve/admin/traces.py`).
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

from paceline.lossy import LOSSY
from paceline.serve.admin.drafter_counts import DrafterCounts
from paceline.types import COPYING, NONE, FinishReason, RoundStats, Sequence

if TYPE_CHECKING:
    from paceline.engine.engine import Engine
    from paceline.serve.admin.traces import TraceWriter  # pyarrow is only needed where traces are

TEXTS: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""Names, descriptions and bucket bounds of the metrics."""
TOTALS, TIMES, BOUNDS = TEXTS["totals"], TEXTS["times"], TEXTS["bounds"]
MOST_DRAFTED = 16
"""Histograms of draft lengths have one bucket for each length up to this; longer drafts share the last bucket."""


class _Histogram:
    """Counts and sum of a histogram, for one writing thread."""

    def __init__(self, bounds: list[float]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Metrics(Collector):
    """Prometheus metrics of one model. Only the engine's thread may call its methods, except `refused`, `render` and
    `collect`."""

    def __init__(self, model: str, traces: TraceWriter | None = None, *, lossless: bool = True) -> None:
        """`model` is the label model_name. `traces` gets every finished request; its counts are reported too.
        Without `lossless`, every series but those of the process has the label lossless="false"."""
        self.lossless = lossless
        self.registry = CollectorRegistry()
        self.totals = SimpleNamespace(**{name: 0 for names in TOTALS.values() for name in names})
        self.ended: dict[str, int] = dict.fromkeys(get_args(FinishReason), 0)
        self.engine: Engine | None = None
        """The engine that stepped last, read for the gauges."""
        self.rounds: dict[tuple[int, int], int] = {}
        """(drafted, accepted) -> rounds, one per request in the batch, without lossy requests."""
        self.step_times: dict[tuple[str, int], tuple[int, float]] = {}
        """(phase, size) -> (count, total seconds). The size of "verify" is the number of positions in the target's
        pass, of "draft" the longest draft times the drafting rows, of "prefill" the tokens of the chunk, and of "step"
        1."""
        self.drafters = DrafterCounts()
        self._refusals: Counter[str] = Counter()
        self._model, self._traces = model, traces
        self._times = {name: _Histogram(BOUNDS[entry["bounds"]]) for name, entry in TIMES.items()}
        self._open: dict[Sequence, float] = {}
        """Running request -> time of its latest tokens (time.perf_counter)."""
        self._lock = threading.Lock()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def step(self, engine: Engine, seconds: float) -> None:
        """Count an engine step: its rounds, and the seconds of each phase. Call this before `chunk`, which counts the
        tokens of the same step. `seconds`: time since the end of the previous step or, after idling, since new work
        came."""
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

    def _time(self, phase: str, size: int, seconds: float) -> None:
        if size:
            count, before_s = self.step_times.get((phase, size), (0, 0.0))
            self.step_times[phase, size] = count + 1, before_s + seconds

    def chunk(self, sequence: Sequence, num_tokens: int, now: float) -> None:
        """Count new tokens of a request, and record their latency: the time to the first token, or since the request's
        previous tokens. `now`: time at which they were generated (time.perf_counter)."""
        self.totals.generation_tokens += num_tokens
        last_at = self._open.get(sequence)
        if last_at is None:
            self.totals.prompt_tokens += sequence.prompt_len
            self.totals.prefix_cache_queries += sequence.prompt_len
            self.totals.prefix_cache_hits += sequence.num_reused
            self._times["time_to_first_token"].observe(now - sequence.timings.arrival_s)
        elif now != last_at:  # the first token and the tokens of the next round may come in one step
            self._times["inter_token_latency"].observe(now - last_at)
        self._open[sequence] = now

    def finished(self, sequence: Sequence, outcome: FinishReason, tag: str | None = None) -> None:
        """Count a finished request and pass it to the trace writer. Call this at the end of every request that was
        passed to `chunk`. `tag`: the client's label, used only in the trace. The histograms of whole requests, such as
        their latency, leave out aborted and failed requests."""
        self._open.pop(sequence, None)
        self.ended[outcome] += 1
        self.drafters.finished(sequence)
        if sequence.ledger:
            totals, spent = self.totals, sequence.ledger.spent
            totals.lossy_requests += 1
            totals.lossy_tokens += sequence.num_output
            totals.lossy_tokens_changed += spent.num_changed
            totals.lossy_total_variation += spent.tv
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

    def refused(self, reason: str) -> None:
        """Count a request that was rejected before it reached the engine. `reason`: code of the error response."""
        with self._lock:
            self._refusals[reason] += 1

    def crashed(self) -> None:
        """Count a restart of the engine after a crash. Forgets the crashed engine and its running requests."""
        self.totals.worker_restarts += 1
        self.engine = None
        self._open.clear()

    def render(self) -> tuple[bytes, str]:
        """Return (body, content type) of the response to GET /metrics."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    # The methods below run during a scrape, in any thread.

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families, for prometheus-client."""
        for family in self._families():
            if not self.lossless:
                family.samples = [one._replace(labels={**one.labels, "lossless": "false"}) for one in family.samples]
            yield family

    def _families(self) -> Iterator[Metric]:
        yield self._family("paceline:lossless", TEXTS["lossless"], float(self.lossless), kind=GaugeMetricFamily)
        for prefix, totals in TOTALS.items():
            for name, doc in totals.items():
                yield self._family(f"{prefix}:{name}", doc, getattr(self.totals, name))
        yield self._family("vllm:request_success", "Finished requests by reason", self.ended, "finished_reason")
        for name, times in self._times.items():
            yield self._histogram(f"vllm:{name}_seconds", TIMES[name]["doc"], times.bounds, [*times.counts], times.sum)
        yield from self._speculation()
        yield from self._now()
        yield from self.drafters.collect(self._model, self.engine)
        with self._lock:
            refusals = dict(self._refusals)
        yield self._family("paceline:refused", "Rejected requests", refusals, "reason")
        written, dropped = (self._traces.written, dict(self._traces.dropped)) if self._traces else (0, {})
        yield self._family("paceline:traces_written", "Traces on disk", written)
        yield self._family("paceline:traces_dropped", "Traces lost", dropped, "reason")

    def _speculation(self) -> Iterator[Metric]:
        rounds = self.rounds.copy()  # atomic, since the engine's thread goes on writing
        drafted, accepted = Counter[int](), Counter[int]()
        for (num_drafted, num_accepted), count in rounds.items():
            drafted[num_drafted] += count
            accepted[num_accepted] += count
        tokens = Counter({1 + number: count for number, count in accepted.items()})
        depth = max(MOST_DRAFTED, *drafted, 0)
        places = {str(place): sum(accepted[number] for number in accepted if number > place) for place in range(depth)}
        name = "vllm:spec_decode_num"
        yield self._family(f"{name}_drafts", "Rounds with drafts, one per request", drafted.total() - drafted[0])
        yield self._family(f"{name}_draft_tokens", "Drafted tokens", _sum(drafted))
        yield self._family(f"{name}_accepted_tokens", "Accepted draft tokens", _sum(accepted))
        yield self._family(f"{name}_accepted_tokens_per_pos", "Accepted tokens by draft position", places, "position")
        yield self._counted("paceline:draft_width", "Drafted tokens per round and request", 0, drafted)
        yield self._counted(
            "paceline:tokens_per_round", "Tokens per round and request, with the bonus token", 1, tokens
        )

    def _now(self) -> Iterator[Metric]:
        engine, num_running, num_waiting, usage = self.engine, 0, 0, 0.0
        if engine is not None:
            cache, requests = engine.target.cache, engine.scheduler
            num_running, num_waiting = len(requests.running) + len(requests.prefilling), len(requests.waiting)
            usage = sum(cache.lengths) / (cache.num_rows * cache.max_len)
        for (name, doc), value in zip(TEXTS["now"].items(), (num_running, num_waiting, usage), strict=True):
            yield self._family(f"vllm:{name}", doc, value, kind=GaugeMetricFamily)

    def _family(
        self,
        name: str,
        doc: str,
        values: float | Mapping[str, float],
        label: str | None = None,
        kind: type[CounterMetricFamily | GaugeMetricFamily] = CounterMetricFamily,
    ) -> Metric:
        """Return a metric with one value, or with one for each value of `label`."""
        family = kind(name, doc, labels=["model_name", label] if label else ["model_name"])
        for key, value in values.items() if isinstance(values, Mapping) else [(None, values)]:
            family.add_metric([self._model, key] if key is not None else [self._model], value)
        return family

    def _histogram(self, name: str, doc: str, bounds: Iterable[float], counts: list[int], total: float) -> Metric:
        """Return a histogram; `counts` has one number per bound and one for values above all bounds."""
        family = HistogramMetricFamily(name, doc, labels=["model_name"])
        names = [*map(str, bounds), "+Inf"]
        family.add_metric([self._model], list(zip(names, accumulate(counts), strict=True)), total)
        return family

    def _counted(self, name: str, doc: str, first: int, values: Counter[int]) -> Metric:
        """Return a histogram of integers with one bucket for each."""
        bounds = range(first, first + MOST_DRAFTED + 1)
        counts = [values[bound] for bound in bounds]
        return self._histogram(name, doc, map(float, bounds), [*counts, values.total() - sum(counts)], _sum(values))


def _num_slots(stats: RoundStats) -> int:
    """Return the draft positions a drafter computed: the longest row's times the drafting rows, without copied
    drafts."""
    confidence_B = stats.confidence_B or [None] * len(stats.source_B)
    computed = zip(stats.num_drafted_B, stats.source_B, confidence_B, strict=False)
    slots = [len(sure) if sure else count for count, source, sure in computed if sure or source not in COPYING | {NONE}]
    return len(slots) * max(slots, default=0)


def _sum(values: Counter[int]) -> int:
    return sum(number * count for number, count in values.items())
