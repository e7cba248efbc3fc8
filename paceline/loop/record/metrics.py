"""Prometheus metrics of the recording proxy (`paceline record --metrics-port`), on a port of their own: the path
/metrics of the proxy is the server's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from http.server import HTTPServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.loop.record.proxy import Proxy
from paceline.serve.admin.traces import TraceWriter

PREFIX = "paceline:record_"


class RecordMetrics(Collector):
    """Prometheus collector of the recording proxy: counts of requests, traces and dropped requests, read at each
    scrape."""

    def __init__(self, proxy: Proxy, waiting_bytes: Callable[[], int], writer: TraceWriter) -> None:
        self.registry = CollectorRegistry()
        self._proxy, self._waiting_bytes, self._writer = proxy, waiting_bytes, writer
        self.registry.register(self)

    def serve(self, port: int) -> HTTPServer:
        """Serves the metrics on loopback in a background thread; the caller shuts it down. Raises OSError if the port
        is in use."""
        return start_http_server(port, addr="127.0.0.1", registry=self.registry)[0]

    def collect(self) -> Iterator[Metric]:
        proxy, writer, waiting = self._proxy, self._writer, self._waiting_bytes()
        for kind, name, text, value in (
            (CounterMetricFamily, "requests", "Chat and completion requests passed to the server", proxy.num_requests),
            (GaugeMetricFamily, "open", "Chat and completion requests in flight", proxy.num_open),
            (CounterMetricFamily, "traces", "Traces on disk, one for each answer", writer.written),
            (CounterMetricFamily, "answers", "Traces on disk with the answer's tokens", writer.num_answers),
            (GaugeMetricFamily, "waiting_bytes", "Requests and answers that wait to be parsed", waiting),
        ):
            yield kind(PREFIX + name, text, value=value)
        dropped = CounterMetricFamily(PREFIX + "dropped", "What was not recorded, by reason", labels=["reason"])
        for reason, number in sorted(dict(writer.dropped).items()):
            dropped.add_metric([reason], number)
        yield dropped
