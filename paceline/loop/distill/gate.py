"""May a student be kept? Gates over held-out prompts, each a function of the finished student: all must pass.

    class Judge(Protocol): name; __call__(Seat) -> Finding

`Agreement` reads the student along the teacher's answers: does it say the same tokens, and has it learned at all.
`OwnAnswers` lets it answer by itself, greedily, in the engine. Suites of evals are judges of the caller's own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from paceline.engine.llm import LLM
from paceline.loop.distill.config import GateConfig
from paceline.loop.distill.reading import Told
from paceline.report.statistics import Interval, bootstrap, ratio_of_sums
from paceline.report.tables import Progress
from paceline.train.documents.dataset import Document
from paceline.types import SamplingParams

MORE_TOKENS = 32
"""A student may be so much longer than the teacher was."""
AT_ONCE = 8
"""Answers written together."""
MOSTLY = 0.9
"""Share of the teacher's answers that must be JSON objects for their fields to be compared."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one gate found."""

    name: str
    passed: bool
    reason: str
    """For people: what was found, and where the limit lies."""
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Seat:
    """What a judge may look at."""

    llm: LLM
    """The student as it would be kept, loaded, with no drafter."""
    documents: Sequence[Document]
    """Held out: the teacher's answers."""
    teacher: Sequence[Told]
    """What the teacher says along each; the student, and the student before it learned, next."""
    student: Sequence[Told]
    start: Sequence[Told]
    progress: Progress


class Judge(Protocol):
    """A gate."""

    @property
    def name(self) -> str:
        """Of its finding."""
        ...

    def __call__(self, seat: Seat) -> Finding:
        """Look at the student."""
        ...


def agreement(document: Document, told: Told) -> tuple[float, float]:
    """How many of an answer's tokens are the likeliest ones, and how many there are."""
    own = document.tokens[max(1, document.answer_start) :]
    return float((told.ids_NK[:, 0] == own).sum()), float(len(own))


def same_first(one: Told, other: Told) -> tuple[float, float]:
    """At how many places both hold the same token for the likeliest, and how many places there are."""
    return float((one.ids_NK[:, 0] == other.ids_NK[:, 0]).sum()), float(len(one.ids_NK))


def mean_loss(told: Sequence[Told]) -> float:
    """Nats a token."""
    return -float(np.concatenate([each.own_N for each in told]).mean())


@dataclass(frozen=True, slots=True)
class Agreement:
    """Does the student hold the teacher's tokens for the likeliest, and is it better than before it learned?"""

    config: GateConfig
    name: str = "agreement"

    def __call__(self, seat: Seat) -> Finding:
        pairs = [same_first(ours, theirs) for ours, theirs in zip(seat.student, seat.teacher, strict=True)]
        share, interval = ratio_of_sums(pairs), bootstrap(pairs, ratio_of_sums)
        losses = {"teacher": mean_loss(seat.teacher), "student": mean_loss(seat.student), "before": mean_loss(seat.start)}
        figures = {"agreement": share, "interval": interval, "loss": losses, "num_prompts": len(pairs)}
        if not math.isfinite(losses["student"]) or losses["student"] >= losses["before"]:
            told = f"it learned nothing: {losses['student']:.3f} nats a held-out token, {losses['before']:.3f} before"
            return Finding(self.name, False, f"{told}; train for longer or with another --lr", figures)
        low = share if interval[0] is None else interval[0]
        told = f"{share:.1%} of the teacher's tokens{_between(interval)}, {self.config.least_agreement:.1%} needed"
        if low < self.config.least_agreement:
            return Finding(self.name, False, f"only {told}; train for longer or keep more layers", figures)
        return Finding(self.name, True, told, figures)


@dataclass(frozen=True, slots=True)
class OwnAnswers:
    """The student's own greedy answers beside the teacher's: the same text, and where it is JSON the same fields."""

    config: GateConfig
    name: str = "answers"

    def __call__(self, seat: Seat) -> Finding:
        documents = seat.documents[: self.config.num_answers]
        theirs = [seat.llm.tokenizer.decode(each.tokens[each.answer_start :].tolist()) for each in documents]
        ours = own_answers(seat.llm, documents, seat.progress)
        identical = sum(one.strip() == other.strip() for one, other in zip(ours, theirs, strict=True)) / len(ours)
        figures: dict[str, Any] = {"identical": identical, "num_prompts": len(ours), "texts": ours[:3]}
        objects = [json_object(text) for text in theirs]
        if sum(each is not None for each in objects) < MOSTLY * len(objects):
            return Finding(self.name, True, f"{identical:.1%} of the answers are the teacher's very text; no limit", figures)
        pairs = [same_fields(text, wanted) for text, wanted in zip(ours, objects, strict=True) if wanted]
        share, interval = ratio_of_sums(pairs), bootstrap(pairs, ratio_of_sums)
        figures |= {"fields": share, "fields_interval": interval}
        told = f"{share:.1%} of the teacher's fields{_between(interval)}, {self.config.least_fields:.1%} needed"
        if share < self.config.least_fields:
            return Finding(self.name, False, f"only {told}; train for longer or keep more layers", figures)
        return Finding(self.name, True, told, figures)


def own_answers(llm: LLM, documents: Sequence[Document], progress: Progress) -> list[str]:
    """Greedy answers to the documents' prompts."""
    texts: list[str] = []
    with progress.bar("the student answers", len(documents)) as advance:
        for start in range(0, len(documents), AT_ONCE):
            part = documents[start : start + AT_ONCE]
            prompts = [each.tokens[: each.answer_start].tolist() for each in part]
            room = [llm.target.cache.max_len - len(prompt) for prompt in prompts]
            longest = [len(each) - each.answer_start + MORE_TOKENS for each in part]
            params = [SamplingParams(temperature=0.0, max_tokens=max(1, min(pair))) for pair in zip(longest, room, strict=True)]
            for answer in llm.generate_ids(prompts, params):
                texts.append(answer.text)
                advance("the student answers")
    return texts


def json_object(text: str) -> dict[str, Any] | None:
    """The JSON object that a text is, or None; an empty one counts as none."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) and value else None


def same_fields(text: str, wanted: dict[str, Any]) -> tuple[float, float]:
    """How many of the wanted fields a text has with these values, and how many there are. A text that is no JSON has none."""
    found = json_object(text) or {}
    return float(sum(name in found and found[name] == value for name, value in wanted.items())), float(len(wanted))


def _between(interval: Interval) -> str:
    low, high = interval
    return "" if low is None or high is None else f" [{low:.1%}, {high:.1%}]"
