"""Prompts and answers of the tests of regeneration, and a progress that calls back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import Any

from paceline.data.answers import AnswerShards
from paceline.data.prompts import Prompt
from paceline.report.tables import Progress

TURNS = [("Hi.", "And then?", "Why?"), ("Name a colour.", "Another one."), ("Sing!",), ("Count to ten.", "Go on.")]


class Heard(Progress):
    """Is told of each conversation that is over."""

    def __init__(self, on_one: Callable[[int], None] = lambda number: None) -> None:
        self.totals, self.texts, self._on_one = list[int](), list[str](), on_one

    @contextmanager
    def bar(self, what: str, total: int) -> Iterator[Callable[[str], None]]:
        self.totals.append(total)
        yield self._one_more

    def _one_more(self, text: str) -> None:
        self.texts.append(text)
        self._on_one(len(self.texts))


def prompts(*turns: tuple[str, ...], system: str | None = None) -> list[Prompt]:
    opening = [{"role": "system", "content": system}] if system else []
    return [
        Prompt(str(n), [*opening, {"role": "user", "content": each[0]}], each, "test")
        for n, each in enumerate(turns or TURNS)
    ]


def questions(folder: Path, name: str = "questions.jsonl", number: int = 6, text: str = "Question") -> str:
    file = folder / name
    file.write_text("".join(json.dumps({"prompt": f"{text} {n}?"}) + "\n" for n in range(number)))
    return str(file)


def by_place(answers: AnswerShards) -> dict[tuple[str, int], tuple[Any, ...]]:
    return {(answer.key, answer.turn): astuple(answer) for answer in answers}
