"""Reads a server's metrics, health and JSON answers over HTTP.

Counters have vLLM's names, which paceline's server also uses, or SGLang's. Every failure is a one-line DownloadError.
UnreachableError: the server does not answer or is busy, and the call may be repeated. DeployError: the server refused
before it tried the drafter."""

from __future__ import annotations

import json
import logging
import math
import operator
from collections.abc import Container, Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from paceline.errors import ConfigError, DeployError, DownloadError, RejectedError, UnreachableError
from paceline.net.prometheus import engines_of, totals
from paceline.net.streaming import Client
from paceline.plan.clusters import OTHER

log = logging.getLogger("paceline.loop.adapt")
COUNTERS = {
    "rounds": "vllm:spec_decode_num_drafts_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
    "tokens": "vllm:generation_tokens_total",
    "errors": "vllm:request_success_total{error}",
    "steps": "paceline:rounds_total",
}
"""Field of Counts -> metric name in vLLM and paceline. `errors`: failed requests; `steps`: rounds of the whole batch
(paceline only)."""
SGLANG = {
    "tokens": "sglang:generation_tokens_total",
    "rounds": "sglang:spec_verify_calls_total",
    "requests": "sglang:num_requests_total",
}
"""Field of Counts -> metric name in SGLang, which adds a request's figures when the request ends."""
SGLANG_LENGTH = "sglang:spec_accept_length"
"""SGLang's gauge of recent acceptance length, used where its counter of rounds is missing."""
REQUESTS = "vllm:request_success_total"
BUSY = ("paceline:draft_seconds_total", "paceline:verify_seconds_total", "paceline:host_seconds_total")
DRAFTS = "paceline:drafter_drafts_total"
"""Metric: rounds in which each drafter of a pool drafted; its label is `drafter`."""
NOT_NOW = (408, 409, 425, 429, 502, 503, 504)
"""HTTP statuses of a server that is busy, is loading, or cannot be reached by its proxy."""
NOT_JUDGED = (401, 403, 404, 405, 507)
"""HTTP statuses with which a server refuses before it tries the drafter: wrong key, other version, out of memory."""
LEAST_STEPS = 100
"""Minimum number of rounds for a meaningful time per round."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Counters from a server's metrics: totals since its start; for several servers, their sums. One round of a batch
    of n requests adds n to `rounds` and 1 to `steps`. `busy_s`: total seconds of the rounds counted in `steps`."""

    tokens: float = 0.0
    rounds: float = 0.0
    accepted: float = 0.0
    errors: float = 0.0
    steps: float = 0.0
    busy_s: float = 0.0
    requests: float = 0.0
    """Finished requests, including failed ones."""

    def __add__(self, other: Counts) -> Counts:
        return Counts(*map(operator.add, _values(self), _values(other)))


_values = operator.attrgetter(*Counts.__slots__)


@dataclass(frozen=True, slots=True)
class Reading:
    """Counter values of one engine (model instance of a server) at one time. SGLang does not count accepted drafts;
    `Meter` estimates them from two consecutive readings."""

    counts: Counts
    counts_accepted: bool = True
    """False for SGLang."""
    length: float = 0.0
    """SGLang's gauge of recent acceptance length; 0 if it is missing or nothing was drafted."""


@dataclass(slots=True)
class Meter:
    """Sums the counters of one engine over its restarts. A restarted engine counts from 0 again.

    A restart is detected if counters are lower than at the last reading. The counts between that reading and the
    restart are then lost. If all counters have already grown beyond the last reading, the restart is not detected, and
    all counts before it are lost."""

    earlier: Counts = field(default_factory=Counts)
    """Counts before the latest restart."""
    last: Counts = field(default_factory=Counts)
    """Latest reading."""

    @property
    def total(self) -> Counts:
        return self.earlier + self.last

    def read(self, reading: Reading) -> Counts:
        """Add a reading; returns the counts summed over all restarts.

        SGLang does not count accepted drafts. They are computed from the counts since the last reading: generated
        tokens, minus one per finished request (its first token needs no round), minus one per round (the bonus token).
        If SGLang does not count rounds either, these are estimated from its gauge of recent acceptance length."""
        raw = reading.counts
        if _is_partial(self.last, raw):
            return self.total
        before = self.total
        if is_restarted(self.last, raw):
            self.earlier += self.last
        self.last = raw
        if not reading.counts_accepted:
            self.earlier += _accepted(before, self.total, reading.length)
        return self.total

    def saved(self) -> list[list[float]]:
        """Returns the meter's state as JSON, for `Meter.of`."""
        return [list(_values(self.earlier)), list(_values(self.last))]

    @classmethod
    def of(cls, saved: list[list[float]]) -> Meter:
        """Restore a meter from the JSON of `saved`. Raises ValueError or TypeError if it is invalid."""
        earlier, last = saved
        for counts in (earlier, last):
            is_valid = isinstance(counts, list) and len(counts) == len(fields(Counts))
            if not is_valid or not all(type(count) in (int, float) and math.isfinite(count) for count in counts):
                raise ValueError("impossible meters")
        return cls(Counts(*earlier), Counts(*last))


@dataclass(slots=True)
class Meters:
    """Sums the counters of several servers over their restarts. `of`: server address -> name of an engine -> its
    meter."""

    of: dict[str, dict[str, Meter]]

    def read(self, clients: Iterable[Client], model: str | None, needed: Container[str] | None = None) -> Counts:
        """Read the metrics of all servers; returns the sum of their counts. `model`: name of the served model to count,
        needed if a server has several; `needed`: addresses of the servers that must answer [default: all].

        Where new counts are missing, the last known ones are used: for a server outside `needed` that does not answer,
        and for incomplete metrics.

        Raises DownloadError, after reading all servers, if a needed server does not answer or no server's metrics can
        be used. Raises DeployError at once if a needed server refuses the request or has metrics of other models only.
        Also raises it if a needed server has several models and `model` is None."""
        pages, errors, away = dict[str, dict[str, dict[str, float]]](), list[DownloadError](), list[DownloadError]()
        for client in clients:
            is_needed = needed is None or client.url in needed
            try:
                pages[client.url] = metrics_of(client, model)
            except DownloadError as error:
                if isinstance(error, DeployError) and is_needed:
                    raise
                errors.append(error)
                if isinstance(error, UnreachableError) and is_needed:
                    away.append(error)
                else:
                    log.warning("%s: left out of this reading", error)
        is_begun = any(self.of.values())
        for server, engines in pages.items():
            for engine, reading in _readings(engines).items():
                if engine not in self.of[server]:
                    self.of[server][engine] = _begun(reading, is_begun)
                self.of[server][engine].read(reading)
        if away or (errors and not pages):
            raise (away or errors)[0]
        return sum((meter.total for meter in self.all()), Counts())

    def total(self, server: str) -> Counts:
        """Returns the sum of one server's counts at the latest reading; zeros before the first."""
        return sum((meter.total for meter in self.of[server].values()), Counts())

    def all(self) -> list[Meter]:
        return [meter for engines in self.of.values() for meter in engines.values()]

    def saved(self) -> dict[str, Any]:
        """Returns the state of all meters as JSON, for `restore`."""
        return {
            server: {engine: meter.saved() for engine, meter in meters.items()} for server, meters in self.of.items()
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Continue from the JSON that `saved` returned. Servers that are not used any more are ignored. Raises
        ValueError or TypeError if the JSON is invalid."""
        for server in self.of.keys() & saved.keys():
            self.of[server] = {engine: Meter.of(meter) for engine, meter in saved[server].items()}


def is_restarted(before: Counts, after: Counts) -> bool:
    """True if the server was restarted between two readings of its counters. Each of these shows a restart:
    - The token count fell.
    - The number of rounds or of accepted drafts fell to a value above 0.
    - All counters that were above 0 fell.

    Any other fall is not a restart: the metrics page lacks some counters, which were read as 0."""
    pairs = _counters(before, after)
    fell = any(0 < getattr(after, name) < getattr(before, name) for name in ("rounds", "accepted"))
    return after.tokens < before.tokens or fell or (bool(pairs) and all(value < then for then, value in pairs))


def tokens_per_round(before: Counts, after: Counts) -> float | None:
    """Acceptance length between two readings of a server's counters; None without a round, or if a counter fell."""
    rounds, accepted = after.rounds - before.rounds, after.accepted - before.accepted
    return 1.0 + accepted / rounds if rounds > 0 and accepted >= 0 else None


def pace(before: Counts, after: Counts) -> tuple[float, float] | None:
    """Returns (mean batch size, seconds per round of the batch) between two readings of a server's counters. Returns
    None after fewer than 100 rounds (LEAST_STEPS), or if the server does not report the time of its rounds."""
    steps, busy_s = after.steps - before.steps, after.busy_s - before.busy_s
    return ((after.rounds - before.rounds) / steps, busy_s / steps) if steps >= LEAST_STEPS and busy_s > 0 else None


def _begun(reading: Reading, is_late: bool) -> Meter:
    """A meter whose first reading is no gain. An engine first seen later than others starts at 0."""
    raw = reading.counts
    if is_late:
        return Meter(Counts(*(-value for value in _values(raw))), raw)
    return Meter(Counts() if reading.counts_accepted else _accepted(Counts(), raw, length=0.0), raw)


def _accepted(before: Counts, after: Counts, length: float) -> Counts:
    """Returns SGLang's accepted drafts between two readings, and its rounds if it does not count them."""
    tokens = max(after.tokens - before.tokens - (after.requests - before.requests), 0.0)
    counted = after.rounds - before.rounds
    rounds = counted or (tokens / length if length >= 1 else 0.0)
    return Counts(rounds=rounds - counted, accepted=max(tokens - rounds, 0.0) if rounds else 0.0)


def _readings(engines: dict[str, dict[str, float]]) -> dict[str, Reading]:
    """Returns the reading of each engine that reports its tokens; skips the others.

    With data parallelism SGLang labels its gauge with `dp_rank` but not its counters: these get the mean of all
    ranks."""
    mean_length, readings = totals(engines).get(SGLANG_LENGTH, 0.0), dict[str, Reading]()
    for engine, values in engines.items():
        if SGLANG["tokens"] in values:
            counts = Counts(**{name: values.get(metric, 0.0) for name, metric in SGLANG.items()})
            readings[engine] = Reading(counts, False, values.get(SGLANG_LENGTH, mean_length))
        elif COUNTERS["tokens"] in values:  # without it other counters may be missing, too
            counts = {name: values.get(metric, 0.0) for name, metric in COUNTERS.items()}
            busy_s = sum(values.get(name, 0.0) for name in BUSY)
            readings[engine] = Reading(Counts(**counts, busy_s=busy_s, requests=values.get(REQUESTS, 0.0)))
    return readings


def _is_partial(before: Counts, now: Counts) -> bool:
    """True if some counters fell, but neither the tokens nor all others: a part of the page is missing."""
    return not is_restarted(before, now) and any(value < then for then, value in _counters(before, now))


def _counters(before: Counts, now: Counts) -> list[tuple[float, float]]:
    """Pairs (before, now) of the counters that were above 0. Errors are part of the requests."""
    names = ("tokens", "rounds", "accepted", "requests")
    return [(getattr(before, name), getattr(now, name)) for name in names if getattr(before, name) > 0]


def drafts_of(client: Client, member: str) -> float | None:
    """Returns the number of rounds in which the drafter named `member` has drafted, from the server's metrics. Raises
    DownloadError if the server does not answer.

    Returns None if the number is unknown: the server does not count rounds by drafter, or counts this one with others.
    A server counts a limited number of drafters by name, and the rest together as "other"."""
    values = totals(metrics_of(client, by=("drafter",)))
    is_counted = any(name.startswith(DRAFTS) for name in values)
    unknown = None if f"{DRAFTS}{{{OTHER}}}" in values or not is_counted else 0.0
    return values.get(f"{DRAFTS}{{{member}}}", unknown)


def metrics_of(client: Client, model: str | None = None, by: tuple[str, ...] = ()) -> dict[str, dict[str, float]]:
    """Reads a server's metrics page; returns {engine: {metric: value}}. An engine is a model instance of the server. If
    a metric occurs with different labels, its values are added up; acceptance lengths and rates of SGLang are averaged.
    `model`: count only this served model.

    `by`: names of labels. The values of a metric that has one of these labels are also summed separately for each value
    of the label, under keys such as "vllm:request_success_total{error}". The label `finished_reason` is always
    included.

    Raises DownloadError if the server does not answer or the page has no known metric. Raises DeployError if the server
    refuses the request or has metrics of other models only. Also raises it if there are several models and `model` is
    None."""
    text = answer_of(client, "GET", "/metrics").decode("utf-8", "replace")
    try:
        engines = engines_of(text, model, ("finished_reason", *by))
    except ConfigError as error:
        raise DeployError(f"{client.url}/metrics: {error}") from error
    if not engines:
        raise RejectedError(f"{client.url}/metrics has no known metric in Prometheus' format: is it the server?")
    return engines


def is_well(client: Client) -> bool:
    """True if the server reports that it is healthy. Raises UnreachableError if it does not answer."""
    try:
        return client.get("/health").status == 200
    except OSError as error:
        raise _unreachable(client, error) from error


def is_up(client: Client) -> bool:
    """True if the server reports that it is healthy; False also if it does not answer, for example while it starts."""
    try:
        return is_well(client)
    except UnreachableError:
        return False


def ask(client: Client, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = answer_of(client, method, path, body)
    try:
        value = json.loads(data or b"{}")
    except ValueError as error:
        raise RejectedError(f"{client.url}{path} did not answer with JSON: is it the server?") from error
    return value if isinstance(value, dict) else {}


def answer_of(client: Client, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
    stream = client.ask(method, path, json.dumps(body or {}).encode() if method == "POST" else None)
    if stream.failure:
        raise _unreachable(client, stream.failure)
    if not 200 <= stream.status < 300:
        text = stream.body.decode("utf-8", "replace").strip()[:300]
        raise _refusal(stream.status)(f"{client.url}{path} answered {stream.status} ({text})")
    return stream.body


def _refusal(status: int) -> type[DownloadError]:
    """Maps a failed response's HTTP status to the class of its error."""
    return UnreachableError if status in NOT_NOW else DeployError if status in NOT_JUDGED else RejectedError


def _unreachable(client: Client, why: object) -> UnreachableError:
    return UnreachableError(f"{client.url} does not answer ({why}): start it, or check its address")
