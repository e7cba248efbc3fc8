"""Acceptance statistics of answers: overall, by source of drafts and by context length. A drafter trained on short
documents often gets worse on long ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.report.statistics import Interval, Rounds, bootstrap, ratio_of_sums, survival
from paceline.report.tables import Column, Table
from paceline.types import Round

SHORTEST = 512
"""Upper end of the first bin of context lengths, in tokens; each further bin ends at twice the previous end."""


@dataclass(slots=True, kw_only=True)
class Drafting:
    """Acceptance statistics of some answers. `survival[i]` is the share of rounds whose first i + 1 drafts were all
    accepted. For answers of Transformers, which reports no rounds, all fields are None or empty."""

    tokens_per_round: float | None = None
    tokens_per_round_interval: Interval = (None, None)
    """95% bootstrap interval of `tokens_per_round` over answers."""
    acceptance_rate: float | None = None
    """Share of drafts that were accepted; None without drafts."""
    survival: list[float] = field(default_factory=list)
    accepted_histogram: list[int] = field(default_factory=list)
    sources: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Source of drafts, e.g. "ngram" -> share of rounds, tokens per round and acceptance rate of its rounds."""


def drafting(answers: Sequence[Sequence[Round]], num_drafted: int = 0) -> Drafting:
    """Return the acceptance statistics of `answers`, each a list of rounds. `num_drafted`: minimum length of
    `survival`, whose entries beyond the longest draft are 0."""
    rounds = [one for answer in answers for one in answer]
    if not rounds:
        return Drafting(tokens_per_round=1.0)
    whole, by_answer = Rounds.counted(rounds), [Rounds.counted(answer) for answer in answers]
    pairs = [(float(one.num_rounds + one.num_accepted), float(one.num_rounds)) for one in by_answer]
    sources = {
        source: {
            "share_of_rounds": own.num_rounds / len(rounds),
            "tokens_per_round": own.tokens_per_round,
            "acceptance_rate": own.acceptance_rate if own.num_drafted else None,
        }
        for source, own in Rounds.by_source(rounds).items()
    }
    return Drafting(
        tokens_per_round=ratio_of_sums(pairs),
        tokens_per_round_interval=bootstrap(pairs, ratio_of_sums),
        acceptance_rate=whole.acceptance_rate if whole.num_drafted else None,
        survival=survival(whole.accepted_histogram, num_drafted),
        accepted_histogram=list(whole.accepted_histogram),
        sources=sources,
    )


def sources_table(named: Sequence[tuple[str, Drafting]]) -> Table:
    rows = [(name, source, share) for name, figures in named for source, share in figures.sources.items()]
    columns = (
        Column("setting", lambda row: row[0]),
        Column("drafts of", lambda row: row[1]),
        Column("share of rounds", lambda row: row[2]["share_of_rounds"], "{:.0%}", "right"),
        Column("tokens/round", lambda row: row[2]["tokens_per_round"], "{:.2f}", "right"),
        Column("accepted", lambda row: row[2]["acceptance_rate"], "{:.0%}", "right"),
    )
    return Table(columns, rows)


def by_context(answers: Iterable[tuple[int, Sequence[Round]]]) -> list[dict[str, Any]]:
    """Return the acceptance length at different context lengths (tokens of prompt and answer so far), as a list of
    bins. `answers`: for each answer (number of prompt tokens, rounds).

    A bin is a dict with "from" and "to" (its context lengths in tokens), "rounds" (number of rounds) and
    "tokens_per_round". A round counts in the bin of the context length at which it starts. Rounds without drafts are
    not counted."""
    by_end = defaultdict[int, list[Round]](list)
    for length, rounds in answers:
        for one in rounds:
            if one.num_drafted:
                end = SHORTEST
                while end <= length:
                    end *= 2
                by_end[end].append(one)
            length += 1 + one.num_accepted
    return [
        {
            "from": end // 2 if end > SHORTEST else 0,
            "to": end,
            "rounds": len(rounds),
            "tokens_per_round": Rounds.counted(rounds).tokens_per_round,
        }
        for end, rounds in sorted(by_end.items())
    ]


def context_table(rows: Sequence[dict[str, Any]]) -> Table:
    columns = (
        Column("context", lambda row: f"{row['from']}-{row['to']}"),
        Column("rounds", lambda row: row["rounds"], "{:d}", "right"),
        Column("acceptance length", lambda row: row["tokens_per_round"], "{:.2f}", "right"),
    )
    return Table(columns, rows)
