"""What the daemon has under way, and whether a server is worse than before it.

A stage is written down before it begins (`state.json`). Its kind says what it is for, its name what is happening now:

    retrain    training, gate, probation     another drafter in the place of the one that serves
    propose    training, gate, probation     a drafter beside it, for one cluster
    score      gate                          how the other members would do on a cluster
    route      probation                     a cluster goes to a member that is there
    found      probation                     a drafter that somebody loaded by hand
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from paceline.adapt.config import WatchConfig
from paceline.adapt.counts import Counts, pace, tokens_per_round
from paceline.adapt.stored import read_span

LEAST_ROUNDS = 200
"""Rounds that probation must have seen before it says anything."""
SPAN_S = 24 * 3600.0
"""Traffic before a swap that a new drafter is compared with."""
SAME_ROWS = 0.2
"""Rounds whose mean number of rows differs by less than this share are compared."""
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
    verdicts: list[dict[str, Any]] = field(default_factory=list)
    drafter: str = ""
    """In probation."""
    began: float = 0.0
    """Seconds since 1970; of this stage."""
    seconds: float = 0.0
    """Spent on training so far."""
    before: dict[str, float] = field(default_factory=dict)
    """In probation: tokens a round of each cluster before the swap, and of the whole server ("")."""
    counted: list[float] = field(default_factory=list)
    """What the server had counted by then, as of Counts."""
    pace: list[float] = field(default_factory=list)
    """Rows of a round, and its seconds, before the swap; where the server tells."""
    undo: list[list[str | None]] = field(default_factory=list)
    """As of Deployment."""

    @property
    def trains(self) -> bool:
        return self.kind in ("retrain", "propose") and self.name != "probation"

    def begin_probation(self, traces: Path, first: Counts | None, counts: Counts, now: float) -> None:
        """Write down how things were; `first` is the oldest reading of the server that is known."""
        self.name, self.began = "probation", now
        spans = read_span(traces, now - SPAN_S, now)
        self.before = {name: sums.tokens_per_round for name, sums in spans.items() if sums.rounds >= LEAST_ROUNDS}
        if first is not None and (rate := tokens_per_round(first, counts)):
            self.before[WHOLE] = rate
        self.counted = list(astuple(counts))
        self.pace = list((pace(first, counts) if first is not None else None) or ())

    def wrong(self, traces: Path, counts: Counts, now: float, config: WatchConfig) -> str | None:
        """What is worse than before, if anything. By cluster where traces tell, so that the mix of clusters moves nothing."""
        then = Counts(*self.counted)
        if counts.errors > then.errors:
            return f"{counts.errors - then.errors:g} requests ended in an error"
        if self.pace and (now_pace := pace(then, counts)) and _is_slower(self.pace, now_pace, config.most_slowdown):
            return f"a round takes {1000 * now_pace[1]:.1f} ms, {1000 * self.pace[1]:.1f} before with as many rows"
        least = 1 - config.most_drop
        spans = {name: sums for name, sums in read_span(traces, self.began, now).items() if name in self.before}
        rounds = sum(sums.rounds for sums in spans.values())
        if rounds >= LEAST_ROUNDS:
            tokens = sum(sums.tokens for sums in spans.values())
            expected = tokens / sum(sums.tokens / self.before[name] for name, sums in spans.items())
            told = f"{tokens / rounds:.2f} tokens a round, {expected:.2f} before"
            return told if tokens / rounds < least * expected else None
        rate = tokens_per_round(then, counts)
        if rate is None or WHOLE not in self.before or counts.rounds - then.rounds < LEAST_ROUNDS:
            return None
        before = self.before[WHOLE]
        return f"{rate:.2f} tokens a round by its metrics, {before:.2f} before" if rate < least * before else None


def _is_slower(before: Sequence[float], now: Sequence[float], most: float) -> bool:
    """Rounds are compared where they had about as many rows: a full batch takes longer."""
    return abs(now[0] / before[0] - 1) < SAME_ROWS and now[1] > before[1] * (1 + most)


def word_of(clusters: Sequence[str]) -> str:
    """Names clusters where only letters, digits and dashes may stand."""
    return "-".join(re.sub(r"[^A-Za-z0-9]+", "-", each).strip("-") or "cluster" for each in clusters)[:40]
