"""Acceptance by the length of the context that rounds had: a drafter trained on short documents loses on long ones.

by_context([(prompt_len, answer.rounds), ...])       # [{"from": 0, "to": 512, "rounds": 80, "tokens_per_round": 3.1}, ...]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from paceline.report.statistics import Rounds
from paceline.report.tables import Column, Table
from paceline.types import Round

SHORTEST = 512
"""Tokens of the first bin; each next one ends at twice as many."""


def by_context(answers: Iterable[tuple[int, Sequence[Round]]]) -> list[dict[str, Any]]:
    """Bins of context length, with the rounds that began in them and their acceptance length.

    `answers`: tokens of the prompt, and the rounds of its answer. Rounds without drafts count for the length, not for the
    figures."""
    found = defaultdict[int, list[Round]](list)
    for length, rounds in answers:
        for each in rounds:
            if each.num_drafted:
                found[_end_of(length)].append(each)
            length += 1 + each.num_accepted
    figures = {end: Rounds.counted(rounds) for end, rounds in sorted(found.items())}
    return [
        {"from": end // 2 if end > SHORTEST else 0, "to": end, "rounds": each.num_rounds, "tokens_per_round": _length(each)}
        for end, each in figures.items()
    ]


def _end_of(length: int) -> int:
    end = SHORTEST
    while end <= length:
        end *= 2
    return end


def _length(rounds: Rounds) -> float:
    return 1.0 + rounds.num_accepted / rounds.num_rounds


def context_table(rows: Sequence[dict[str, Any]]) -> Table:
    columns = (
        Column("context", lambda row: f"{row['from']}-{row['to']}"),
        Column("rounds", lambda row: row["rounds"], "{:d}", "right"),
        Column("acceptance length", lambda row: row["tokens_per_round"], "{:.2f}", "right"),
    )
    return Table(columns, rows)
