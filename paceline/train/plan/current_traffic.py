"""Measures a server's current traffic, from its traces and its metrics, for `paceline advise`.

seen = seen_in_traces(Path("traces"), tag="acme")          # answers, their lengths, rounds
seen = with_server(seen, seen_in_server(parse_server(text), url))   # and what the server's counters add
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.data.tags import refuse_unknown, tag_of
from paceline.errors import ConfigError, needing, reraised
from paceline.simulate.server_logs import Seen as ServerSeen
from paceline.simulate.speedup import Acceptance, chance_for, constant, from_rounds, from_survival

LEAST_ROUNDS = 200
"""Fewest rounds from which an acceptance length is taken."""
USUAL_DRAFTS = 7
"""Drafts per round that are assumed if a server reports only its acceptance length."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Measurements of a server's current traffic: acceptance, answers and concurrent requests. A value that was not
    measured has its field's default."""

    source: str = ""
    """Description of the measurements; empty without measurements."""
    acceptance: Acceptance | None = None
    """Acceptance by draft position; None if nothing, or too little, was drafted."""
    tokens_per_round: float = 1.0
    """Acceptance length."""
    answers: int | None = None
    """Number of answers with known tokens."""
    answer_tokens: float | None = None
    """Mean tokens per answer."""
    streams: int | None = None
    """Concurrent requests."""
    num_drafted: int = 0
    """Maximum number of drafts in a round; 0 without drafts."""
    drafter: str = ""
    """Method or name of the drafter of all rounds with drafts; empty if the traces name none or several."""
    by_tag: dict[str, Seen] = field(default_factory=dict)
    """Tag of the requests -> measurements of its traffic; {} if there are not several tags."""


def seen_in_server(seen: ServerSeen, url: str) -> Seen:
    """Returns measurements of the traffic of the server at `url`, computed from the metrics `seen` that it reported."""
    running = seen.samples[0].running if seen.samples else None
    mean, rounds = seen.tokens / seen.answers if seen.answers else None, seen.tokens_per_round or 1.0
    acceptance, drafted = (from_survival(seen.survival), len(seen.survival)) if seen.survival else (None, 0)
    if acceptance is None and rounds > 1:
        drafted = max(math.ceil(rounds), seen.num_drafted or USUAL_DRAFTS)
        acceptance = constant(chance_for(rounds, drafted))
    drafts = f"acceptance length {rounds:.2f}" if seen.tokens_per_round else "no drafts"
    return Seen(f"{drafts} since the start of {url} ({seen.server})", acceptance, rounds, None, mean, running, drafted)


def with_server(traces: Seen, server: Seen) -> Seen:
    """Returns the measurements from a server's traces, `traces`, completed by those from its metrics, `server`. The
    number of concurrent requests is taken from `server`. Acceptance is taken from `server` only if the traces do not
    show it. Each tag's measurements are completed by the same values, since the metrics are not divided by tag."""
    added = replace(traces, streams=server.streams, source=f"{traces.source}; {server.source}")
    if traces.acceptance is None:
        added = replace(
            added, acceptance=server.acceptance, tokens_per_round=server.tokens_per_round,
            num_drafted=server.num_drafted, drafter=server.drafter,
        )  # fmt: skip
    return replace(added, by_tag={tag: with_server(seen, server) for tag, seen in traces.by_tag.items()})


@dataclass(slots=True)
class _Counts:
    """Rounds and lengths of one customer's answers."""

    rounds: list[tuple[int, int]] = field(default_factory=list)
    """(drafted, accepted)"""
    lengths: list[int] = field(default_factory=list)
    drafters: set[str] = field(default_factory=set)
    """Names of the drafters of answers with drafts."""
    num_prompts: int = 0
    """Prompts without an answer whose tokens are known."""

    def add(self, row: dict[str, Any]) -> None:
        if not row["answer_ids"]:
            self.num_prompts += 1  # the answer's tokens are unknown: it cannot be learned from
            return
        self.lengths.append(len(row["answer_ids"]))
        self.rounds += zip(row.get("drafted") or (), row.get("accepted") or (), strict=False)
        if any(row.get("drafted") or ()):
            self.drafters.add(row.get("drafter") or "")

    def seen(self, where: str) -> Seen:
        checked = [pair for pair in self.rounds if pair[0] > 0]
        mean = sum(accepted for _, accepted in self.rounds) / len(self.rounds) + 1 if self.rounds else 1.0
        drafts = f"acceptance length {mean:.2f} over {len(self.rounds):,} rounds" if self.rounds else "no rounds"
        acceptance = from_rounds(checked) if len(checked) >= LEAST_ROUNDS else None
        if self.rounds and acceptance is None:
            drafts += f", too few to go by ({LEAST_ROUNDS} with drafts are needed)"
        alone = f" and {self.num_prompts:,} prompts without one" if self.num_prompts else ""
        return Seen(
            f"{len(self.lengths):,} answers{alone} in {where}, {drafts}", acceptance, mean if acceptance else 1.0,
            len(self.lengths), sum(self.lengths) / len(self.lengths) if self.lengths else None, None,
            acceptance.depth if acceptance else 0, drafter="".join(self.drafters) if len(self.drafters) == 1 else "",
        )  # fmt: skip


def seen_in_traces(folder: Path, tag: str | None = None) -> Seen:
    """Returns measurements from the traces of `paceline serve` or `paceline record` in `folder`. `tag`: only requests
    with this x-paceline-tag. Raises ConfigError if there are no traces, or no requests with the tag."""
    whole, by_tag = _read(folder)
    if tag is not None:
        refuse_unknown(folder, [tag], by_tag)
        return by_tag[tag].seen(f"{folder} with the tag {tag}")
    seen = whole.seen(str(folder))
    if len(by_tag) < 2:
        return seen
    return replace(seen, by_tag={name: counts.seen(name) for name, counts in by_tag.items() if counts.lengths})


def _read(folder: Path) -> tuple[_Counts, dict[str, _Counts]]:
    """Returns the counts of all answers, and those of each tag."""
    with needing(ConfigError, "reading traces needs pyarrow: pip install 'paceline[data]'"):
        from pyarrow import ArrowException, parquet
    files = sorted(folder.glob("*.parquet")) if folder.is_dir() else [folder]
    if not files or not files[0].exists():
        raise ConfigError(
            f"{folder} holds no traces: give the folder of paceline serve --traces or of paceline record --out"
        )
    whole, by_tag = _Counts(), dict[str, _Counts]()
    for file in files:
        what = f"{file} is no trace"
        with reraised(ConfigError, what, "give traces of paceline serve or record", ArrowException, OSError, KeyError):
            # answers of regenerate have neither rounds nor tags
            columns = {"drafted", "accepted", "tag", "drafter"} & set(parquet.read_schema(file).names)
            table = parquet.read_table(file, columns=["answer_ids", *sorted(columns)])
        for row in table.to_pylist():
            whole.add(row)
            by_tag.setdefault(tag_of(row), _Counts()).add(row)
    return whole, by_tag
