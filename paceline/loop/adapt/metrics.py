"""Prometheus metrics of the daemon (`paceline adapt watch --metrics-port`). Their number is bounded, since the number
of clusters (groups of similar requests) is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.loop.adapt.decide.policy import SeasonalPolicy
from paceline.loop.adapt.traffic.hours import HOUR_S

STATES = {"learning": -1, "calm": 0, "raised": 1, "held": 2}
EVENTS = (
    *("training", "scored", "swapped", "routed", "kept", "rolled back", "refused", "failed", "reported"),
    *("spread", "waiting", "answers"),
)
"""Names of events in the log and in a counter metric. `waiting`: a stage waits for a server that does not answer;
`answers`: the server answers again."""
PREFIX = "paceline:adapt_"


class AdaptMetrics(Collector):
    """Prometheus collector of the daemon: acceptance length and alarms by cluster, counts of events, and whether the
    server answers. Values are computed at each scrape."""

    def __init__(self, policy: SeasonalPolicy) -> None:
        self.registry = CollectorRegistry()
        self.policy = policy
        self.stage, self.hour, self.is_reached = "", 0, True
        """`stage`: name of the current stage; `hour`: last hour decided; `is_reached`: whether the server answers."""
        self.events: Counter[str] = Counter()
        self.registry.register(self)

    def serve(self, port: int) -> None:
        """Serve the metrics on loopback in a background thread. Raises OSError if the port is in use."""
        start_http_server(port, addr="127.0.0.1", registry=self.registry)

    def collect(self) -> Iterator[Metric]:
        now = _by_cluster("tokens_per_round", "Tokens a round over the last day with traffic")
        usual = _by_cluster("usual_tokens_per_round", "What the baseline has learned")
        state = _by_cluster("alarm", "-1 learning, 0 calm, 1 raised, 2 held")
        loss = _by_cluster("loss", "Fall of tokens a round while an alarm lasts, a share")
        for name, cluster in list(self.policy.clusters.items()):
            now.add_metric([name], cluster.last_day.tokens_per_round)
            usual.add_metric([name], math.exp(cluster.usual))
            state.add_metric([name], STATES[cluster.series.state])
            loss.add_metric([name], cluster.series.loss)
        state.add_metric(["(mix)"], STATES[self.policy.mix.state])
        yield from (now, usual, state, loss)
        yield GaugeMetricFamily(
            PREFIX + "training", "1 while a training, its gate or a probation runs", value=bool(self.stage)
        )
        yield GaugeMetricFamily(PREFIX + "server_up", "0 while the server does not answer", value=self.is_reached)
        help = "End of the hour that was last decided about, seconds since 1970"
        yield GaugeMetricFamily(PREFIX + "last_decision_seconds", help, value=(self.hour + 1) * HOUR_S)
        events = CounterMetricFamily(PREFIX + "events", "What was done", labels=["event"])
        for name in EVENTS:
            events.add_metric([name], self.events[name])
        yield events


def _by_cluster(name: str, help: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, help, labels=["cluster"])
