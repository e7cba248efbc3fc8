"""Measures drafters side by side: the same prompts, one at a time, in turns, each followed by plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from paceline.bench.config import BASELINE, WARM_UP_TOKENS
from paceline.bench.decode import speedup_over
from paceline.bench.passes import Engines, Pass, Request, run_pass
from paceline.draft.registry import make_drafter
from paceline.engine.llm import LLM
from paceline.loop.search.config import SearchConfig
from paceline.report.statistics import Interval, Rounds
from paceline.report.tables import ignore
from paceline.train.documents.dataset import Document
from paceline.train.served import length_for, params_for


class Rated(NamedTuple):
    """Measurement of a drafter. `ratio`: its tokens/s divided by the baseline's, with its 95% interval over prompts.
    `acceptance_length`: its mean accepted drafts per round, plus 1."""

    ratio: float
    interval: Interval
    acceptance_length: float


def rate(
    config: SearchConfig,
    drafter: Path,
    documents: Sequence[Document],
    baseline: Path | None = None,
    on_answer: Callable[[], None] = ignore,
) -> Rated:
    """Measures the speed of `drafter` relative to the drafter `baseline`, or to plain decoding if `baseline` is None.

    Answers the prompts of `documents` with both, one prompt at a time. As in serving, the engine chooses in each round
    how many drafted tokens are verified. `on_answer`: function without arguments, called after each answer.
    """
    target, most = config.target, config.measured_tokens
    requests = [Request(each.key, each.tokens[: each.answer_start].tolist()) for each in documents]
    longest = length_for(target, documents, most)
    llm = LLM.of(replace(target, drafter=BASELINE, max_batch=1, max_len=longest))
    engines, passes = Engines(llm), dict[str, list[Pass]]()
    for name, folder in (("ours", drafter), ("theirs", baseline)):
        engines.add(name, make_drafter(str(folder or BASELINE), llm.target, target_name=target.model))
        passes[name] = []
    params = [params_for(llm, request.token_ids, most) for request in requests]
    warm_up = [params_for(llm, requests[0].token_ids, WARM_UP_TOKENS)]
    for _ in range(config.repeat):
        for name, done in passes.items():
            run_pass(engines.use(name), requests[:1], warm_up, 1)
            done.append(run_pass(engines.use(name), requests, params, 1, on_answer))
    ratio, interval = speedup_over(passes["ours"], passes["theirs"])
    rounds = [each for answer in passes["ours"][0].answers for each in answer.rounds]
    return Rated(ratio, interval, Rounds.counted(rounds).tokens_per_round)
