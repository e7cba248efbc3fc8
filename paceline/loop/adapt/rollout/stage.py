"""Stages: the daemon's work in progress, such as a training with its deployment. Compares a server with the time before
a new drafter.

A stage is saved (`state.json`) before it begins. `kind` is its purpose, `name` its current step:

    retrain    training, gate, choose, swap, probation    replace the serving drafter
    propose    training, gate, choose, swap, probation    add a drafter for one cluster
    score      gate, choose                               score the other drafters on a cluster
    route      swap, probation                            route a cluster to another drafter on the server
    by hand    probation                                  judge a drafter that a user loaded by hand

A cluster is a group of similar requests, the gate a test of drafters on stored requests, a probation the trial period
of a new drafter. Of several servers only the first one, the canary, is on probation, compared with the others; a step
`spread` then loads the drafter on these. `undo` follows a swap that was refused or given up, and a failed probation.
Every step can be repeated after a failure, or a restart of the daemon."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

from paceline.loop.adapt.config import WatchConfig
from paceline.loop.adapt.rollout.evidence import Failures, fall, more_failures, variance_of_readings
from paceline.loop.adapt.servers.counted_hours import pairs_of
from paceline.loop.adapt.servers.counters import Counts, is_restarted, pace, tokens_per_round
from paceline.loop.adapt.servers.vllm_sglang.commands import IDENTITY
from paceline.loop.adapt.traffic.hours import HOUR_S, Sums, total
from paceline.loop.adapt.traffic.stored import read_span

LEAST_ROUNDS = 200
"""Minimum number of rounds in a probation (trial period of a new drafter) for any verdict."""
SPAN_S = 24 * 3600.0
"""Seconds of traffic before a swap that form its baseline."""
SAME_ROWS = 0.2
"""Relative difference of mean batch size up to which round times are compared."""
FIRST_WAIT_S, LONGEST_WAIT_S = 60.0, 3600.0
"""Pauses in seconds between retries while a server does not answer; each is twice the previous one."""
AWAY_S = 600.0
"""Seconds without an answer after which a drafter on probation is rolled back: it may be the cause."""
ON_SERVER = ("swap", "probation", "spread", "undo")
"""Steps that change or watch the server."""
WHOLE = ""
"""Key used instead of a cluster for the whole server's counters."""


@dataclass(slots=True)
class Stage:
    """One piece of work of the daemon, such as training a drafter and deploying it. `kind` is its purpose, such as
    "retrain"; `name` is its current step, such as "training" or "probation". The other fields are what a restarted
    daemon needs to continue it."""

    kind: str
    name: str
    hour: int
    clusters: tuple[str, ...]
    member: str = ""
    """Name of this stage's drafter on the server."""
    incumbent: str = ""
    """Drafter that the candidates are compared with."""
    window: dict[str, Any] = field(default_factory=dict)
    candidates: list[str] = field(default_factory=list)
    """Folders of the trained candidates, or the drafters on the server to score."""
    names: list[str] = field(default_factory=list)
    """Names on the server of the drafters in `candidates`, for kind "score"; else empty."""
    at: int = 0
    """Index of the current candidate."""
    rates: list[float] = field(default_factory=list)
    """Learning rate of each candidate; empty without a training."""
    verdicts: list[dict[str, Any]] = field(default_factory=list)
    drafter: str = ""
    """Drafter that the swap loads, and that is then on probation."""
    began: float = 0.0
    """Start of the current step, in seconds since 1970."""
    skew: float = 0.0
    """Seconds by which the system clock was set forward, less those set back, since `began`."""
    seconds: float = 0.0
    """Seconds of the trainings that have ended."""
    used: float = 0.0
    """Seconds that the current training has run under earlier daemons."""
    before: dict[str, float] = field(default_factory=dict)
    """Acceptance length before the swap, by cluster, and of the whole server ("")."""
    before_variances: dict[str, float] = field(default_factory=dict)
    """Squared standard error of the log of each value of `before`."""
    counted: list[float] = field(default_factory=list)
    """Values of the server's counters at the start of the probation, in the order of the fields of Counts."""
    pace: list[float] = field(default_factory=list)
    """Mean batch size and seconds of a round before the swap; empty if the server does not report them."""
    failures: list[float] = field(default_factory=list)
    """Failed and finished requests before the swap."""
    seen: list[float] = field(default_factory=list)
    """Values of the server's counters at the latest reading, in the order of the fields of Counts."""
    others: list[float] = field(default_factory=list)
    others_seen: list[float] = field(default_factory=list)
    """Counter values of the other servers at the start of a canary's probation, and at the latest reading; `counted`
    and `seen` are then the canary's. Empty if there is one server."""
    sums: list[list[float]] = field(default_factory=list)
    """Sums over the probation, each as a list of the fields of Sums: one for the only server, or two, for the canary
    and for all others together. Each interval between two readings of the counters counts as one request."""
    served: str = ""
    """Folder or model name that the server reports for the drafter on probation; "" if it reports neither."""
    drafts: float | None = None
    """Rounds drafted by this drafter before the probation, if the server counts by drafter."""
    undo: list[list[str | None]] = field(default_factory=list)
    """Changes of the server to undo; a copy of `Deployment.undo`."""
    why: str = ""
    """Reason for the current step: why the drafter was chosen, or in the step "undo", why it is rolled back."""
    ending: str = ""
    """Outcome after the step "undo": "refused", "rolled back", "unproven", or "failed" if the swap failed for another
    reason than the drafter. It becomes the drafter's state in lineage.json, with "passed" in place of "failed", and for
    the kind "route" with "routed back" in place of "rolled back"."""
    pending: list[dict[str, Any]] = field(default_factory=list)
    """Updates of lineage.json that are not written yet, oldest first. Each is a dict of arguments: of `Lineage.add` if
    it has the key "parents", else of `Lineage.mark`."""
    num_tries: int = 0
    """Consecutive tries without an answer."""
    wait_until: float = 0.0
    away_since: float = 0.0
    """`wait_until`: time of the next try; `away_since`: time of the first failed try. Seconds since 1970; 0 while the
    server answers."""

    @property
    def trains(self) -> bool:
        return self.kind in ("retrain", "propose") and self.name not in ("probation", "spread", "undo")

    def lasted(self, now: float) -> float:
        """Seconds from the start of the current step to `now` (seconds since 1970), corrected for changes of the system
        clock."""
        return now - self.began - self.skew

    def pause(self, now: float) -> None:
        """If the current step is "training", add the seconds since its start to the field `used`. A restarted daemon
        then knows how long the training has run. Has no effect in other steps. `now`: seconds since 1970."""
        if self.name == "training":
            self.used += max(self.lasted(now), 0.0)
            self.began, self.skew = now, 0.0

    def clock_moved(self, by: float) -> None:
        """Adjust the stored times after the system clock was set forward by `by` seconds (negative: back), so that
        durations stay correct."""
        self.skew += by
        self.wait_until += by if self.wait_until else 0.0
        self.away_since += by if self.away_since else 0.0

    def wait(self, now: float) -> None:
        """Record that the server did not answer at `now` (seconds since 1970), and set the time of the next try. The
        pause doubles with each failed try, from 1 minute to 1 hour. During a probation (trial period of a new drafter)
        there is no pause."""
        self.away_since = self.away_since or now
        pause = min(FIRST_WAIT_S * 2 ** min(self.num_tries, 10), LONGEST_WAIT_S)  # 2.0**1024 overflows
        self.wait_until = now if self.name == "probation" else now + pause
        self.num_tries += 1

    def reached(self) -> None:
        """Record that the server answers again: resets the pause between tries."""
        self.num_tries, self.wait_until, self.away_since = 0, 0.0, 0.0

    def begin_probation(self, traces: Path, earlier: Sequence[Counts], counts: Counts, now: float) -> None:
        """Begin the trial period of a new drafter (probation) at `now`, in seconds since 1970. Also stores how the
        server did before, as the baseline for the trial:
        - Acceptance length of each cluster, from the traces of the last 24 hours in the folder `traces`.
        - Acceptance length, time per round and failures of the whole server, from its counters.

        `earlier`: readings of the counters before `now`, oldest first; `counts`: the reading at `now`."""
        first = earlier[0] if earlier else counts
        spans = read_span(traces, now - SPAN_S, now)
        self.before = {name: sums.tokens_per_round for name, sums in spans.items() if sums.rounds >= LEAST_ROUNDS}
        self.before_variances = {name: spans[name].log_variance for name in self.before}
        sums, requests = Sums.of(pairs_of([*earlier, counts])), counts.requests - first.requests
        if sums.requests and (rate := tokens_per_round(first, counts)):
            self.before[WHOLE], self.before_variances[WHOLE] = rate, variance_of_readings(sums, requests)
        self.pace = list(pace(first, counts) or ())
        self.failures = [counts.errors - first.errors, counts.requests - first.requests]
        self.begin_counting(counts, now)

    def begin_counting(self, counts: Counts, now: float, apart: tuple[Counts, Counts] | None = None) -> None:
        """Set the start of a new drafter's trial period (probation) to `now`, in seconds since 1970. Stores the
        counters at this time, so that only later requests and rounds count for the trial. Leaves the baseline from
        `begin_probation` unchanged.

        `counts`: sum of all servers' counters. `apart`: None with one server. With several servers it is stored in
        place of `counts`: (counters of the server that has the new drafter; sum of the other servers' counters)."""
        self.name, self.began, self.skew = "probation", now, 0.0
        self.counted = self.seen = list(astuple(apart[0] if apart else counts))
        self.others = self.others_seen = list(astuple(apart[1])) if apart else []
        self.sums = []

    def look(self, counts: Counts, drafts: float | None) -> None:
        """Store a reading of the server's counters during a trial period. If counters are lower than at the last
        reading, the server was restarted: the trial's rounds are then counted from this reading on. `drafts`: total
        rounds in which this stage's drafter has drafted; None if the server does not count rounds by drafter."""
        if is_restarted(Counts(*self.seen), counts):
            self.counted = self.seen = list(astuple(counts))
            self.sums = []
        if drafts is not None and self.drafts is not None and drafts < self.drafts:
            self.drafts = 0.0  # the server was restarted with this drafter
        self._add_readings((self.seen, counts))
        self.seen = list(astuple(counts))

    def _add_readings(self, *readings: tuple[Sequence[float], Counts]) -> None:
        """Add to `sums`, for each server, what was counted from its latest reading to this one."""
        sums = [Sums(*each) for each in self.sums] if len(self.sums) == len(readings) else [Sums()] * len(readings)
        gains = [Sums.of(pairs_of([Counts(*then), now])) for then, now in readings]
        self.sums = [list(astuple(each + gain)) for each, gain in zip(sums, gains, strict=True)]

    def rounds(self, drafts: float | None) -> float:
        """Returns the number of rounds since the start of the trial period by which the new drafter can be judged:
        - If the server counts rounds by drafter: those of this stage's drafter.
        - Otherwise, with one server: all its rounds.
        - Otherwise, with several servers: the rounds of the server that has the new drafter, or of all others together
          if these are fewer.

        `drafts`: total rounds in which this stage's drafter has drafted; None if the server does not count rounds by
        drafter."""
        if drafts is not None and self.drafts is not None:
            return drafts - self.drafts
        return min(each.rounds for each in self._gains())

    def _gains(self) -> list[Counts]:
        """Counts since the start of the probation: of the server, or of the canary and of the others."""
        pairs = [(self.seen, self.counted), *([(self.others_seen, self.others)] if self.others else [])]
        return [Counts(*(now - then for now, then in zip(*pair, strict=True))) for pair in pairs]

    def look_apart(self, apart: tuple[Counts, Counts]) -> None:
        """Store a reading of several servers' counters during a trial period. `apart`: (counters of the server that has
        the new drafter; sum of the other servers' counters)."""
        self._add_readings((self.seen, apart[0]), (self.others_seen, apart[1]))
        self.seen, self.others_seen = (list(astuple(counts)) for counts in apart)

    def fault_of_canary(self, config: WatchConfig) -> str | None:
        """Tests if the server that has the new drafter does worse than the other servers in the trial period. Returns a
        message if it has clearly more failures or a clearly lower acceptance length; else None. `config` sets the
        limits."""
        canary, others = self._gains()
        where = "on the other servers"
        before, now = (Failures(each.errors, each.requests) for each in (others, canary))
        if failing := more_failures(before, now, config.most_errors, where):
            return failing
        if min(canary.rounds, others.rounds) < LEAST_ROUNDS:
            return None
        lengths = [1 + each.accepted / each.rounds for each in (canary, others)]
        pairs = zip(self.sums, (canary, others), strict=True)
        variance = sum(variance_of_readings(Sums(*sums), each.requests) for sums, each in pairs)
        return fall(lengths[0], lengths[1], variance, config.most_drop, " on the canary", where)

    def kept_why(self, drafts: float | None) -> str:
        """Returns the reason for keeping the new drafter, as text for the log. With one server it names the number of
        rounds in which nothing got worse; with several servers, acceptance length with the new drafter and with the old
        one. `drafts`: total rounds in which this stage's drafter has drafted; None if the server does not count rounds
        by drafter."""
        if not self.others:
            return f"nothing fell in {self.rounds(drafts):g} rounds"
        canary, others = self._gains()
        figures = [f"{1 + each.accepted / max(each.rounds, 1):.2f} tokens a round" for each in (canary, others)]
        return f"{figures[0]} in {canary.rounds:g} rounds of the canary, {figures[1]} on the other servers"

    def is_over(self, now: float, config: WatchConfig, drafts: float | None) -> str | None:
        """Checks at `now` (seconds since 1970) if the trial period can end. To be called after `fault` has found
        nothing. `drafts`: total rounds in which this stage's drafter has drafted; None if the server does not count
        rounds by drafter. Returns:
        - "proven": the trial has lasted `config.probation_minutes`, and had at least 200 rounds.
        - "unproven": the trial has lasted `config.most_probation_hours`, but had fewer than 200 rounds.
        - None: the trial continues.

        A trial with enough rounds is also "unproven" if acceptance length could not be compared: the clock was set
        back, and the whole server's acceptance length before the trial is unknown."""
        if self.lasted(now) < 60 * config.probation_minutes:
            return None
        if self.rounds(drafts) >= LEAST_ROUNDS:
            return "proven" if self.skew >= 0 or WHOLE in self.before else "unproven"
        return "unproven" if self.lasted(now) >= config.most_probation_hours * HOUR_S else None

    def fault(self, traces: Path, counts: Counts, now: float, config: WatchConfig) -> str | None:
        """Tests if the server does worse now than before the new drafter. Returns a message if there are clearly more
        failures, clearly longer rounds or a clearly lower acceptance length; else None. `counts`: the server's counters
        at `now`, in seconds since 1970; `config` sets the limits.

        If the folder `traces` has at least 200 rounds of the trial period, the acceptance length in these traces is
        compared with the earlier values of the same clusters. Otherwise the acceptance length in the counters is
        compared with the whole server's earlier value. If the clock was set back, traces may be missing; both are then
        compared."""
        then = Counts(*self.counted) + (Counts(*self.others) if self.others else Counts())
        now_failures = Failures(counts.errors - then.errors, counts.requests - then.requests)
        if failing := more_failures(Failures(*self.failures or (0.0, 0.0)), now_failures, config.most_errors):
            return failing
        if self.pace and (now_pace := pace(then, counts)) and _is_slower(self.pace, now_pace, config.most_slowdown):
            return f"a round takes {1000 * now_pace[1]:.1f} ms, {1000 * self.pace[1]:.1f} before with as many rows"
        spans = read_span(traces, self.began, now)
        # A drafter of one cluster: that one alone.
        compared = self.clusters if self.kind in ("route", "propose") else spans
        spans = {name: sums for name, sums in spans.items() if name in self.before and name in compared}
        if (seen := total(spans.values())).rounds >= LEAST_ROUNDS:
            rounds = {name: sums.tokens / self.before[name] for name, sums in spans.items()}
            expected = seen.tokens / sum(rounds.values())
            variance = seen.log_variance + self._variance_before(rounds)
            fallen = fall(seen.tokens_per_round, expected, variance, config.most_drop)
            if fallen or self.skew >= 0:
                return fallen
        rate = tokens_per_round(then, counts)
        if rate is None or WHOLE not in self.before or counts.rounds - then.rounds < LEAST_ROUNDS:
            return None
        variance = variance_of_readings(total(Sums(*each) for each in self.sums), now_failures.requests)
        variance += self._variance_before({WHOLE: 1.0})
        return fall(rate, self.before[WHOLE], variance, config.most_drop, " by its metrics")

    def _variance_before(self, rounds: Mapping[str, float]) -> float:
        """Squared standard error of the log of the acceptance length in `before`, with these rounds of each cluster;
        0 for a probation that a daemon without these errors began."""
        whole = sum(rounds.values())
        return sum((each / whole) ** 2 * self.before_variances.get(name, 0.0) for name, each in rounds.items())


def _is_slower(before: Sequence[float], now: Sequence[float], most: float) -> bool:
    """Compares round times at similar batch sizes only: a full batch takes longer."""
    return abs(now[0] / before[0] - 1) < SAME_ROWS and now[1] > before[1] * (1 + most)


def word_of(clusters: Sequence[str]) -> str:
    """Joins the names of these clusters to one name for a folder or drafter: letters, digits and dashes, at most 40
    characters."""
    return "-".join(re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-") or "cluster" for name in clusters)[:40]


KINDS = ("retrain", "propose", "score", "route", "by hand")
NAMES = ("training", "gate", "choose", "swap", "probation", "spread", "undo")
NUM_COUNTS = len(astuple(Counts()))


def read_stage(fields: dict[str, Any]) -> Stage:
    """Rebuilds a stage from its JSON fields. Raises ValueError, TypeError or KeyError if the fields are invalid."""
    kind = "by hand" if fields["kind"] == "found" else fields["kind"]  # its earlier name
    stage = Stage(**{**fields, "kind": kind, "clusters": tuple(fields["clusters"])})
    is_job = stage.name in ("training", "gate")
    texts = (stage.member, stage.incumbent, stage.drafter, stage.served, stage.why, stage.ending)
    times = (stage.began, stage.skew, stage.seconds, stage.used, stage.wait_until, stage.away_since)
    numbers = (*times, stage.at, stage.num_tries)
    sound = {
        "kind": stage.kind in KINDS,
        "name": stage.name in NAMES,
        "hour": type(stage.hour) is int and 0 <= stage.hour < 10**9,
        "clusters": _all(stage.clusters, str) and (bool(stage.clusters) or stage.kind == "by hand"),
        "texts": _all(texts, str),
        "times": _are_numbers(numbers) and type(stage.at) is type(stage.num_tries) is int,
        "candidates": _all(stage.candidates, str) and (bool(stage.candidates) or stage.kind in ("route", "by hand")),
        "names": _all(stage.names, str) and len(stage.names) == len(stage.candidates) * (stage.kind == "score"),
        "at": not is_job or 0 <= stage.at < len(stage.candidates),
        "rates": _are_numbers(stage.rates) and len(stage.rates) in (0, len(stage.candidates)),
        "verdicts": _all(stage.verdicts, dict)
        and all("reason" in verdict and "passed" in verdict for verdict in stage.verdicts),
        "number of verdicts": len(stage.verdicts) == len(stage.candidates)
        or (stage.name != "choose" and len(stage.verdicts) < len(stage.candidates)),
        "window": not is_job or type(stage.window["since"]) is int,
        "tracked": _all(stage.window.get("tracked", ()), str),
        "folder": stage.name != "training" or type(stage.window["folder"]) is str,
        "before": all(
            _all(values, str) and _are_numbers(values.values()) for values in (stage.before, stage.before_variances)
        ),
        "counts": all(
            _are_numbers(counts) and len(counts) in (0, NUM_COUNTS)
            for counts in (stage.counted, stage.seen, stage.others, stage.others_seen)
        ),
        "sums": all(_are_numbers(sums) and len(sums) == len(astuple(Sums())) for sums in stage.sums),
        "counts of a canary": len(stage.others) == len(stage.others_seen),
        "counts of a probation": stage.name != "probation" or len(stage.counted) == len(stage.seen) == NUM_COUNTS,
        "pace": all(_are_numbers(pair) and len(pair) in (0, 2) for pair in (stage.pace, stage.failures)),
        "drafts": stage.drafts is None or _are_numbers([stage.drafts]),
        "undo": all(_all(change, str, NoneType) and len(change) in (3, 4) for change in stage.undo),
        "command": all(IDENTITY.fullmatch(str(change[3])) for change in stage.undo if len(change) == 4),
        "pending": _all(stage.pending, dict)
        and all(_all((entry["drafter"], entry["state"]), str) for entry in stage.pending),
    }
    if odd := [name for name, is_sound in sound.items() if not is_sound]:
        raise ValueError(f"impossible {odd[0]}")
    return stage


def _all(values: Iterable[Any], *kinds: type) -> bool:
    return all(isinstance(value, kinds) for value in values)


def _are_numbers(values: Iterable[Any]) -> bool:
    return all(type(value) in (int, float) and math.isfinite(value) for value in values)
