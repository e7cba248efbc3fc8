"""paceline for `decode_vs_peers.py`: its engine as `paceline bench decode` drives it, detokenising included.

`--form blocks` is what a user gets, `dense` expands the weights, `torch` is our decoder in PyTorch. A way's first load
is the model's; the others add a drafter to it.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from decode_vs_peers_pipe import Prompts, arguments, own_output, serve

from paceline import LLM, SamplingParams
from paceline.bench.passes import Engines, Request, described, run_pass
from paceline.report.statistics import Rounds

WAYS = ("none", "ngram", "default", "draft")
FORMS = {"blocks": {}, "dense": {"weight_format": "dense"}, "torch": {"backend": "torch"}}


class Paceline:
    pid = os.getpid()

    def __init__(self, args: Any) -> None:
        self._args = args
        self._llm: LLM | None = None
        self._engines: Engines | None = None

    def load(self, way: str) -> dict[str, Any]:
        args = self._args
        if self._llm is None or self._engines is None:
            settings = {"threads": args.threads, "max_batch": args.streams, "max_len": args.max_len, **FORMS[args.form]}
            self._llm = LLM(args.model, drafter="none", device="cpu", isa=args.isa, **settings)
            self._engines = Engines(self._llm)
        drafter = {"draft": args.draft, "default": args.dflash or "default"}.get(way, way)
        self._engines.add(way, self._llm.make_drafter(drafter))
        name = self._engines[way].name
        return {**described(self._llm), "model": None, "drafter": name, "num_drafted": self._engines[way].num_drafted}

    def run(self, way: str, prompts: Prompts, num_tokens: list[int], until_end: bool = False) -> dict[str, Any]:
        assert self._engines is not None
        requests = [Request(str(index), ids) for index, ids in enumerate(prompts)]
        params = [SamplingParams(max_tokens=number, ignore_eos=not until_end) for number in num_tokens]
        done = run_pass(self._engines.use(way), requests, params, len(prompts))
        rounds = [each for answer in done.answers for each in answer.rounds]
        by_source = {source: asdict(figures) for source, figures in Rounds.by_source(rounds).items()}
        return {
            "token_ids": [answer.token_ids for answer in done.answers],
            "wall_s": done.wall_s,
            "prefill_s": done.prefill_s,
            "tokens_per_round": Rounds.counted(rounds).tokens_per_round,
            "rounds_by_source": by_source,
            "lossless": all(answer.lossless for answer in done.answers),
        }

    def close(self) -> None:
        pass


if __name__ == "__main__":
    serve(Paceline(arguments(WAYS)), own_output())
