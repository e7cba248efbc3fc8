"""What a server says of itself: counters by which acceptance and pace are read, its health, and answers in JSON.

vLLM's names, which paceline's own server has too; SGLang's are read in `deploy.py`. What goes wrong is a DownloadError
in one line: UnreachableError where the server does not answer or is busy, so that the same call may be tried again;
DeployError where it has not looked at the drafter.
"""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass
from typing import Any

from paceline.bench.client import Client
from paceline.clusters import OTHER
from paceline.errors import DeployError, DownloadError, UnreachableError

COUNTERS = {
    "rounds": "vllm:spec_decode_num_drafts_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
    "tokens": "vllm:generation_tokens_total",
    "errors": "vllm:request_success_total{error}",
    "steps": "paceline:rounds_total",
}
"""vLLM's names, which paceline's server has too; of requests those that ended in an error. `steps`: rounds of a batch."""
REQUESTS = "vllm:request_success_total"
BUSY = ("paceline:draft_seconds_total", "paceline:verify_seconds_total", "paceline:host_seconds_total")
DRAFTS = "paceline:drafter_drafts_total"
"""Rounds with drafts of each member of a pool, by its label `drafter`."""
NOT_NOW = (408, 409, 425, 429, 502, 503, 504)
"""Statuses of a server that is busy, loads, or is behind a proxy that does not reach it."""
NOT_JUDGED = (401, 403, 404, 405, 507)
"""Statuses of a server that has not tried the drafter: a wrong key, another version, no memory."""
LEAST_STEPS = 100
"""Rounds whose time says something."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What a server's metrics say so far; of several servers their sum."""

    tokens: float = 0.0
    rounds: float = 0.0
    accepted: float = 0.0
    errors: float = 0.0
    steps: float = 0.0
    busy_s: float = 0.0
    requests: float = 0.0
    """Requests that ended, those that ended in an error included."""

    def __add__(self, other: Counts) -> Counts:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Counts(*(ours + theirs for ours, theirs in pairs))


def is_restarted(before: Counts, after: Counts) -> bool:
    """True if counters went back: the server, or one of several, was started again between two readings."""
    return after.tokens < before.tokens or after.rounds < before.rounds or after.requests < before.requests


def tokens_per_round(before: Counts, after: Counts) -> float | None:
    """Between two readings; None when no round was, or when a restart set the counters back."""
    rounds, accepted = after.rounds - before.rounds, after.accepted - before.accepted
    return 1.0 + accepted / rounds if rounds > 0 and accepted >= 0 else None


def pace(before: Counts, after: Counts) -> tuple[float, float] | None:
    """(rows of a round, seconds of a round) between two readings; None where a server does not tell, or has done little."""
    steps, busy_s = after.steps - before.steps, after.busy_s - before.busy_s
    return ((after.rounds - before.rounds) / steps, busy_s / steps) if steps >= LEAST_STEPS and busy_s > 0 else None


def counts_of(client: Client) -> Counts:
    values = metrics_of(client)
    counted = {name: values.get(metric, 0.0) for name, metric in COUNTERS.items()}
    requests = counted["errors"] + values.get(REQUESTS, 0.0)
    return Counts(**counted, busy_s=sum(values.get(name, 0.0) for name in BUSY), requests=requests)


def drafts_of(client: Client, member: str) -> float | None:
    """Rounds in which this member of a pool has drafted; None where the server does not count them by member.

    A server counts a bounded number of names: a later one is a part of OTHER, as far as can be known from outside."""
    values = metrics_of(client, "drafter")
    is_counted = any(name.startswith(DRAFTS) for name in values)
    unknown = None if f"{DRAFTS}{{{OTHER}}}" in values or not is_counted else 0.0
    return values.get(f"{DRAFTS}{{{member}}}", unknown)


def metrics_of(client: Client, by: str | None = None) -> dict[str, float]:
    """Name -> sum of all series of that name, of gauges the mean.

    Series with the label `by` are summed by its value, under NAME{VALUE}."""
    from prometheus_client.parser import text_string_to_metric_families

    text = answer_of(client, "GET", "/metrics").decode("utf-8", "replace")
    found: dict[str, list[float]] = {}
    means: set[str] = set()
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = sample.name + ("{error}" if sample.labels.get("finished_reason") == "error" else "")
                name += f"{{{sample.labels[by]}}}" if by in sample.labels else ""
                found.setdefault(name, []).append(float(sample.value))
                if family.type == "gauge":
                    means.add(name)
    except ValueError as error:
        raise DownloadError(f"{client.url}/metrics is not in Prometheus' format ({error}): is it the server?") from error
    return {name: sum(values) / (len(values) if name in means else 1) for name, values in found.items()}


def is_well(client: Client) -> bool:
    """True if the server says that it is well. Raises UnreachableError when it does not answer."""
    try:
        return client.get("/health").status == 200
    except OSError as error:
        raise _silent(client, error) from error


def is_up(client: Client) -> bool:
    """True if the server answers and says that it is well: while one starts, silence is no error."""
    try:
        return is_well(client)
    except UnreachableError:
        return False


def ask(client: Client, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = answer_of(client, method, path, body)
    try:
        found = json.loads(data or b"{}")
    except ValueError as error:
        raise DownloadError(f"{client.url}{path} did not answer with JSON: is it the server?") from error
    return found if isinstance(found, dict) else {}


def answer_of(client: Client, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
    try:
        if method == "GET":
            stream = client.get(path)
        else:
            stream = client.ask(method, path, None if method == "DELETE" else json.dumps(body or {}).encode())
    except OSError as error:
        raise _silent(client, error) from error
    if stream.failure:
        raise _silent(client, stream.failure)
    if not 200 <= stream.status < 300:
        said = stream.body.decode("utf-8", "replace").strip()[:300]
        raise _refusal(stream.status)(f"{client.url}{path} answered {stream.status} ({said})")
    return stream.body


def _refusal(status: int) -> type[DownloadError]:
    """The error that an answer with this status is."""
    return UnreachableError if status in NOT_NOW else DeployError if status in NOT_JUDGED else DownloadError


def _silent(client: Client, why: object) -> UnreachableError:
    return UnreachableError(f"{client.url} does not answer ({why}): start it, or check its address")
