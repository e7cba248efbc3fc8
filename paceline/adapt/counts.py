"""What a server says of itself: counters by which acceptance and pace are read, its health, and answers in JSON.

vLLM's names, which paceline's own server has too; SGLang's are read by `SglangCounts`. What goes wrong is a
DownloadError in one line: UnreachableError where the server does not answer or is busy, so that the same call may be
tried again; DeployError where it has not looked at the drafter.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, field
from typing import Any

from paceline.bench.client import Client
from paceline.clusters import OTHER
from paceline.errors import ConfigError, DeployError, DownloadError, UnreachableError
from paceline.simulate.server_metrics import engines_of, totals

log = logging.getLogger("paceline.adapt")
COUNTERS = {
    "rounds": "vllm:spec_decode_num_drafts_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
    "tokens": "vllm:generation_tokens_total",
    "errors": "vllm:request_success_total{error}",
    "steps": "paceline:rounds_total",
}
"""vLLM's names, which paceline's server has too; of requests those that ended in an error. `steps`: rounds of a batch."""
SGLANG_LENGTH, SGLANG_TOKENS = "sglang:spec_accept_length", "sglang:generation_tokens_total"
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


def counts_of(client: Client, model: str | None = None) -> Counts:
    """What the server counts, of all its engines. Raises DownloadError."""
    return sum(counts_by_engine(client, model).values(), Counts())


def counts_by_engine(client: Client, model: str | None = None) -> dict[str, Counts]:
    """Engine -> what it counts. Raises DownloadError when the page is none of metrics, or tells of several models."""
    return {engine: _counts(values) for engine, values in metrics_of(client, model).items()}


def _counts(values: dict[str, float]) -> Counts:
    counted = {name: values.get(metric, 0.0) for name, metric in COUNTERS.items()}
    return Counts(**counted, busy_s=sum(values.get(name, 0.0) for name in BUSY), requests=values.get(REQUESTS, 0.0))


@dataclass(slots=True)
class Totals:
    """Counters of several servers, added up so that none goes back: differences are taken by server and engine,
    then summed.

    A counter that is below its last reading was set back by a restart and counts from zero; a server whose page could
    not be read adds nothing until it can be again."""

    total: Counts = Counts()
    _last: dict[tuple[str, str], Counts] = field(default_factory=dict)
    _is_begun: bool = False

    def read(self, clients: Iterable[Client], read: Callable[[Client], dict[str, Counts]]) -> Counts:
        """Take a reading without the servers whose page cannot be read now. Raises DownloadError where none can be."""
        pages, errors = dict[str, dict[str, Counts]](), list[DownloadError]()
        for client in clients:
            try:
                pages[client.url] = read(client)
            except (UnreachableError, DeployError):
                raise
            except DownloadError as error:
                log.warning("%s: left out of this reading", error)
                errors.append(error)
        if not pages:
            raise errors[0]
        return self.add(pages)

    def add(self, pages: dict[str, dict[str, Counts]]) -> Counts:
        """Take a reading, server -> engine -> counts; returns the total by now."""
        for server, engines in pages.items():
            for engine, now in engines.items():
                before = self._last.get((server, engine))
                if before is not None and _is_partial(before, now):
                    continue
                if before is not None:
                    self.total += now if is_restarted(before, now) else _difference(before, now)
                elif not self._is_begun:
                    self.total += now
                self._last[server, engine] = now
        self._is_begun = True
        return self.total


def _is_partial(before: Counts, now: Counts) -> bool:
    """True where some counters are gone from the page and others have not gone back: no restart does that."""
    pairs = [(before.tokens, now.tokens), (before.rounds, now.rounds), (before.requests, now.requests)]
    pairs = [(then, value) for then, value in pairs if then > 0]
    return any(value == 0 for _, value in pairs) and any(value >= then for then, value in pairs)


def _difference(before: Counts, now: Counts) -> Counts:
    return Counts(*(max(ours - theirs, 0.0) for ours, theirs in zip(astuple(now), astuple(before), strict=True)))


@dataclass(slots=True)
class SglangCounts:
    """SGLang tells the mean tokens a round of late, not how many rounds there were: they follow from its tokens,
    reading by reading."""

    _last: dict[tuple[str, str], Counts] = field(default_factory=dict)

    def read(self, client: Client, model: str | None = None) -> dict[str, Counts]:
        """Engine -> what it has counted. Raises DownloadError."""
        return {engine: self._read((client.url, engine), values) for engine, values in metrics_of(client, model).items()}

    def _read(self, engine: tuple[str, str], values: dict[str, float]) -> Counts:
        tokens, length = values.get(SGLANG_TOKENS, 0.0), values.get(SGLANG_LENGTH, 0.0)
        before = self._last.get(engine, Counts(tokens))
        if tokens < before.tokens:  # started again
            before = Counts()
        gained = tokens - before.tokens
        rounds = gained / length if length >= 1 else 0.0
        self._last[engine] = Counts(tokens, before.rounds + rounds, before.accepted + (gained - rounds if rounds else 0.0))
        return self._last[engine]


def drafts_of(client: Client, member: str) -> float | None:
    """Rounds in which this member of a pool has drafted; None where the server does not count them by member.

    A server counts a bounded number of names: a later one is a part of OTHER, as far as can be known from outside."""
    values = totals(metrics_of(client, by=("drafter",)))
    is_counted = any(name.startswith(DRAFTS) for name in values)
    unknown = None if f"{DRAFTS}{{{OTHER}}}" in values or not is_counted else 0.0
    return values.get(f"{DRAFTS}{{{member}}}", unknown)


def metrics_of(client: Client, model: str | None = None, by: tuple[str, ...] = ()) -> dict[str, dict[str, float]]:
    """Engine -> name -> value, of series with a label of `by`, or `finished_reason`, also under NAME{VALUE}; as
    `engines_of`.

    Raises DownloadError when the server does not answer, or with what is none of a server's metrics; DeployError where
    they tell of several models, and `model` names none."""
    text = answer_of(client, "GET", "/metrics").decode("utf-8", "replace")
    try:
        found = engines_of(text, model, ("finished_reason", *by))
    except ConfigError as error:
        raise DeployError(f"{client.url}/metrics: {error}") from error
    if not found:
        raise DownloadError(f"{client.url}/metrics has no known metric in Prometheus' format: is it the server?")
    return found


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
