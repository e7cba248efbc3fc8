"""Tokens per round where it counts: the drafter in the real engine, answering held-out prompts.

Teacher-forced figures of the loop see only blocks anchored in the target's own text, one at a time; only served ones count.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

from paceline.draft.base import Drafter
from paceline.train.dataset import Document
from paceline.types import SamplingParams

if TYPE_CHECKING:
    from paceline.engine.llm import LLM
from paceline.plan import FixedPlanner


@dataclass(frozen=True, slots=True)
class HeldoutFigures:
    """Figures over some held-out prompts, served."""

    tokens_per_round: float
    num_prompts: int
    num_tokens: int
    num_rounds: int
    accepted_histogram: tuple[int, ...]
    """accepted_histogram[n]: rounds in which exactly n drafts stood."""
    texts: tuple[str, ...]
    """The first few answers, to be read: text that repeats itself is drafted easily."""


def serve_heldout(
    llm: LLM, drafter: Drafter, documents: list[Document], max_tokens: int = 128, num_texts: int = 3
) -> HeldoutFigures:
    """Answer the documents' prompts greedily with this drafter. Raises ContextLengthError when one does not fit the cache."""
    llm.use_drafter(drafter)
    llm.engine.planner = FixedPlanner()  # the drafter is measured, not what it brings on this machine
    prompts = [document.tokens[: document.answer_start].tolist() for document in documents]
    answers = llm.generate_ids(prompts, SamplingParams(max_tokens=max_tokens))
    stats = [answer.stats for answer in answers]
    num_rounds = sum(each.num_rounds for each in stats)
    histogram = [sum(counts) for counts in zip_longest(*(each.accepted_histogram for each in stats), fillvalue=0)]
    return HeldoutFigures(
        tokens_per_round=1.0 + sum(each.num_accepted for each in stats) / max(1, num_rounds),
        num_prompts=len(answers),
        num_tokens=sum(each.num_output_tokens for each in stats),
        num_rounds=num_rounds,
        accepted_histogram=tuple(histogram),
        texts=tuple(answer.text for answer in answers[:num_texts]),
    )
