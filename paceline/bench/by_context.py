"""Acceptance length by context length.

    by_context([(prompt_len, answer.rounds), ...])
    # [{"from": 0, "to": 512, "rounds": 80, "tokens_per_round": 3.1}, ...]

A drafter trained on short documents often gets worse on long ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from paceline.report.statistics import Rounds
from paceline.report.tables import Column, Table
from paceline.types import Round

SHORTEST = 512
"""Upper end of the first bin of context lengths, in tokens; each further bin ends at twice the previous end."""


def by_context(answers: Iterable[tuple[int, Sequence[Round]]]) -> list[dict[str, Any]]:
    """Return the acceptance length by context length (tokens of prompt and answer so far), as a list of bins: dicts
    with the keys "from" and "to" (context length in tokens), "rounds" (number of rounds) and "tokens_per_round".
    `answers`: for each answer (number of prompt tokens, rounds).

    A round counts in the bin of the context length at which it starts. Rounds without drafts are not counted."""
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
