"""Measures drafters side by side: the same prompts, one at a time, in turns, each followed by plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from paceline.bench.config import BASELINE, WARM_UP_TOKENS
from paceline.bench.decode import speedup_over
from paceline.bench.passes import Engines, Pass, Request, run_pass
from paceline.config import EngineConfig
from paceline.draft.registry import make_drafter
from paceline.engine.llm import LLM
from paceline.report.statistics import Interval, Rounds
from paceline.report.tables import ignore
from paceline.train.documents.dataset import Document
from paceline.train.served import length_for, params_for


class Rated(NamedTuple):
    """Measurement of a drafter. `ratio`: its tokens/s divided by those of the baseline (another drafter, or plain
    decoding). `interval`: 95% interval of `ratio` over prompts. `acceptance_length`: its mean accepted drafts per
    round, plus 1."""

    ratio: float
    interval: Interval
    acceptance_length: float


class Rater:
    """Measures drafters of one target by generating answers to prompts, one at a time. As in serving, the engine
    chooses in each round how many drafted tokens are verified."""

    def __init__(self, target: EngineConfig, max_tokens: int, repeat: int) -> None:
        self.target, self.max_tokens, self.repeat = target, max_tokens, repeat

    def rate(
        self,
        drafter: Path,
        documents: Sequence[Document],
        baseline: Path | None = None,
        on_answer: Callable[[], None] = ignore,
    ) -> Rated:
        """Measures the speed of `drafter` relative to the drafter `baseline`, or to plain decoding if `baseline` is
        None. `documents`: only their prompts are used. `on_answer` is called after each answer."""
        requests = [Request(each.key, each.tokens[: each.answer_start].tolist()) for each in documents]
        longest = length_for(self.target, documents, self.max_tokens)
        llm = LLM.of(replace(self.target, drafter=BASELINE, max_batch=1, max_len=longest))
        engines, passes = Engines(llm), dict[str, list[Pass]]()
        for name in ("ours", "theirs"):
            folder = drafter if name == "ours" else baseline
            drawn = make_drafter(str(folder) if folder else BASELINE, llm.target, target_name=self.target.model)
            engines.add(name, drawn)
            passes[name] = []
        params = [params_for(llm, request.token_ids, self.max_tokens) for request in requests]
        for _ in range(self.repeat):
            for name, done in passes.items():
                run_pass(engines.use(name), requests[:1], [params_for(llm, requests[0].token_ids, WARM_UP_TOKENS)], 1)
                done.append(run_pass(engines.use(name), requests, params, 1, on_answer))
        ratio, interval = speedup_over(passes["ours"], passes["theirs"])
        rounds = [each for answer in passes["ours"][0].answers for each in answer.rounds]
        return Rated(ratio, interval, Rounds.counted(rounds).tokens_per_round)
