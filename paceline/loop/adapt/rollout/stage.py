"""What the daemon has under way, and whether a server is worse than before it.

A stage is written down before it begins (`state.json`). Its kind says what it is for, its name what is happening now:

    retrain    training, gate, choose, swap, probation    another drafter in the place of the one that serves
    propose    training, gate, choose, swap, probation    a drafter beside it, for one cluster
    score      gate, choose                               how the other members would do on a cluster
    route      swap, probation                            a cluster goes to a member that is there
    found      probation                                  a drafter that somebody loaded by hand

`undo` follows a swap that was refused or given up, and a probation that was not passed. Each of these can be begun
again where it was broken off by a server that does not answer, a full disk, or the daemon's end.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

from paceline.loop.adapt.config import WatchConfig
from paceline.loop.adapt.rollout.evidence import Failures, fall, more_failures, variance_of_rounds
from paceline.loop.adapt.servers.counters import Counts, is_restarted, pace, tokens_per_round
from paceline.loop.adapt.traffic.hours import HOUR_S, Sums, total
from paceline.loop.adapt.traffic.stored import read_span

LEAST_ROUNDS = 200
"""Rounds that a probation must have seen before it says anything, good or bad."""
SPAN_S = 24 * 3600.0
"""Traffic before a swap that a new drafter is compared with."""
SAME_ROWS = 0.2
"""Rounds whose mean number of rows differs by less than this share are compared."""
FIRST_WAIT_S, LONGEST_WAIT_S = 60.0, 3600.0
"""Pauses between tries while a server does not answer; each is twice as long as the one before."""
AWAY_S = 600.0
"""A drafter in probation is taken back when the server does not answer for so long: that may be the drafter's doing."""
ON_SERVER = ("swap", "probation", "undo")
"""Names of stages that change the server, or watch it."""
WHOLE = ""
"""In place of a cluster: all that the server counts."""


@dataclass(slots=True)
class Stage:
    """One thing that is under way."""

    kind: str
    name: str
    hour: int
    clusters: tuple[str, ...]
    member: str = ""
    """The name in the pool under which the drafter serves, or will."""
    incumbent: str = ""
    """The drafter that a candidate is compared with."""
    window: dict[str, Any] = field(default_factory=dict)
    candidates: list[str] = field(default_factory=list)
    """Drafters, by number: those that are trained, or members that are scored."""
    names: list[str] = field(default_factory=list)
    """Of a score: the members' names."""
    at: int = 0
    """Which candidate."""
    rates: list[float] = field(default_factory=list)
    """Of a training: the learning rate of each candidate."""
    verdicts: list[dict[str, Any]] = field(default_factory=list)
    drafter: str = ""
    """In probation."""
    began: float = 0.0
    """Seconds since 1970; of this stage."""
    skew: float = 0.0
    """Seconds by which the clock was set forward since it began, less those by which it was set back."""
    seconds: float = 0.0
    """Spent on training so far."""
    before: dict[str, float] = field(default_factory=dict)
    """In probation: tokens a round of each cluster before the swap, and of the whole server ("")."""
    counted: list[float] = field(default_factory=list)
    """What the server had counted by then, as of Counts."""
    pace: list[float] = field(default_factory=list)
    """Rows of a round, and its seconds, before the swap; where the server tells."""
    failures: list[float] = field(default_factory=list)
    """Requests that ended in an error, and all that ended, before the swap."""
    seen: list[float] = field(default_factory=list)
    """Counts of the latest look."""
    served: str = ""
    """Name by which the server lists the drafter that is in probation."""
    drafts: float | None = None
    """Rounds in which the member had drafted by then, where the server counts by member."""
    undo: list[list[str | None]] = field(default_factory=list)
    """As of Deployment."""
    why: str = ""
    """In swap and probation: why it was chosen; in undo: why it is taken back."""
    ending: str = ""
    """In undo: the drafter's state in the lineage, "refused", "rolled back" or "unproven"; "failed" leaves "passed"."""
    pending: list[dict[str, Any]] = field(default_factory=list)
    """Arguments of `Lineage.add`, where they have parents, or of `Lineage.mark`: not written yet, oldest first."""
    num_tries: int = 0
    """Tries in a row at which the server did not answer."""
    wait_until: float = 0.0
    away_since: float = 0.0
    """Seconds since 1970, as of the next try and of the first of these; 0: it answers."""

    @property
    def trains(self) -> bool:
        return self.kind in ("retrain", "propose") and self.name not in ("probation", "undo")

    def lasted(self, now: float) -> float:
        """Seconds since it began, whatever was done to the clock."""
        return now - self.began - self.skew

    def clock_moved(self, by: float) -> None:
        """Note that the clock was set forward by so many seconds, or back."""
        self.skew += by
        self.wait_until += by if self.wait_until else 0.0
        self.away_since += by if self.away_since else 0.0

    def wait(self, now: float) -> None:
        """Note that the server does not answer; the next try comes later, but a probation goes on looking."""
        self.away_since = self.away_since or now
        pause = min(FIRST_WAIT_S * 2 ** min(self.num_tries, 10), LONGEST_WAIT_S)  # no float has 2**1024
        self.wait_until = now if self.name == "probation" else now + pause
        self.num_tries += 1

    def reached(self) -> None:
        """Note that the server answers."""
        self.num_tries, self.wait_until, self.away_since = 0, 0.0, 0.0

    def begin_probation(self, traces: Path, first: Counts | None, counts: Counts, now: float) -> None:
        """Keep acceptance, pace and failures from before the new drafter, to compare later readings with.

        `counts` is the server's reading at `now`, `first` its oldest one, if there is one.
        """
        spans = read_span(traces, now - SPAN_S, now)
        self.before = {name: sums.tokens_per_round for name, sums in spans.items() if sums.rounds >= LEAST_ROUNDS}
        if first is not None and (rate := tokens_per_round(first, counts)):
            self.before[WHOLE] = rate
        self.pace = list((pace(first, counts) if first is not None else None) or ())
        self.failures = [0.0, 0.0]
        if first is not None:
            self.failures = [counts.errors - first.errors, counts.requests - first.requests]
        self.begin_counting(counts, now)

    def begin_counting(self, counts: Counts, now: float) -> None:
        """Count from now on; what is known of before stays."""
        self.name, self.began, self.skew = "probation", now, 0.0
        self.counted, self.seen = list(astuple(counts)), list(astuple(counts))

    def look(self, counts: Counts, drafts: float | None) -> None:
        """Take a reading. Counters that go back are those of another daemon, which did not know of a restart."""
        if is_restarted(Counts(*self.seen), counts):
            self.counted = list(astuple(counts))
        if drafts is not None and self.drafts is not None and drafts < self.drafts:
            self.drafts = 0.0  # the server was started again with this drafter
        self.seen = list(astuple(counts))

    def rounds(self, drafts: float | None) -> float:
        """Rounds that tell of this drafter: its own where the server counts by member."""
        if drafts is not None and self.drafts is not None:
            return drafts - self.drafts
        return Counts(*self.seen).rounds - Counts(*self.counted).rounds

    def is_over(self, now: float, config: WatchConfig, drafts: float | None) -> str | None:
        """Returns how a probation without a fault ends, "proven" or "unproven"; None while it goes on."""
        if self.lasted(now) < 60 * config.probation_minutes:
            return None
        if self.rounds(drafts) >= LEAST_ROUNDS:
            return "proven" if self.skew >= 0 or WHOLE in self.before else "unproven"
        return "unproven" if self.lasted(now) >= config.most_probation_hours * HOUR_S else None

    def wrong(self, traces: Path, counts: Counts, now: float, config: WatchConfig) -> str | None:
        """Returns how the server is worse than before, or None.

        Compared by cluster where traces tell, so that the mix of clusters moves nothing. After the clock was set back
        traces tell of some of the time alone: the metrics are compared, too."""
        then = Counts(*self.counted)
        now_failures = Failures(counts.errors - then.errors, counts.requests - then.requests)
        if failing := more_failures(Failures(*self.failures or (0.0, 0.0)), now_failures, config.most_errors):
            return failing
        if self.pace and (now_pace := pace(then, counts)) and _is_slower(self.pace, now_pace, config.most_slowdown):
            return f"a round takes {1000 * now_pace[1]:.1f} ms, {1000 * self.pace[1]:.1f} before with as many rows"
        spans = self._judged_by(read_span(traces, self.began, now))
        if (seen := total(spans.values())).rounds >= LEAST_ROUNDS:
            expected = seen.tokens / sum(sums.tokens / self.before[name] for name, sums in spans.items())
            fallen = fall(seen.tokens_per_round, expected, seen.log_variance, config.most_drop)
            if fallen or self.skew >= 0:
                return fallen
        rate = tokens_per_round(then, counts)
        if rate is None or WHOLE not in self.before or counts.rounds - then.rounds < LEAST_ROUNDS:
            return None
        variance = variance_of_rounds(rate, counts.rounds - then.rounds)
        return fall(rate, self.before[WHOLE], variance, config.most_drop, " by its metrics")

    def _judged_by(self, spans: Mapping[str, Sums]) -> dict[str, Sums]:
        """Clusters that are compared: those known from before, and of a member for one cluster that one alone."""
        alone = self.clusters if self.kind in ("route", "propose") else None
        return {name: sums for name, sums in spans.items() if name in self.before and (alone is None or name in alone)}


def _is_slower(before: Sequence[float], now: Sequence[float], most: float) -> bool:
    """Rounds are compared where they had about as many rows: a full batch takes longer."""
    return abs(now[0] / before[0] - 1) < SAME_ROWS and now[1] > before[1] * (1 + most)


def word_of(clusters: Sequence[str]) -> str:
    """Names clusters where only letters, digits and dashes may stand."""
    return "-".join(re.sub(r"[^A-Za-z0-9]+", "-", each).strip("-") or "cluster" for each in clusters)[:40]


KINDS = ("retrain", "propose", "score", "route", "found")
NAMES = ("training", "gate", "choose", "swap", "probation", "undo")
NUM_COUNTS = len(astuple(Counts()))


def read_stage(fields: dict[str, Any]) -> Stage:
    """A stage as `asdict` and JSON have it. Raises ValueError, TypeError or KeyError on one that no daemon has written."""
    stage = Stage(**{**fields, "clusters": tuple(fields["clusters"])})
    is_job, verdicts = stage.name in ("training", "gate"), len(stage.verdicts)
    texts = (stage.member, stage.incumbent, stage.drafter, stage.served, stage.why, stage.ending)
    numbers = (stage.began, stage.skew, stage.seconds, stage.wait_until, stage.away_since, stage.at, stage.num_tries)
    sound = {
        "kind": stage.kind in KINDS,
        "name": stage.name in NAMES,
        "hour": type(stage.hour) is int and 0 <= stage.hour < 10**9,
        "clusters": _all(stage.clusters, str) and (bool(stage.clusters) or stage.kind == "found"),
        "texts": _all(texts, str),
        "times": _are_numbers(numbers) and type(stage.at) is type(stage.num_tries) is int,
        "candidates": _all(stage.candidates, str) and (bool(stage.candidates) or stage.kind in ("route", "found")),
        "names": _all(stage.names, str) and len(stage.names) == len(stage.candidates) * (stage.kind == "score"),
        "at": not is_job or 0 <= stage.at < len(stage.candidates),
        "rates": _are_numbers(stage.rates) and len(stage.rates) in (0, len(stage.candidates)),
        "verdicts": _all(stage.verdicts, dict) and all("reason" in each and "passed" in each for each in stage.verdicts),
        "number of verdicts": verdicts <= len(stage.candidates)
        and (stage.name != "choose" or verdicts == len(stage.candidates)),
        "window": not is_job or type(stage.window["since"]) is int,
        "folder": stage.name != "training" or type(stage.window["folder"]) is str,
        "before": _all(stage.before, str) and _are_numbers(stage.before.values()),
        "counts": all(_are_numbers(each) and len(each) in (0, NUM_COUNTS) for each in (stage.counted, stage.seen)),
        "counts of a probation": stage.name != "probation" or len(stage.counted) == len(stage.seen) == NUM_COUNTS,
        "pace": all(_are_numbers(each) and len(each) in (0, 2) for each in (stage.pace, stage.failures)),
        "drafts": stage.drafts is None or _are_numbers([stage.drafts]),
        "undo": all(_all(each, str, NoneType) and len(each) in (1, 3) for each in stage.undo),
        "pending": _all(stage.pending, dict) and all(_all((each["drafter"], each["state"]), str) for each in stage.pending),
    }
    if odd := [name for name, is_sound in sound.items() if not is_sound]:
        raise ValueError(f"impossible {odd[0]}")
    return stage


def _all(values: Iterable[Any], *kinds: type) -> bool:
    return all(isinstance(each, kinds) for each in values)


def _are_numbers(values: Iterable[Any]) -> bool:
    return all(type(each) in (int, float) and math.isfinite(each) for each in values)
