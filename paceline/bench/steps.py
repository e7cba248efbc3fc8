"""What a round costs at each size: seconds of verifying, drafting and the host, for (rows, positions) taken in turns.

    paceline bench steps --drafter random-dflash --context 256        ->  runs/bench-steps-*/steps.json

Rounds are the engine's own, over a cache of `context` tokens, with mocked acceptance: the text means nothing, the times are
those of serving. Drafts beyond the drafter's own number are filled up, so that every width is verified. Feeds
`paceline simulate --table` and `--calibrate`.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from paceline.bench.config import StepsConfig
from paceline.bench.passes import described, mocked_engine, random_prompt
from paceline.draft.base import Drafter
from paceline.draft.dflash import DFlashDrafter
from paceline.draft.registry import make_drafter
from paceline.engine.llm import LLM
from paceline.errors import ConfigError
from paceline.hardware import Machine
from paceline.plan import FixedPlanner
from paceline.progress import ignore
from paceline.types import Batch, DraftBlock, SamplingParams

FILLER = 5
"""A token; which one is of no matter."""
PREFILLS = (16, 64, 256)
"""Tokens of the prompts whose prefill is measured."""
Size = tuple[int, int]


class FilledDrafter(Drafter):
    """A drafter whose drafts are filled up to what was asked for: the pass is as wide, the text means nothing.

    Everything else is the inner drafter's: its threads, its taps, its caches.
    """

    is_at_hand = False

    def __init__(self, inner: Drafter, num_drafted: int) -> None:
        self.inner, self.num_drafted = inner, max(num_drafted, inner.num_drafted)

    def __getattribute__(self, name: str) -> Any:
        is_own = name in ("inner", "num_drafted", "is_at_hand", "propose") or name.startswith("__")
        return object.__getattribute__(self, name) if is_own else getattr(self.inner, name)

    def propose(self, batch: Batch) -> DraftBlock:
        found = self.inner.propose(batch)
        limits = batch.draft_limits_B(self.num_drafted)
        filled = [tokens + [FILLER] * (limit - len(tokens)) for tokens, limit in zip(found.tokens_B, limits, strict=True)]
        return DraftBlock.certain(filled)


Times = defaultdict[str, defaultdict[Size, list[float]]]
"""Seconds run by run: of "verify" (the target's pass and the verdict), "host" (commit, rollback, what the drafter observes,
text) and "rounds" (all of it) by (rows, positions), of "draft" by (rows, drafts), of "prefill" by (1, tokens of a prompt)."""


def no_times() -> Times:
    return defaultdict(lambda: defaultdict(list))


def add_round(times: Times, num_rows: int, width: int, wall_s: float, draft_s: float, verify_s: float) -> None:
    size = (num_rows, width + 1)
    times["verify"][size].append(verify_s)
    times["rounds"][size].append(wall_s)
    times["host"][size].append(max(wall_s - draft_s - verify_s, 0.0))
    if width:
        times["draft"][num_rows, width].append(draft_s)


class StepBench:
    """A loaded model, a drafter, and the times measured so far. `run()` then `as_json()`."""

    def __init__(self, llm: LLM, config: StepsConfig, drafter: str) -> None:
        self.llm, self.config, self.name = llm, config, drafter
        if max(config.batches) > llm.target.cache.num_rows:
            raise ConfigError(f"batch {max(config.batches)} needs as many cache rows: raise max_batch")
        if config.needed_len > llm.target.cache.max_len:
            raise ConfigError(
                f"a context of {config.context} needs rows of {config.needed_len} tokens, they hold "
                f"{llm.target.cache.max_len}: raise --max-len or lower --context"
            )
        options = {"block_size": config.max_positions} if drafter == "random-dflash" else {}
        self.drafter = make_drafter(drafter, llm.target, target_name=llm.config.model, **options)
        self.times = no_times()
        self._engine = mocked_engine(llm, FilledDrafter(self.drafter, config.max_positions - 1), config.tokens_per_round)

    def run(self, on_turn: Callable[[str], None] = ignore) -> None:
        """All sizes in turn, `repeat` times, the widths of each turn in another order; a turn before them warms up."""
        order = random.Random(0)
        for turn in range(-1, self.config.repeat):
            self._prefills(turn, self.times if turn >= 0 else no_times())
            for num_rows in self.config.batches:
                widths = order.sample(range(self.config.max_positions), self.config.max_positions)
                self._turn(num_rows, widths, self.times if turn >= 0 else no_times())
                on_turn(f"batch {num_rows}")

    def _prefills(self, turn: int, times: Times) -> None:
        """A prompt of each length, in one chunk and beside nothing."""
        engine = self._engine
        longest = min(self.llm.config.prefill_chunk, engine.target.cache.max_len - 1)
        for length in (each for each in PREFILLS if each <= longest):
            tokens = random_prompt(f"prefill {turn} {length}", length, engine.target.vocab_size)
            request_id = engine.add(tokens, SamplingParams(max_tokens=1, ignore_eos=True))
            started = time.perf_counter()
            engine.step()
            times["prefill"][1, length].append(time.perf_counter() - started)
            engine.abort(request_id)

    def _turn(self, num_rows: int, widths: list[int], times: Times) -> None:
        """Fill the rows, then a round of each width."""
        engine, prompt_len = self._engine, max(self.config.context - self.config.growth // 2, 1)
        params = SamplingParams(max_tokens=engine.target.cache.max_len - prompt_len, ignore_eos=True)
        ids = [engine.add(random_prompt(row, prompt_len, engine.target.vocab_size), params) for row in range(num_rows)]
        try:
            while engine.scheduler.waiting or engine.scheduler.prefilling:
                self._hold(0)
                engine.step()
            self._round(1)
            for width in widths:
                wall_s = self._round(width)
                stats = engine.rounds[0]
                add_round(times, num_rows, width, wall_s, stats.draft_s, stats.verify_s)
        finally:
            for request_id in ids:
                engine.abort(request_id)

    def _round(self, width: int) -> float:
        self._hold(width)
        started = time.perf_counter()
        self._engine.step()
        return time.perf_counter() - started

    def _hold(self, width: int) -> None:
        self._engine.planner = FixedPlanner(width, self.llm.config.prefill_chunk, whole_blocks=False)

    def as_json(self, machine: Machine, model_config: dict[str, Any] | None = None) -> dict[str, Any]:
        """The file: medians over the runs. Times of drafts are those of the drafter's own widths only."""
        llm, times = self.llm, self.times
        own = {size: spent for size, spent in times["draft"].items() if size[1] <= self.drafter.num_drafted}
        network = self.drafter.network if isinstance(self.drafter, DFlashDrafter) else None
        return {
            "machine": asdict(machine),
            "config": model_config,
            "weights": self.llm.config.weights,
            **described(llm),
            "drafter": self.name,
            "drafter_name": self.drafter.name,
            "drafter_parameters": sum(weight.numel() for weight in network.parameters()) if network else None,
            "num_drafted": self.drafter.num_drafted,
            "context": self.config.context,
            "tokens_per_round": self.config.tokens_per_round,
            "lossless": False,
            "repeat": self.config.repeat,
            "verify": table(times["verify"]),
            "draft": table(own),
            "host": table(times["host"]),
            "rounds": table(times["rounds"]),
            "prefill_adapts": llm.target.is_width_invariant,
            "prefill": [[tokens, seconds] for _, tokens, seconds in table(times["prefill"])],
            "spread": spread(times["rounds"]),
            "host_s": statistics.median(spent for runs in times["host"].values() for spent in runs),
        }


def table(times: dict[Size, list[float]]) -> list[list[float]]:
    """[[rows, width, median seconds], ...] in order."""
    return [[*size, statistics.median(spent)] for size, spent in sorted(times.items())]


def spread(times: dict[Size, list[float]]) -> float:
    """Half of a size's runs lie within this share of their median, the median over the sizes: how disturbed the machine was."""
    shares = []
    for runs in times.values():
        if len(runs) > 1:
            low, middle, high = statistics.quantiles(runs, n=4)
            shares.append((high - low) / middle)
    return statistics.median(shares) if shares else 0.0
