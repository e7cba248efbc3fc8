"""Tokens per round where it counts: the drafter in the real engine, answering held-out prompts.

Teacher-forced figures of the loop see only blocks anchored in the target's own text, one at a time; only served ones count.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.draft.base import Drafter
from paceline.train.dataset import Document
from paceline.types import SamplingParams

if TYPE_CHECKING:
    from paceline.engine.llm import LLM


@dataclass(frozen=True, slots=True)
class Served:
    """Figures over some held-out prompts."""

    num_prompts: int
    num_tokens: int
    num_rounds: int
    accepted_histogram: tuple[int, ...]
    texts: tuple[str, ...]
    """The first few answers, to be read: repeating text fakes acceptance."""

    @property
    def tokens_per_round(self) -> float:
        accepted = sum(count * rounds for count, rounds in enumerate(self.accepted_histogram))
        return 1.0 + accepted / self.num_rounds if self.num_rounds else 1.0


def serve_heldout(llm: LLM, drafter: Drafter, documents: list[Document], max_tokens: int = 128, num_texts: int = 3) -> Served:
    """Answer the documents' prompts greedily with this drafter. Raises ContextLengthError when one does not fit the cache."""
    llm.use_drafter(drafter)
    llm.engine.lengths = None  # the drafter is measured, not what it brings on this machine
    prompts = [document.tokens[: document.answer_start].tolist() for document in documents]
    answers = llm.generate_ids(prompts, SamplingParams(max_tokens=max_tokens))
    histogram: Counter[int] = Counter()
    for answer in answers:
        histogram.update(dict(enumerate(answer.stats.accepted_histogram)))
    return Served(
        len(answers),
        sum(len(answer.token_ids) for answer in answers),
        sum(answer.stats.num_rounds for answer in answers),
        tuple(histogram[count] for count in range(max(histogram, default=-1) + 1)),
        tuple(answer.text for answer in answers[:num_texts]),
    )
