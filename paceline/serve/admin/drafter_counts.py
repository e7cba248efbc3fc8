"""Counts rounds and requests by drafter and request class, for Prometheus and the admin API.

Labels never contain text from clients: a tag in the name of a request class is replaced by a hash. The numbers of
drafters and classes are bounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from paceline.draft.pool import Pool, memory_alone, memory_of
from paceline.lossy import LOSSY
from paceline.plan.clusters import OTHER, label
from paceline.types import CANDIDATE, RoundStats, Sequence

if TYPE_CHECKING:
    from paceline.engine.engine import Engine

MOST_NAMES, MOST_PAIRS = 128, 1024
"""Most drafters, and most pairs (drafter, request class), that are counted separately; all others count as OTHER."""
Labels = tuple[str, ...]
PARTS = "weight", "cache"
"""Parts of a drafter's memory, in the order of `Memory`."""


class DrafterCounts:
    """Counts finished requests, decode rounds and their seconds for each drafter. One thread writes; any may read. A
    round is counted once for each request in its batch, under the request's drafter, with the seconds of the whole
    round."""

    def __init__(self) -> None:
        self.rounds: dict[str, dict[tuple[int, int], int]] = {}
        """Drafter -> (drafted, accepted) -> rounds."""
        self.seconds: dict[str, float] = {}
        """Drafter -> seconds of its rounds, summed over requests."""
        self.requests: Counter[Labels] = Counter()
        """(drafter, request class) -> finished requests."""

    def round(self, stats: RoundStats) -> None:
        """Count one decode round. Requests with a lossy acceptance rule are not counted, nor is the trial request that
        tests a drafter before it joins the pool."""
        spent = stats.draft_s + stats.verify_s + stats.host_s
        for name, num_drafted, num_accepted in zip(
            stats.drafter_B, stats.num_drafted_B, stats.num_accepted_B, strict=False
        ):
            rounds = self.rounds.get(name)
            if name in (CANDIDATE, LOSSY):
                continue
            if rounds is None:
                name = name if len(self.rounds) < MOST_NAMES else OTHER
                rounds = self.rounds.setdefault(name, {})
            key = num_drafted, num_accepted
            rounds[key] = rounds.get(key, 0) + 1
            self.seconds[name] = self.seconds.get(name, 0.0) + spent

    def finished(self, sequence: Sequence) -> None:
        """Count a finished request under its drafter and request class. Requests that got no drafter, or have a lossy
        acceptance rule, are not counted."""
        if sequence.drafter and not sequence.ledger:
            key = sequence.drafter, label(sequence.cluster or OTHER)
            self.requests[key if key in self.requests or len(self.requests) < MOST_PAIRS else (OTHER, OTHER)] += 1

    def totals(self, name: str) -> tuple[int, int, float]:
        """Return (rounds, output tokens, seconds) of a drafter, summed over all its rounds since the server started;
        zeros for an unknown drafter."""
        rounds = self.rounds.get(name, {}).copy()
        num_rounds = sum(rounds.values())
        num_accepted = sum(accepted * count for (_, accepted), count in rounds.items())
        return num_rounds, num_rounds + num_accepted, self.seconds.get(name, 0.0)

    def collect(self, model: str, engine: Engine | None) -> Iterator[Metric]:
        """Yield the Prometheus metrics of all drafters. `model`: value of the label model_name. `engine`: the running
        engine, or None. With an engine, the metrics include each drafter's running requests and memory, and its speed
        relative to plain decoding as estimated by the router."""
        totals = {name: self.totals(name) for name in list(self.rounds)}
        num_rounds, num_tokens, seconds = ({(name,): total[at] for name, total in totals.items()} for at in range(3))
        firsts, survived = {}, {}
        for name in totals:
            rounds = self.rounds[name].copy()
            firsts[name,] = sum(count for (drafted, _), count in rounds.items() if drafted)
            for place in range(max((accepted for _, accepted in rounds), default=0)):
                survived[name, str(place)] = sum(count for (_, accepted), count in rounds.items() if accepted > place)
        counters: list[tuple[str, str, Labels, Mapping[Labels, float]]] = [
            ("rounds", "Rounds, one per request in the batch", (), num_rounds),
            ("tokens", "Tokens of these rounds", (), num_tokens),
            ("seconds", "Seconds of these rounds", (), seconds),
            ("drafts", "Rounds with drafts", (), firsts),
            ("survived", "Rounds whose drafts were accepted up to this position, from 0", ("position",), survived),
            ("requests", "Finished requests", ("cluster",), self.requests.copy()),
        ]
        for name, doc, labels, values in counters:
            yield _family(CounterMetricFamily, model, name, doc, labels, values)
        if engine is not None:
            members = list(engine.pool.members.values())
            rows = {(member.name,): engine.pool.num_rows(member) for member in members}
            yield _family(GaugeMetricFamily, model, "rows", "Running requests of the drafter", (), rows)
            yield from _memory(model, engine.pool)
        clusters = engine.router.clusters.copy() if engine is not None and engine.router else {}
        gains = {(name, label(key)): arm.gain for key, one in clusters.items() for name, arm in one.arms.copy().items()}
        doc = "Tokens/s relative to plain decoding, estimated by the router"
        yield _family(GaugeMetricFamily, model, "gain", doc, ("cluster",), gains)


def _memory(model: str, pool: Pool) -> Iterator[Metric]:
    """Yield the memory of each drafter and of all, and the counts of `engine/residency.py`."""
    each = {one.name: memory_alone(one.drafter, pool.target) for one in list(pool.members.values())}
    values = {(name, part): getattr(one, f"{part}_bytes") for name, one in each.items() for part in PARTS}
    doc = "Memory of weights, and of keys and values"
    yield _family(GaugeMetricFamily, model, "memory_bytes", doc, ("part",), values)
    doc = "Memory of all drafters; what several share counts once"
    held = GaugeMetricFamily("paceline:drafters_held_bytes", doc, labels=["model_name", "part"])
    for part, size in zip(PARTS, memory_of(pool.drafters, pool.target), strict=True):
        held.add_metric([model, part], size)
    yield held
    if (residency := pool.residency) is not None:
        for name, doc, counted in (
            ("loads", "Times that the released drafter was loaded", residency.loads),
            ("releases", "Times that the drafter was released from memory", residency.releases),
            ("misses", "Requests that named the drafter while it was released", residency.misses),
        ):
            yield _family(CounterMetricFamily, model, name, doc, (), {(key,): n for key, n in counted.copy().items()})


def _family(
    kind: Any, model: str, name: str, doc: str, labels: Iterable[str], values: Mapping[Labels, float]
) -> Metric:
    family = kind(f"paceline:drafter_{name}", doc, labels=["model_name", "drafter", *labels])
    for key, value in values.items():
        family.add_metric([model, *key], value)
    return family
