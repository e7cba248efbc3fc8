"""Scores without a model: cases that are right or wrong as a test says."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.loop.evals.scores import Reply, Scored, Scores
from paceline.loop.evals.suite import Case, Suite
from paceline.report.tables import Advance


def scores(values: Sequence[float], name: str = "one", texts: Sequence[str] | None = None, digest: str = "d") -> Scores:
    cases = tuple(
        Scored(f"c{number}", "exact", (value,), (texts[number] if texts else str(value),), ("",), (0.1,), 5, (2,))
        for number, value in enumerate(values)
    )
    return Scores(name, "suite", digest, cases, 1.0)


def suite(number: int = 4) -> Suite:
    return Suite("s", tuple(Case(f"c{at}", {"kind": "exact", "answer": str(at)}, _asks(at)) for at in range(number)))


def _asks(number: int) -> tuple[dict[str, str], ...]:
    return ({"role": "user", "content": f"What is {number}?"},)


class Says:
    """An answerer that says what it is told."""

    def __init__(self, texts: Sequence[str], name: str = "says") -> None:
        self.texts, self.name = texts, name

    def answers(self, cases: Sequence[Case], samples: int, advance: Advance) -> list[list[Reply]]:
        return [[Reply(text, 0.1, 5, 2)] * samples for text in self.texts]
