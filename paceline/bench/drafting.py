"""What was drafted and what stood: the figures of acceptance, from the rounds of finished answers.

The only place of the benchmarks that reads a sequence's rounds: `bench decode`, `evaluate` and `compare` take their figures
from here, so that one name means one thing. Every figure weighs by rounds, and so by tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any

from paceline.figures import Interval, Rounds, bootstrap, ratio_of_sums, survival
from paceline.tables import Column, Table
from paceline.types import Round


@dataclass(slots=True, kw_only=True)
class Drafting:
    """The figures of some answers; those of a peer, which tells nothing of its rounds, are the defaults."""

    tokens_per_round: float | None = None
    """Accepted drafts plus the target's own token."""
    tokens_per_round_interval: Interval = (None, None)
    """A bootstrap over answers."""
    acceptance_rate: float | None = None
    """Accepted drafts over drafts; None when nothing was drafted."""
    survival: list[float] = field(default_factory=list)
    """survival[i - 1]: share of rounds whose first i drafts all stood."""
    accepted_histogram: list[int] = field(default_factory=list)
    """accepted_histogram[n]: rounds in which exactly n drafts stood."""
    sources: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Source of drafts -> share of rounds, tokens per round and acceptance rate of the rounds that it drafted."""


def drafting(answers: Many[Many[Round]], num_drafted: int = 0) -> Drafting:
    """`answers`: the rounds of each; `num_drafted`: the most drafts of a round, so that survival tells of them all."""
    rounds = [each for answer in answers for each in answer]
    if not rounds:
        return Drafting(tokens_per_round=1.0)
    whole, each_answer = Rounds.counted(rounds), [Rounds.counted(answer) for answer in answers]
    pairs = [(float(each.num_rounds + each.num_accepted), float(each.num_rounds)) for each in each_answer]
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


def sources_table(named: Many[tuple[str, Drafting]]) -> Table:
    rows = [(name, source, figures) for name, each in named for source, figures in each.sources.items()]
    columns = (
        Column("setting", lambda row: row[0]),
        Column("drafts of", lambda row: row[1]),
        Column("share of rounds", lambda row: row[2]["share_of_rounds"], "{:.0%}", "right"),
        Column("tokens/round", lambda row: row[2]["tokens_per_round"], "{:.2f}", "right"),
        Column("accepted", lambda row: row[2]["acceptance_rate"], "{:.0%}", "right"),
    )
    return Table(columns, rows)
