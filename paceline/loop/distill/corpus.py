"""Reads the teacher's answers as training documents, and holds some of them out for the gates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from paceline.errors import PromptError
from paceline.hub import resolve
from paceline.loop.distill.config import LEAST_HELDOUT, DistillConfig
from paceline.model import checkpoint
from paceline.model.text.tokenizer import Tokenizer
from paceline.train.documents.dataset import Corpus, Document, check_answers, check_vocabulary, read_corpus

A_PROMPT = 4
"""Number of answers of one held-out prompt that are read at most: frequent prompts have hundreds."""
USUAL_HELDOUT = 8
"""Number of prompts held out where `heldout_share` gives fewer, if there are twice as many."""


def corpus_of(config: DistillConfig, sources: Sequence[Path]) -> Corpus:
    """Reads the answers on which the student is trained, and holds out some of them. `sources`: files or folders of
    answers. Documents (prompt and answer) are cut at `max_len` and at the context lengths of teacher and student. At
    most 4 (A_PROMPT) answers to a prompt are held out.

    Raises PromptError if fewer than 6 (LEAST_HELDOUT) different prompts can be held out, or if the answers are not in
    the teacher's tokens.
    """
    teaching, teacher = config.teaching, resolve(config.teacher.model)
    strict = config.prompting.strict
    check_answers(sources, Tokenizer.from_path(teacher).decode, strict=strict)
    shape = checkpoint.load_config(teacher)
    longest = min(teaching.max_len, shape.max_position)
    if config.student.student:
        longest = min(longest, checkpoint.load_config(resolve(config.student.student)).max_position)
    corpus = read_corpus(sources, longest, teaching.heldout_share, teaching.max_heldout, USUAL_HELDOUT, strict=strict)
    check_vocabulary(corpus, shape.vocab_size)
    num_heldout = len({document.prompt for document in corpus.heldout})
    if num_heldout < LEAST_HELDOUT:
        raise PromptError(
            f"{num_heldout} of {corpus.num_prompts + num_heldout} different prompts can be held out: the gates need "
            f"{LEAST_HELDOUT}, so give answers to at least {2 * LEAST_HELDOUT}"
        )
    return replace(corpus, heldout=few_a_prompt(corpus.heldout))


def few_a_prompt(documents: Iterable[Document], most: int = A_PROMPT) -> list[Document]:
    """Limits the number of answers per prompt: returns the first `most` documents (prompt and answer) of each prompt,
    in the given order."""
    counts, kept = Counter[str](), list[Document]()
    for document in documents:
        counts[document.prompt] += 1
        if counts[document.prompt] <= most:
            kept.append(document)
    return kept
