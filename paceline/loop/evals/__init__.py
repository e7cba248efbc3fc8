"""Evals: scores the answers of a model, with or without a drafter, or of an endpoint to a suite of questions.

    from paceline.loop.evals import compare, read_suite, run_suite
    from paceline.loop.evals.answerers import LLMAnswerer
    suite = read_suite("suite.jsonl")
    before, after = run_suite(suite, LLMAnswerer(llm)), run_suite(suite, LLMAnswerer(other))
    compare(before, after).verdict                        # "better", "worse", "no difference seen"

This import is cheap.
"""

from __future__ import annotations

from paceline.loop.evals.compare import Comparison, Gate, compare
from paceline.loop.evals.scores import Answerer, Reply, Scored, Scores, read_scores, run_suite
from paceline.loop.evals.suite import Case, Suite, read_suite

__all__ = [
    "Answerer",
    "Case",
    "Comparison",
    "Gate",
    "Reply",
    "Scored",
    "Scores",
    "Suite",
    "compare",
    "read_scores",
    "read_suite",
    "run_suite",
]
