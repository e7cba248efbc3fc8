"""Rounds and requests by drafter and by kind of request, for Prometheus and the admin API.

No series is labelled by what a client sends: kinds of requests stand in digests, and both are bounded in number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from paceline.lossy import LOSSY
from paceline.plan.clusters import OTHER, label
from paceline.types import CANDIDATE, RoundStats, Sequence

MOST_NAMES, MOST_PAIRS = 32, 1024
"""Drafters, and pairs of drafter and kind of request, that are told apart while the server runs; the rest counts as OTHER."""
Labels = tuple[str, ...]


class DrafterCounts:
    """Rounds, seconds and requests of one server, by drafter. One thread counts; any thread may read."""

    def __init__(self) -> None:
        self.rounds: dict[str, dict[tuple[int, int], int]] = {}
        """Drafter -> (drafted, accepted) -> rounds of single requests."""
        self.seconds: dict[str, float] = {}
        """Drafter -> time of its rounds, request by request."""
        self.requests: Counter[Labels] = Counter()
        """(drafter, cluster) -> requests that came to their end."""

    def round(self, stats: RoundStats) -> None:
        spent = stats.draft_s + stats.verify_s + stats.host_s
        for name, num_drafted, num_accepted in zip(stats.drafter_B, stats.num_drafted_B, stats.num_accepted_B, strict=False):
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
        if sequence.drafter and not sequence.ledger:
            key = sequence.drafter, label(sequence.cluster or OTHER)
            self.requests[key if key in self.requests or len(self.requests) < MOST_PAIRS else (OTHER, OTHER)] += 1

    def totals(self, name: str) -> tuple[int, int, float]:
        """Rounds, tokens and seconds of a drafter's requests."""
        rounds = self.rounds.get(name, {}).copy()
        num_rounds = sum(rounds.values())
        return num_rounds, num_rounds + sum(kept * count for (_, kept), count in rounds.items()), self.seconds.get(name, 0.0)

    def collect(self, model: str, engine: Any) -> Iterator[Metric]:
        """For a scrape; `engine` is the one that stepped last, for what it is doing right now."""
        names = list(self.rounds)
        totals = {name: self.totals(name) for name in names}
        firsts, survived = {}, {}
        for name in names:
            rounds = self.rounds[name].copy()
            firsts[name,] = sum(count for (drafted, _), count in rounds.items() if drafted)
            for place in range(max((kept for _, kept in rounds), default=0)):
                survived[name, str(place)] = sum(count for (_, kept), count in rounds.items() if kept > place)
        told: list[tuple[str, str, Labels, Mapping[Labels, float]]] = [
            ("rounds", "Rounds, request by request", (), {(name,): each[0] for name, each in totals.items()}),
            ("tokens", "Tokens of those rounds", (), {(name,): each[1] for name, each in totals.items()}),
            ("seconds", "Time of those rounds", (), {(name,): each[2] for name, each in totals.items()}),
            ("drafts", "Those of the rounds that had drafts", (), firsts),
            ("survived", "Rounds whose drafts stood up to this place, from 0", ("position",), survived),
            ("requests", "Requests that ended", ("cluster",), self.requests.copy()),
        ]
        for name, doc, labels, values in told:
            yield _family(CounterMetricFamily, model, name, doc, labels, values)
        pool, router = getattr(engine, "pool", None), getattr(engine, "router", None)
        if pool is not None:
            members = list(pool.members.values())
            rows = {(member.name,): pool.num_rows(member) for member in members}
            yield _family(GaugeMetricFamily, model, "rows", "Requests that have it now", (), rows)
            memory = {(each.name,): each.drafter.weight_bytes + each.drafter.cache_bytes(pool.target) for each in members}
            yield _family(GaugeMetricFamily, model, "memory_bytes", "Weights and cache", (), memory)
        clusters = router.clusters.copy() if router is not None else {}
        gains = {(name, label(key)): arm.gain for key, each in clusters.items() for name, arm in each.arms.copy().items()}
        yield _family(
            GaugeMetricFamily, model, "gain", "Tokens/s over plain decoding's, as routing has it", ("cluster",), gains
        )


def _family(kind: Any, model: str, name: str, doc: str, labels: Iterable[str], values: Mapping[Labels, float]) -> Metric:
    family = kind(f"paceline:drafter_{name}", doc, labels=["model_name", "drafter", *labels])
    for key, value in values.items():
        family.add_metric([model, *key], value)
    return family
