"""Where the milliseconds of each request went: the client's clock and the server's, joined by request.

    paceline bench latency --drafters none,default --workload voice

Nothing of a wall clock is used: the client measures how long it took to connect, to hand over the request and until the first
byte came, and the server tells durations of its own (`return_timings`, `serve/http/clock.py`). What lies between the client's
sending and the answer's first byte, less what the server spent until then, is the way there and back. Between first byte and
end the two measure the same thing twice, and where they differ the difference is shown as unattributed.

Arms take turns, a few requests each, so that a machine's moods meet all of them; request by request they are compared with the
first.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from paceline.bench.config import WARM_UP_TOKENS, LatencyConfig
from paceline.bench.serving.load import Answer, open_loop, read_answer
from paceline.bench.serving.workloads import Asked, Workload
from paceline.errors import ConfigError
from paceline.net.streaming import Client, Stream
from paceline.report.statistics import BUSY, Interval, Spread, bootstrap, doubt
from paceline.report.tables import ignore
from paceline.simulate.server.load import poisson

TOLD: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
SEGMENTS: dict[str, list[str]] = TOLD["segments"]
"""Of a bar: its name -> the parts in it."""
GROUPS: dict[str, list[str]] = TOLD["groups"]
"""What arms are compared by: name -> segments."""
PARTS = [part for parts in SEGMENTS.values() for part in parts]
UNATTRIBUTED = "unattributed"
SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
NEAR = 0.05
"""A percentile's bar is the mean of the requests whose rank is within this share of it: so its parts add up to its height."""
SERVER_PARTS = {"sending": "send_s"}
"""What the server calls a part, where that is another word than ours."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A drafter with its server, or a server as it is."""

    name: str
    client: Client
    model: str
    fields: dict[str, Any] = field(default_factory=dict)
    """Added to each request."""


Alone = Callable[[Arm], AbstractContextManager[None]]


@dataclass(slots=True)
class Measured:
    """One request to one arm."""

    error: str | None = None
    total_s: float = 0.0
    """From its sending, a connection included, to its end."""
    late_s: float = 0.0
    """How long after its time it was sent: the client's own delay, in no part."""
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds by part; together they are `total_s`."""
    is_told: bool = False
    """Whether the server said where its time went."""
    num_tokens: int = 0
    first_s: float = 0.0
    """From its sending to its first text."""
    num_rounds: int | None = None
    num_accepted: int | None = None
    text: str = ""
    lossless: bool = True
    """False when the server said that acceptance was mocked, or a rule lossy."""

    def seconds(self, names: Sequence[str]) -> float:
        return sum(self.parts.get(name, 0.0) for name in names)


def measured(stream: Stream) -> Measured:
    """A streamed answer with its parts."""
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
    """Seconds by part, which add up to the time from sending to end: those of our server by `timings` as
    `serve/http/clock.py` tells them, of llama.cpp's by its `timings` (prompt_ms, predicted_ms), of others one part."""
    told = answer.timings
    connect_s, send_s = stream.connected_s - stream.sent_s, stream.written_s - stream.connected_s
    wait_s, rest_s = stream.headers_s - stream.written_s, stream.ended_s - stream.headers_s
    parts = {"connect": connect_s, "send": send_s}
    if "total_s" in told:
        names = [part for part in PARTS if SERVER_PARTS.get(part, part + "_s") in told and part != "send"]
        parts |= {part: told[SERVER_PARTS.get(part, part + "_s")] for part in names if part != "first_byte"}
        first_byte_s = wait_s - told["first_byte_s"]
        if first_byte_s < 0.0:  # the server had read all of it before the client came to note that it had sent it
            parts["send"], first_byte_s = send_s + first_byte_s, 0.0
        parts["first_byte"] = first_byte_s
        parts[UNATTRIBUTED] = rest_s - (told["total_s"] - told["first_byte_s"]) + told["other_s"]
        return parts
    if "prompt_ms" in told and "predicted_ms" in told:
        parts |= {"prefill": 1e-3 * told["prompt_ms"], "verify": 1e-3 * told["predicted_ms"]}
    return parts | {"untold": stream.ended_s - stream.sent_s - sum(parts.values())}


@dataclass(slots=True)
class LatencyResult:
    """The figures of one workload and arm, in seconds, over the answers of all repetitions."""

    workload: str
    arm: str
    num_answers: int
    num_failed: int
    failures: dict[str, int]
    total: Spread
    first_token: Spread
    groups: dict[str, Spread]
    """communication, host, prefill, decode."""
    parts: dict[str, Spread]
    """Those that there are."""
    bars: dict[str, dict[str, float]]
    """p50, p90, p99 -> seconds by segment: means of the requests near that percentile of the total."""
    unattributed: float | None
    """Share of all the time that no part explains. What one answer's last piece gains on the way another's loses: `parts` has
    the spread over single answers."""
    is_told: bool
    largest: str | None
    """The segment that is largest in the p50 bar."""
    num_tokens: float | None
    """Mean of an answer."""
    tokens_per_round: float | None
    late: Spread
    lossless: bool
    """Whether no answer was said to be otherwise."""


@dataclass(slots=True)
class Pair:
    """An arm beside the first one, the same requests, in one group of parts or in all."""

    workload: str
    arm: str
    against: str
    part: str
    p50_s: float
    against_p50_s: float
    cut: float | None
    """1 - p50 over the other's p50: 0.25 is a quarter less. None if the times rule it out, see `doubt`."""
    difference_s: float
    """Median over the requests."""
    interval_s: Interval
    """95%, over the requests."""
    lossless: bool
    """Of both."""
    doubt: str | None = None
    """Why there is no verdict on decoding beside plain decoding, as of `figures.doubt`."""


class LatencyBench:
    """Arms, workloads and what was measured. `run()`, then `results()` and `pairs()`."""

    def __init__(self, arms: list[Arm], workloads: list[Workload], config: LatencyConfig, alone: Alone = nullcontext) -> None:
        """While an arm is asked, `alone` is entered with it: for servers that share a machine and cannot stand still."""
        self.arms, self.workloads, self.config, self._alone = arms, workloads, config, alone
        self.measured = {(workload.name, arm.name): list[Measured]() for workload in workloads for arm in arms}
        self._forms: dict[tuple[str, str], str] = {}
        """By workload and arm, how this wants to be asked for a schema."""

    @property
    def num_answers(self) -> int:
        return self.config.repeat * len(self.arms) * sum(len(each.requests) for each in self.workloads)

    def run(self, on_answer: Callable[[str], None] = ignore) -> None:
        """All workloads, `repeat` times: arms follow one another after each few requests, in an order that turns. Raises
        ConfigError when an arm cannot be asked."""
        try:
            for workload in self.workloads:
                for arm in self.arms:
                    with self._alone(arm):
                        self._warm_up(arm, workload)
            for number in range(self.config.repeat):
                for workload in self.workloads:
                    for place, block in enumerate(self._blocks(workload)):
                        for arm in self._order(number + place):
                            told = partial(on_answer, f"{workload.name}, {arm.name}")
                            with self._alone(arm):
                                streams = self._block(arm, workload, block, (number, place), told)
                            self.measured[workload.name, arm.name] += map(measured, streams)
        finally:
            for arm in self.arms:
                arm.client.close()

    def _blocks(self, workload: Workload) -> Iterator[list[tuple[int, Asked]]]:
        numbered = list(enumerate(workload.requests))
        for first in range(0, len(numbered), self.config.turn):
            yield numbered[first : first + self.config.turn]

    def _order(self, turn: int) -> list[Arm]:
        first = turn % len(self.arms)
        return (self.arms[first:] + self.arms[:first])[:: -1 if turn // len(self.arms) % 2 else 1]

    def _block(
        self,
        arm: Arm,
        workload: Workload,
        block: list[tuple[int, Asked]],
        turn: tuple[int, int],
        on_answer: Callable[[], None],
    ) -> list[Stream]:
        bodies = [self._body(arm, workload, index, asked) for index, asked in block]

        def send(index: int, due_s: float | None = None) -> Stream:
            stream = arm.client.post(*bodies[index], due_s)
            on_answer()
            return stream

        rate = None if self.config.concurrency else self.config.rate or workload.rate
        with ThreadPoolExecutor(len(bodies) if rate else self.config.concurrency or 1) as threads:
            try:
                if rate:
                    began, seed = time.perf_counter(), hash((self.config.seed, *turn))  # of whole numbers: the same everywhere
                    return open_loop(threads, send, [began + each for each in poisson(rate, len(bodies), seed)])
                return list(threads.map(send, range(len(bodies))))
            except BaseException:  # Ctrl-C: what is under way need not end
                threads.shutdown(wait=False, cancel_futures=True)
                arm.client.close()
                raise

    def _warm_up(self, arm: Arm, workload: Workload) -> None:
        """A short answer, its schema compiled; finds out how this server wants to be asked for one."""
        asked, error = workload.requests[0], None
        for form in ("json_schema", "json_object") if asked.schema is not None else ("",):
            self._forms[workload.name, arm.name] = form
            error = read_answer(arm.client.post(*self._body(arm, workload, 0, asked, WARM_UP_TOKENS))).error
            if error is None:
                return
            if not error.startswith(("status 400", "status 422", "status 500")):  # llama-cpp-python says 500
                break
        raise ConfigError(f"{arm.name} cannot be asked for {workload.name}: {error}")

    def _body(self, arm: Arm, workload: Workload, index: int, asked: Asked, max_tokens: int | None = None) -> tuple[str, bytes]:
        """Path and body."""
        body: dict[str, Any] = {
            "model": arm.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": max_tokens or self.config.max_tokens or workload.max_tokens,
            "temperature": self.config.temperature,
            "seed": self.config.seed + index,
            **arm.fields,
        }
        if asked.schema is not None:
            form = self._forms[workload.name, arm.name]
            named = (
                {"json_schema": {"name": "answer", "schema": asked.schema}}
                if form == "json_schema"
                else {"schema": asked.schema}
            )
            body["response_format"] = {"type": form, **named}
        path, own = asked.prompt.api_request()
        return path, json.dumps(body | own).encode()

    def results(self) -> list[LatencyResult]:
        """One for each workload and arm."""
        return [_result(*names, answers) for names, answers in self.measured.items()]

    def pairs(self) -> list[Pair]:
        """Each arm but the first beside it: the whole, and each group."""
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
        ours_s, theirs_s = (statistics.median(each[side] for each in seconds) for side in (0, 1))
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
        """Why decoding beside plain decoding allows no verdict. At an open rate requests also slow one another, and another
        drafter may cost more than it brings: neither bounds the ratio."""
        kept, others = (_tokens_per_round([pair[side] for pair in pairs]) for side in (0, 1))
        rate = next(each.rate for each in self.workloads if each.name == workload)
        is_open = not self.config.concurrency and bool(self.config.rate or rate)
        bound = None if is_open or (others or 1.0) > 1.0 else kept
        return doubt(ratio, bound, sum(ours.num_tokens for ours, _ in pairs))


def _tokens_per_round(answers: Sequence[Measured]) -> float | None:
    rounds = sum(each.num_rounds or 0 for each in answers)
    return 1 + sum(each.num_accepted or 0 for each in answers) / rounds if rounds else None


def _median(differences: Sequence[tuple[float, ...]]) -> float:
    return statistics.median(each[0] for each in differences)


def _seconds(each: Measured, group: str) -> float:
    if group == "total":
        return each.total_s
    return each.seconds([part for segment in GROUPS[group] for part in SEGMENTS[segment]])


def _result(workload: str, arm: str, answers: list[Measured]) -> LatencyResult:
    whole = [each for each in answers if not each.error]
    bars = {name: bar_of(whole, share) for name, share in SHARES.items()}
    explained = [segment for segment in SEGMENTS if segment != UNATTRIBUTED]
    total_s = sum(each.total_s for each in whole)
    unexplained_s = abs(sum(each.parts.get(UNATTRIBUTED, 0.0) for each in whole))
    return LatencyResult(
        workload=workload,
        arm=arm,
        num_answers=len(answers),
        num_failed=len(answers) - len(whole),
        failures=dict(Counter(each.error for each in answers if each.error).most_common()),
        total=Spread.of([each.total_s for each in whole]),
        first_token=Spread.of([each.first_s for each in whole]),
        groups={name: Spread.of([_seconds(each, name) for each in whole if each.is_told]) for name in GROUPS},
        parts={
            part: Spread.of(found) for part in PARTS if (found := [each.parts[part] for each in whole if part in each.parts])
        },
        bars=bars,
        unattributed=unexplained_s / total_s if whole else None,
        is_told=bool(whole) and all(each.is_told for each in whole),
        largest=max(explained, key=lambda segment: bars["p50"][segment]) if whole else None,
        num_tokens=statistics.fmean(each.num_tokens for each in whole) if whole else None,
        tokens_per_round=_tokens_per_round(whole),
        late=Spread.of([each.late_s for each in whole]),
        lossless=all(each.lossless for each in whole),
    )


def bar_of(answers: Sequence[Measured], share: float) -> dict[str, float]:
    """Seconds by segment: means of the answers whose total lies near this percentile of all totals."""
    ordered = sorted(answers, key=lambda each: each.total_s)
    middle, width = share * (len(ordered) - 1), max(NEAR * len(ordered), 0.5)
    near = [each for place, each in enumerate(ordered) if abs(place - middle) <= width]
    return {
        segment: statistics.fmean(each.seconds(parts) for each in near) if near else 0.0 for segment, parts in SEGMENTS.items()
    }
