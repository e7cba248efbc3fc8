"""Breaks each request's latency into parts by combining the client's clock with the server's durations.

    paceline bench latency --drafters none,default --workload voice

Clocks are never compared. The client measures the time to connect, to send the request and to the first byte; the
server reports durations of its own (`return_timings`, `serve/http/clock.py`). The network time is the client's time to
the first byte minus the server's. From the first byte to the end both measure the same interval, and any difference is
reported as unattributed.

The contenders (servers, in code also `arms`) take turns of a few requests each, so that machine noise affects all of
them equally. Each is compared with the first contender, request by request.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from paceline.bench.config import WARM_UP_TOKENS, LatencyConfig
from paceline.bench.serving.load import Answer, Contender, api_request, read_answer, send_all
from paceline.bench.serving.workloads import Workload, WorkloadRequest
from paceline.errors import ConfigError
from paceline.net.streaming import Stream
from paceline.report.statistics import BUSY, Interval, Spread, bootstrap, doubt
from paceline.report.tables import ignore
from paceline.simulate.server.load import poisson

TEXTS: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
SEGMENTS: dict[str, list[str]] = TEXTS["segments"]
"""Segment of a chart's bar -> the parts of a request's time that it contains."""
GROUPS: dict[str, list[str]] = TEXTS["groups"]
"""Group (communication, host, prefill, decode) -> its segments. Contenders are compared by group."""
PARTS = [part for parts in SEGMENTS.values() for part in parts]
UNATTRIBUTED = "unattributed"
SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
NEAR = 0.05
"""Width of a percentile's bar: it is the mean of the requests whose rank is at most this share from the percentile, so
that its parts sum to its height."""
SERVER_PARTS = {"sending": "send_s"}
"""Part -> its key in the server's timings, for parts whose key is not the name with "_s" appended."""


@dataclass(slots=True)
class Measured:
    """Result of one request of `bench latency`: its total time, the time to the first text, and the parts of the total
    time such as prefill, all in seconds; or its error."""

    error: str | None = None
    total_s: float = 0.0
    """Seconds from sending, including the connection, to the end."""
    late_s: float = 0.0
    """Client-side delay between scheduled and actual sending, in seconds; not included in any part."""
    parts: dict[str, float] = field(default_factory=dict)
    """Part of the time -> seconds; they sum to `total_s`."""
    is_told: bool = False
    """True if the server reported its timings."""
    num_tokens: int = 0
    first_s: float = 0.0
    """Seconds from sending to the first text."""
    num_rounds: int | None = None
    num_accepted: int | None = None
    text: str = ""
    lossless: bool = True
    """False if the server reported mocked acceptance or a lossy rule."""

    def seconds(self, names: Sequence[str]) -> float:
        return sum(self.parts.get(name, 0.0) for name in names)


def measured(stream: Stream) -> Measured:
    """Return the times of one request from its streamed response; for a failed request only `error` is set."""
    answer = read_answer(stream)
    if answer.error:
        return Measured(error=answer.error)
    total_s = stream.ended_s - stream.sent_s
    parts = parts_of(stream, answer)
    return Measured(
        total_s=total_s,
        late_s=answer.late_s,
        parts=parts,
        is_told="untold" not in parts,
        num_tokens=answer.num_tokens,
        first_s=answer.first_s - answer.late_s,
        num_rounds=answer.num_rounds,
        num_accepted=answer.num_accepted,
        text=answer.text,
        lossless=answer.lossless,
    )


def parts_of(stream: Stream, answer: Answer) -> dict[str, float]:
    """Split the time of one answer into parts such as "connect", "queue", "prefill" and "verify". `answer` is the
    parsed `stream`. Returns part -> seconds; they sum to the time from sending the request to the end of the response.

    "connect" and "send" are measured by the client. The other parts depend on what the server reports:

    - A paceline server reports its `timings` (`serve/http/clock.py`). Time that these do not explain is "unattributed".
    - llama.cpp's server reports `prompt_ms` ("prefill") and `predicted_ms` ("verify"). The rest is "untold".
    - Other servers report no times. All time after sending is "untold"."""
    timings = answer.timings
    connect_s, send_s = stream.connected_s - stream.sent_s, stream.written_s - stream.connected_s
    wait_s, rest_s = stream.headers_s - stream.written_s, stream.ended_s - stream.headers_s
    parts = {"connect": connect_s, "send": send_s}
    if "total_s" in timings:
        names = [part for part in PARTS if SERVER_PARTS.get(part, part + "_s") in timings and part != "send"]
        parts |= {part: timings[SERVER_PARTS.get(part, part + "_s")] for part in names if part != "first_byte"}
        first_byte_s = wait_s - timings["first_byte_s"]
        if first_byte_s < 0.0:  # the server read the request before the client noted the end of sending
            parts["send"], first_byte_s = send_s + first_byte_s, 0.0
        parts["first_byte"] = first_byte_s
        parts[UNATTRIBUTED] = rest_s - (timings["total_s"] - timings["first_byte_s"]) + timings["other_s"]
        return parts
    if "prompt_ms" in timings and "predicted_ms" in timings:
        parts |= {"prefill": 1e-3 * timings["prompt_ms"], "verify": 1e-3 * timings["predicted_ms"]}
    return parts | {"untold": stream.ended_s - stream.sent_s - sum(parts.values())}


@dataclass(slots=True)
class LatencyResult:
    """Latencies of one contender (server) on one workload, in seconds, over the answers of all repetitions."""

    workload: str
    arm: str
    """Name of the contender."""
    num_answers: int
    num_failed: int
    failures: dict[str, int]
    total: Spread
    first_token: Spread
    groups: dict[str, Spread]
    """Group (communication, host, prefill, decode) -> spread of its seconds."""
    parts: dict[str, Spread]
    """Part -> spread of its seconds, for the parts that were measured."""
    bars: dict[str, dict[str, float]]
    """Percentile (p50, p90, p99) of the total time -> {segment of the chart's bar, such as "prefill": mean seconds}.
    The mean is over the answers whose total time is near the percentile."""
    unattributed: float | None
    """Time that no part explains, as a share of the total time. Both are sums over all answers, in which errors of
    opposite sign cancel."""
    is_told: bool
    """True if the server reported its timings for every answer; False without answers."""
    largest: str | None
    """Segment with the most time in the p50 bar, other than "unattributed"; None without answers."""
    num_tokens: float | None
    """Mean number of tokens per answer."""
    tokens_per_round: float | None
    late: Spread
    lossless: bool
    """False if any answer was reported as not lossless."""


@dataclass(slots=True)
class Pair:
    """Comparison of one contender (server) with the first contender, on the same requests. `arm` and `against` are the
    names of the two. `part` names the compared time: "total", "communication", "host", "prefill" or "decode"."""

    workload: str
    arm: str
    against: str
    part: str
    p50_s: float
    against_p50_s: float
    cut: float | None
    """Relative reduction of the median (p50): 0.25 is a quarter less time. None if the first contender's median is 0,
    or if decoding sped up by more than the acceptance length, which is impossible, see `doubt`."""
    difference_s: float
    """Median over requests of the difference to the first contender, in seconds."""
    interval_s: Interval
    """95% bootstrap interval of `difference_s` over requests, in seconds."""
    lossless: bool
    """True if both contenders are lossless."""
    doubt: str | None = None
    """Reason not to trust the comparison with plain decoding (machine busy, too few tokens), or None."""


class LatencyBench:
    """Sends all workloads to all contenders (servers to compare) and summarises their times. Call `run()`, then
    `results()` and `pairs()`."""

    def __init__(self, arms: list[Contender], workloads: list[Workload], config: LatencyConfig) -> None:
        """`arms`: the contenders."""
        self.arms, self.workloads, self.config = arms, workloads, config
        self.measured = {(workload.name, arm.name): list[Measured]() for workload in workloads for arm in arms}
        self._forms: dict[tuple[str, str], str] = {}
        """(workload, contender) -> the `response_format` type that this server accepts for a schema."""

    @property
    def num_answers(self) -> int:
        return self.config.repeat * len(self.arms) * sum(len(workload.requests) for workload in self.workloads)

    def run(self, on_answer: Callable[[str], None] = ignore) -> None:
        """Send all workloads to all contenders `repeat` times, after one short warm-up request per workload and
        contender. The contenders take turns: each gets the same few requests before all go on to the next few.
        `on_answer` gets a text that names workload and contender after each answer. Raises ConfigError if a warm-up
        request fails."""
        try:
            for workload in self.workloads:
                for arm in self.arms:
                    self._warm_up(arm, workload)
            for number in range(self.config.repeat):
                for workload in self.workloads:
                    for place, block in enumerate(self._blocks(workload)):
                        for arm in self._order(number + place):
                            on_each = partial(on_answer, f"{workload.name}, {arm.name}")
                            streams = self._block(arm, workload, block, (number, place), on_each)
                            self.measured[workload.name, arm.name] += map(measured, streams)
        finally:
            for arm in self.arms:
                arm.client.close()

    def _blocks(self, workload: Workload) -> Iterator[list[tuple[int, WorkloadRequest]]]:
        numbered = list(enumerate(workload.requests))
        for first in range(0, len(numbered), self.config.turn):
            yield numbered[first : first + self.config.turn]

    def _order(self, turn: int) -> list[Contender]:
        first = turn % len(self.arms)
        return (self.arms[first:] + self.arms[:first])[:: -1 if turn // len(self.arms) % 2 else 1]

    def _block(
        self,
        arm: Contender,
        workload: Workload,
        block: list[tuple[int, WorkloadRequest]],
        turn: tuple[int, int],
        on_answer: Callable[[], None],
    ) -> list[Stream]:
        requests = [self._request(arm, workload, index, request) for index, request in block]
        rate, due = None if self.config.concurrency else self.config.rate or workload.rate, None
        if rate:
            began, seed = time.perf_counter(), hash((self.config.seed, *turn))  # of integers: equal in every process
            due = [began + offset_s for offset_s in poisson(rate, len(requests), seed)]
        return send_all(arm.client, requests, self.config.concurrency or 1, due, on_answer)

    def _warm_up(self, arm: Contender, workload: Workload) -> None:
        """Request a short answer, which compiles its schema, and find the `response_format` that this server
        accepts."""
        request, error = workload.requests[0], None
        for form in ("json_schema", "json_object") if request.schema is not None else ("",):
            self._forms[workload.name, arm.name] = form
            error = read_answer(arm.client.post(*self._request(arm, workload, 0, request, WARM_UP_TOKENS))).error
            if error is None:
                return
            if not error.startswith(("status 400", "status 422", "status 500")):  # 500: llama-cpp-python
                break
        raise ConfigError(f"{arm.name} cannot be asked for {workload.name}: {error}")

    def _request(
        self, arm: Contender, workload: Workload, index: int, request: WorkloadRequest, max_tokens: int | None = None
    ) -> tuple[str, bytes]:
        fields = dict(arm.fields)
        if request.schema is not None:
            form = self._forms[workload.name, arm.name]
            named = {"json_schema": {"name": "answer", "schema": request.schema}}
            fields["response_format"] = {
                "type": form,
                **(named if form == "json_schema" else {"schema": request.schema}),
            }
        most = max_tokens or self.config.max_tokens or workload.max_tokens
        return api_request(request.prompt, index, self.config, most, fields)

    def results(self) -> list[LatencyResult]:
        return [_result(*names, answers) for names, answers in self.measured.items()]

    def pairs(self) -> list[Pair]:
        """Compare every other contender with the first one, for each workload: total time, communication, host, prefill
        and decode. Times that a server does not report have no Pair."""
        first = self.arms[0].name
        return [
            pair
            for workload in self.workloads
            for arm in self.arms[1:]
            for part in ("total", *GROUPS)
            if (pair := self._pair(workload.name, arm.name, first, part))
        ]

    def _pair(self, workload: str, arm: str, against: str, part: str) -> Pair | None:
        both = zip(self.measured[workload, arm], self.measured[workload, against], strict=True)
        pairs = [(ours, theirs) for ours, theirs in both if not ours.error and not theirs.error]
        if not pairs or (part != "total" and not all(ours.is_told and theirs.is_told for ours, theirs in pairs)):
            return None
        seconds = [(_seconds(ours, part), _seconds(theirs, part)) for ours, theirs in pairs]
        ours_s, theirs_s = (statistics.median(sides[side] for sides in seconds) for side in (0, 1))
        differences = [(ours - theirs,) for ours, theirs in seconds]
        why = self._doubt(workload, theirs_s / ours_s if ours_s > 0 else None, pairs) if part == "decode" else None
        return Pair(
            workload,
            arm,
            against,
            part,
            ours_s,
            theirs_s,
            1 - ours_s / theirs_s if theirs_s > 0 and why != BUSY else None,
            _median(differences),
            bootstrap(differences, _median),
            all(ours.lossless and theirs.lossless for ours, theirs in pairs),
            why,
        )

    def _doubt(self, workload: str, ratio: float | None, pairs: list[tuple[Measured, Measured]]) -> str | None:
        """Return the reason why the comparison with plain decoding allows no verdict, or None. The ratio is bounded
        only in closed loops, since at an open rate requests also delay one another, and only compared with plain
        decoding, since another drafter may cost more than it gains."""
        own, other = (_tokens_per_round([pair[side] for pair in pairs]) for side in (0, 1))
        rate = next(item.rate for item in self.workloads if item.name == workload)
        is_open = not self.config.concurrency and bool(self.config.rate or rate)
        bound = None if is_open or (other or 1.0) > 1.0 else own
        return doubt(ratio, bound, sum(ours.num_tokens for ours, _ in pairs))


def _tokens_per_round(answers: Sequence[Measured]) -> float | None:
    rounds = sum(answer.num_rounds or 0 for answer in answers)
    return 1 + sum(answer.num_accepted or 0 for answer in answers) / rounds if rounds else None


def _median(differences: Sequence[tuple[float, ...]]) -> float:
    return statistics.median(difference[0] for difference in differences)


def _seconds(answer: Measured, group: str) -> float:
    if group == "total":
        return answer.total_s
    return answer.seconds([part for segment in GROUPS[group] for part in SEGMENTS[segment]])


def _result(workload: str, arm: str, answers: list[Measured]) -> LatencyResult:
    whole = [answer for answer in answers if not answer.error]
    bars = {name: bar_of(whole, share) for name, share in SHARES.items()}
    explained = [segment for segment in SEGMENTS if segment != UNATTRIBUTED]
    total_s = sum(answer.total_s for answer in whole)
    unexplained_s = abs(sum(answer.parts.get(UNATTRIBUTED, 0.0) for answer in whole))
    return LatencyResult(
        workload=workload,
        arm=arm,
        num_answers=len(answers),
        num_failed=len(answers) - len(whole),
        failures=dict(Counter(answer.error for answer in answers if answer.error).most_common()),
        total=Spread.of([answer.total_s for answer in whole]),
        first_token=Spread.of([answer.first_s for answer in whole]),
        groups={name: Spread.of([_seconds(answer, name) for answer in whole if answer.is_told]) for name in GROUPS},
        parts={
            part: Spread.of(seconds)
            for part in PARTS
            if (seconds := [answer.parts[part] for answer in whole if part in answer.parts])
        },
        bars=bars,
        unattributed=unexplained_s / total_s if whole else None,
        is_told=bool(whole) and all(answer.is_told for answer in whole),
        largest=max(explained, key=lambda segment: bars["p50"][segment]) if whole else None,
        num_tokens=statistics.fmean(answer.num_tokens for answer in whole) if whole else None,
        tokens_per_round=_tokens_per_round(whole),
        late=Spread.of([answer.late_s for answer in whole]),
        lossless=all(answer.lossless for answer in whole),
    )


def bar_of(answers: Sequence[Measured], share: float) -> dict[str, float]:
    """Return one bar of the latency chart, as a dict: segment (such as "prefill") -> mean seconds. The mean is over the
    answers whose total time is near the percentile `share` (0.5 is the median). All values are 0.0 without answers."""
    ordered = sorted(answers, key=lambda answer: answer.total_s)
    middle, width = share * (len(ordered) - 1), max(NEAR * len(ordered), 0.5)
    near = [answer for place, answer in enumerate(ordered) if abs(place - middle) <= width]
    return {
        segment: statistics.fmean(answer.seconds(parts) for answer in near) if near else 0.0
        for segment, parts in SEGMENTS.items()
    }
