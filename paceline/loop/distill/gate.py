"""Gates that decide whether a student is accepted, over held-out prompts; all must pass.

`agreement` compares the student's top tokens with the teacher's along the teacher's answers, and its loss with the
untrained student's. `answers` compares the student's greedy answers with the teacher's. Callers may add gates, such as
evals.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.engine.llm import LLM
from paceline.loop.distill.config import GateConfig
from paceline.loop.distill.corpus import few_a_prompt
from paceline.loop.distill.reading import AnswerLogprobs
from paceline.report.statistics import Interval, bootstrap, ratio_of_sums
from paceline.report.tables import Progress
from paceline.train.documents.dataset import Document
from paceline.types import SamplingParams

MORE_TOKENS = 32
"""Number of tokens by which the student's answer may be longer than the teacher's."""
AT_ONCE = 8
"""Number of held-out prompts that the student answers concurrently."""
MOSTLY = 0.9
"""Fields are compared only if at least this share of the teacher's answers are JSON objects."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one gate: whether the student passed, and why."""

    name: str
    passed: bool
    reason: str
    """Measured value and threshold, in words."""
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GateInputs:
    """Inputs of every gate: the finished student, the held-out answers, and log-probabilities at their tokens."""

    llm: LLM
    """The finished student, loaded without a drafter."""
    documents: Sequence[Document]
    """Held-out prompts with the teacher's answers, at most 4 (A_PROMPT) of each prompt."""
    teacher: Sequence[AnswerLogprobs]
    """The teacher's log-probabilities along each document's answer."""
    student: Sequence[AnswerLogprobs]
    """The finished student's log-probabilities along each document's answer."""
    start: Sequence[AnswerLogprobs]
    """The untrained student's log-probabilities along each document's answer."""
    progress: Progress


Judge = Callable[[GateInputs], Finding]
"""A gate: decides whether the finished student is accepted."""


def mean_loss(logprobs: Sequence[AnswerLogprobs]) -> float:
    """Returns the mean negative log-likelihood of the answers' tokens, in nats per token."""
    return -float(np.concatenate([each.own_N for each in logprobs]).mean())


def agreement(config: GateConfig, inputs: GateInputs) -> Finding:
    """Gate: the student must mostly choose the same tokens as the teacher, and training must have lowered its loss.

    The agreement is the share of the answers' token positions at which both models have the same most probable token.
    The lower end of its 95% confidence interval must be at least `config.least_agreement`. The loss of the finished
    student must be lower than that of the untrained one.
    """
    counts: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])  # [equal, all] positions of each prompt
    for document, student, teacher in zip(inputs.documents, inputs.student, inputs.teacher, strict=True):
        own = counts[document.prompt]
        own[0] += float((student.ids_NK[:, 0] == teacher.ids_NK[:, 0]).sum())
        own[1] += len(student.ids_NK)
    pairs = list(map(tuple, counts.values()))
    share, interval = ratio_of_sums(pairs), bootstrap(pairs, ratio_of_sums)
    models = {"teacher": inputs.teacher, "student": inputs.student, "before": inputs.start}
    losses = {name: mean_loss(logprobs) for name, logprobs in models.items()}
    figures = {"agreement": share, "interval": interval, "loss": losses, "num_prompts": len(pairs)}
    if not math.isfinite(losses["student"]) or losses["student"] >= losses["before"]:
        reason = f"it learned nothing: {losses['student']:.3f} nats a held-out token, {losses['before']:.3f} before"
        return Finding("agreement", False, f"{reason}; train for longer or with another --lr", figures)
    low = share if interval[0] is None else interval[0]
    reason = f"{share:.1%} of the teacher's tokens{_between(interval)}, {config.least_agreement:.1%} needed"
    return _finding("agreement", low >= config.least_agreement, reason, figures)


def answers(config: GateConfig, inputs: GateInputs) -> Finding:
    """Gate: compares the student's greedy answers with the teacher's answers to the same held-out prompts.

    If at least 90% (MOSTLY) of the teacher's answers are JSON objects, at least the share `config.least_fields` of the
    teacher's fields must have the same value in the student's answers. Otherwise every student passes.
    """
    documents = few_a_prompt(inputs.documents, 1)[: config.num_answers]
    references = [inputs.llm.tokenizer.decode(each.tokens[each.answer_start :].tolist()) for each in documents]
    texts = own_answers(inputs.llm, documents, inputs.progress)
    num_same = sum(one.strip() == other.strip() for one, other in zip(texts, references, strict=True))
    identical = num_same / len(texts)
    figures: dict[str, Any] = {"identical": identical, "num_prompts": len(texts), "texts": texts[:3]}
    objects = [json_object(text) for text in references]
    if sum(each is not None for each in objects) < MOSTLY * len(objects):
        reason = f"{identical:.1%} of the answers are the teacher's very text; no limit"
        return Finding("answers", True, reason, figures)
    pairs = [same_fields(text, wanted) for text, wanted in zip(texts, objects, strict=True) if wanted]
    share, interval = ratio_of_sums(pairs), bootstrap(pairs, ratio_of_sums)
    figures |= {"fields": share, "fields_interval": interval}
    reason = f"{share:.1%} of the teacher's fields{_between(interval)}, {config.least_fields:.1%} needed"
    return _finding("answers", share >= config.least_fields, reason, figures)


def _finding(name: str, passed: bool, reason: str, figures: dict[str, Any]) -> Finding:
    return Finding(name, passed, reason if passed else f"only {reason}; train for longer or keep more layers", figures)


def own_answers(llm: LLM, documents: Sequence[Document], progress: Progress) -> list[str]:
    """Generates the student's greedy answers to the prompts of `documents`; returns their texts in the same order.
    `llm`: the student. An answer has at most 32 tokens (MORE_TOKENS) more than the teacher's."""
    texts: list[str] = []
    with progress.bar("the student answers", len(documents)) as advance:
        for start in range(0, len(documents), AT_ONCE):
            part = documents[start : start + AT_ONCE]
            prompts = [each.tokens[: each.answer_start].tolist() for each in part]
            room = [llm.target.cache.max_len - len(prompt) for prompt in prompts]
            longest = [len(each) - each.answer_start + MORE_TOKENS for each in part]
            limits = [max(1, min(pair)) for pair in zip(longest, room, strict=True)]
            params = [SamplingParams(temperature=0.0, max_tokens=limit) for limit in limits]
            for answer in llm.generate_ids(prompts, params):
                texts.append(answer.text)
                advance("the student answers")
    return texts


def json_object(text: str) -> dict[str, Any] | None:
    """Parses a text that consists of a JSON object; returns None for any other text and for an empty object."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) and value else None


def same_fields(text: str, wanted: dict[str, Any]) -> tuple[float, float]:
    """Compares a JSON answer with the right one. Returns (number of fields of `wanted` that have the same value in
    `text`, number of all fields of `wanted`). The first number is 0 if `text` is not a JSON object."""
    fields = json_object(text) or {}
    return float(sum(name in fields and fields[name] == value for name, value in wanted.items())), float(len(wanted))


def _between(interval: Interval) -> str:
    low, high = interval
    return "" if low is None or high is None else f" [{low:.1%}, {high:.1%}]"
