"""Measures the cost of decoding rounds in the engine with mocked acceptance: the number of accepted drafts is set. The
texts are meaningless.

    paceline bench steps --drafter random-dflash --context 256        ->  runs/bench-steps-*/steps.json

`StepBench` measures the seconds of verification, drafting and the host for each (rows, positions) in turn, over a cache
of `context` tokens. Drafts are replaced by random tokens, so that every width is verified. For a mixture of experts it
also counts the experts that each size reads. The output is an input of `paceline simulate --table` and `--calibrate`.

    paceline bench decode --weights random --mock-tokens-per-round 1,2,4,8

`MockBench` measures the speed of a drafter with a given acceptance length and compares it with the roofline, like
SGLang's experiment with dummy weights (docs/explanation/prediction.md). The cost of a round is real. Prompts are random
tokens.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from paceline.bench.config import PLAIN, WARM_UP_TOKENS, MockConfig, MockSetting, StepsConfig
from paceline.bench.passes import Pass, Request, described, mocked_engine, random_prompt, run_pass
from paceline.draft.base import Drafter, NoDrafter
from paceline.draft.dflash.drafter import DFlashDrafter
from paceline.draft.registry import make_drafter
from paceline.engine.llm import LLM
from paceline.errors import ConfigError
from paceline.hardware import Machine
from paceline.plan.planner import FixedPlanner
from paceline.report.statistics import Rounds, doubt, possible_speedup
from paceline.report.tables import ignore
from paceline.simulate.costs.calibrate import precisions_of
from paceline.simulate.costs.roofline import Deployment
from paceline.simulate.costs.rounds import NO_COST, RooflineCosts, ShapeDrafter
from paceline.simulate.costs.shapes import ModelShape
from paceline.simulate.marginals import read_marginals
from paceline.types import Batch, DraftBlock, SamplingParams

PREFILLS = (16, 64, 256)
"""Lengths in tokens of the prompts whose prefill is measured."""
Size = tuple[int, int]


class FilledDrafter(Drafter):
    """Runs another drafter (`inner`) at its full cost, but replaces its drafts by random tokens. All other attributes
    are those of `inner`.

    This makes it possible to time a drafter with random weights. Such a drafter would repeat one token, and a mixture
    of experts would then read the same few experts for all drafts, so that the times would be too short."""

    is_instant = False

    def __init__(self, inner: Drafter, num_drafted: int, vocab_size: int) -> None:
        self.inner, self.num_drafted = inner, max(num_drafted, inner.num_drafted)
        self.draw, self.tokens = random.Random(0), range(vocab_size)

    def __getattribute__(self, name: str) -> Any:
        is_own = name in ("inner", "num_drafted", "is_instant", "propose", "draw", "tokens") or name.startswith("__")
        return object.__getattribute__(self, name) if is_own else getattr(self.inner, name)

    def propose(self, batch: Batch) -> DraftBlock:
        self.inner.propose(batch)
        return DraftBlock.certain(
            [self.draw.choices(self.tokens, k=limit) for limit in batch.draft_limits_B(self.num_drafted)]
        )


Times = defaultdict[str, defaultdict[Size, list[float]]]
"""Seconds of each repetition, by stage and size. Sizes are (rows, positions) for "verify" (target pass and acceptance),
"host" (commit, rollback, the drafter's update, text) and "rounds" (all of it); (rows, drafts) for "draft"; (1, tokens
of a prompt) for "prefill"."""


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
    """Measures the seconds of verification, drafting, other work of a round (host) and prefill, for each combination of
    rows (sequences in the batch) and positions (tokens verified per row). Call `run()`, then `as_json()`."""

    def __init__(self, llm: LLM, config: StepsConfig, drafter: str) -> None:
        self.llm, self.config, self.name = llm, config, drafter
        if max(config.batches) > llm.target.cache.num_rows:
            raise ConfigError(f"batch {max(config.batches)} needs as many cache rows: raise max_batch")
        if config.needed_len > llm.target.cache.max_len:
            raise ConfigError(
                f"a context of {config.context} needs rows of {config.needed_len} tokens, they hold "
                f"{llm.target.cache.max_len}: raise max_len or lower context"
            )
        options = {"block_size": config.max_positions} if drafter == "random-dflash" else {}
        self.drafter = make_drafter(drafter, llm.target, target_name=llm.config.model, **options)
        self.times = no_times()
        self.experts: dict[Size, list[float]] = defaultdict(list)
        """(rows, positions) -> experts per layer that each pass read; empty without a mixture of experts."""
        filled = FilledDrafter(self.drafter, config.max_positions - 1, llm.target.vocab_size)
        self._engine = mocked_engine(llm, filled, config.tokens_per_round)

    def run(self, on_turn: Callable[[str], None] = ignore) -> None:
        """Measure every combination of rows and positions `repeat` times, after a warm-up. A repetition goes through
        the batch sizes in order, and through the positions in a new random order. `on_turn` gets a text with the batch
        size after each batch size, also in the warm-up."""
        order = random.Random(0)
        for turn in range(-1, self.config.repeat):
            times = self.times if turn >= 0 else no_times()
            self._prefills(turn, times)
            for num_rows in self.config.batches:
                widths = order.sample(range(self.config.max_positions), self.config.max_positions)
                self._turn(num_rows, widths, times)
                on_turn(f"batch {num_rows}")

    def _prefills(self, turn: int, times: Times) -> None:
        """Measure the prefill of one prompt of each length, in one chunk and with no other row."""
        engine = self._engine
        longest = min(self.llm.config.prefill_chunk, engine.target.cache.max_len - 1)
        for length in (length for length in PREFILLS if length <= longest):
            tokens = random_prompt(f"prefill {turn} {length}", length, engine.target.vocab_size)
            request_id = engine.add(tokens, SamplingParams(max_tokens=1, ignore_eos=True))
            started = time.perf_counter()
            engine.step()
            times["prefill"][1, length].append(time.perf_counter() - started)
            engine.abort(request_id)

    def _turn(self, num_rows: int, widths: list[int], times: Times) -> None:
        """Fill the rows, then time one round of each width."""
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
                if engine.target.experts_read is not None:
                    self.experts[num_rows, width + 1].append(engine.target.experts_read)
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
        """Return the content of steps.json: the median seconds of each part of a round (verification, drafting, host),
        for each number of rows and of positions or drafts per row. Drafting times are listed for at most the drafter's
        own number of drafts. `model_config`: the model's config.json, copied into the result."""
        llm, times = self.llm, self.times
        own = {size: spent for size, spent in times["draft"].items() if size[1] <= self.drafter.num_drafted}
        return {
            "machine": asdict(machine),
            "config": model_config,
            "weights": self.llm.config.weights,
            **described(llm),
            "drafter": self.name,
            "drafter_name": self.drafter.name,
            "drafter_parameters": num_parameters(self.drafter) if isinstance(self.drafter, DFlashDrafter) else None,
            "num_drafted": self.drafter.num_drafted,
            "context": self.config.context,
            "tokens_per_round": self.config.tokens_per_round,
            "lossless": False,
            "repeat": self.config.repeat,
            "verify": table(times["verify"]),
            "draft": table(own),
            "host": table(times["host"]),
            "experts": [[*size, statistics.fmean(read)] for size, read in sorted(self.experts.items())],
            "rounds": table(times["rounds"]),
            "prefill_adapts": llm.target.is_width_invariant,
            "prefill": [[tokens, seconds] for _, tokens, seconds in table(times["prefill"])],
            "spread": spread(times["rounds"]),
            "host_s": statistics.median(spent for runs in times["host"].values() for spent in runs),
        }


def num_parameters(drafter: DFlashDrafter) -> int:
    """Return the number of the drafter's parameters that every round reads. Codebooks (tables with one row per token)
    are not counted, because a round reads few of their rows."""
    return sum(weight.numel() for name, weight in drafter.network.named_parameters() if "codebook" not in name)


def table(times: dict[Size, list[float]]) -> list[list[float]]:
    """Return a sorted list with one entry [*size, median seconds] per size: (rows, positions per row) for verification,
    (rows, drafts per row) for drafting, (1, prompt tokens) for prefill."""
    return [[*size, statistics.median(spent)] for size, spent in sorted(times.items())]


def spread(times: dict[Size, list[float]]) -> float:
    """Return the relative noise of repeated measurements (0.1 is 10%). The noise at one size is the interquartile range
    divided by the median time; the result is the median over all sizes. 0.0 if nothing was repeated."""
    shares = []
    for runs in times.values():
        if len(runs) > 1:
            low, middle, high = statistics.quantiles(runs, n=4)
            shares.append((high - low) / middle)
    return statistics.median(shares) if shares else 0.0


class MockBench:
    """Measures decoding speed with mocked acceptance: a set number of drafts is accepted, whatever their tokens. Call
    `run()`, then `results()`."""

    def __init__(self, llm: LLM, config: MockConfig, shape: ModelShape, machine: Machine) -> None:
        self.llm, self.config = llm, config
        self.settings = config.settings
        self.passes: dict[MockSetting, list[Pass]] = {setting: [] for setting in self.settings}
        self._marginals = read_marginals(config.marginals) if config.trees else None
        self._drafters = {
            setting[1:]: self._drafter(self._num_slots(setting))
            for setting in self.settings
            if setting.batch == config.batches[0]
        }
        self._shape, self._machine = shape, machine

    def _num_slots(self, setting: MockSetting) -> int:
        """Return the draft positions of a drafter's pass; for a tree, those of its marginals."""
        if setting.num_nodes and self._marginals:
            return len(self._marginals.chances_KM)
        return self.config.drafts(setting.tokens_per_round)

    def _drafter(self, num_drafted: int) -> Drafter:
        if num_drafted == 0:
            return NoDrafter()
        name = self.config.drafter
        options = {"block_size": num_drafted + 1} if name == "random-dflash" else {"num_drafted": num_drafted}
        drafter = make_drafter(name, self.llm.target, target_name=self.llm.config.model, **options)
        if drafter.num_drafted < num_drafted:
            raise ConfigError(
                f"{name} drafts {drafter.num_drafted} tokens at most, {num_drafted} are needed: use random-dflash"
            )
        return drafter

    def run(self, on_pass: Callable[[str], None] = ignore) -> None:
        """Run each setting (batch size, acceptance length, chain or tree of drafts) `repeat` times, after one short
        warm-up of each. Every second repetition runs the settings in reverse order. `on_pass` gets a text that names
        the setting after each pass, warm-ups included."""
        for number in range(-1, self.config.repeat):
            for setting in self.settings[:: -1 if number % 2 else 1]:
                done = self._pass(setting, number)
                if number >= 0:
                    self.passes[setting].append(done)
                on_pass(f"batch {setting.batch}, {setting.tokens_per_round:.3g} tokens per round")

    def _pass(self, setting: MockSetting, number: int) -> Pass:
        llm, length, (batch, tokens_per_round, num_nodes) = self.llm, self.config.prompt_tokens, setting
        acceptance = self._marginals if num_nodes and self._marginals else tokens_per_round
        engine = mocked_engine(llm, self._drafters[setting[1:]], acceptance, num_nodes)
        seeds = [f"{batch} {tokens_per_round} {number} {row}" for row in range(batch)]
        requests = [Request(seed, random_prompt(seed, length, llm.target.vocab_size)) for seed in seeds]
        max_tokens = self.config.max_tokens if number >= 0 else min(self.config.max_tokens, WARM_UP_TOKENS)
        return run_pass(engine, requests, [SamplingParams(max_tokens=max_tokens, ignore_eos=True)] * batch, batch)

    def results(self) -> list[dict[str, Any]]:
        return [self._result(setting) for setting in self.settings]

    def _result(self, setting: MockSetting) -> dict[str, Any]:
        """Return the medians over the repetitions of a setting.

        "kept_tokens_per_round" is the measured acceptance length: an answer's last round may be cut short.
        "tokens_per_s" covers all rows, without prefill. "speedup" is over plain decoding in the same repetition; None
        if the times rule it out.
        """
        batch, value, num_nodes = setting
        plain_setting = MockSetting(batch, PLAIN)
        own, plain = self.passes[setting], self.passes[plain_setting]
        rounds = Rounds.counted(one for run in own for answer in run.answers for one in answer.rounds)
        steps_s = [(run.wall_s - (run.prefill_s or 0.0)) / run.num_passes for run in own]
        rates, plain_rates = ([run.decode_tokens_per_s or 0.0 for run in passes] for passes in (own, plain))
        measured = statistics.median(ours / theirs for ours, theirs in zip(rates, plain_rates, strict=True))
        num_tokens, most = sum(len(answer.token_ids) for answer in own[0].answers), max(value, rounds.tokens_per_round)
        predicted_s, plain_s = self._roofline_s(setting), self._roofline_s(plain_setting)
        return {
            "batch": batch,
            "tokens_per_round": value,
            "num_drafted": num_nodes or self.config.drafts(value),
            "is_tree": num_nodes > 0,
            "kept_tokens_per_round": rounds.tokens_per_round,
            "step_ms": 1e3 * statistics.median(steps_s),
            "tokens_per_s": statistics.median(rates),
            "speedup": possible_speedup(measured, most),
            "doubt": doubt(measured, most, num_tokens) if setting != plain_setting else None,
            "roofline_step_ms": 1e3 * predicted_s,
            "roofline_speedup": value * plain_s / predicted_s,
            "lossless": False,
        }

    def _roofline_s(self, setting: MockSetting) -> float:
        """Return the seconds of a round at the machine's peak rates, with half of the answer in the cache. A DFlash
        drafter costs its parameters and the target's head; other drafters count as free."""
        deployment = Deployment(self._machine, precisions_of(described(self.llm), self._shape.precisions))
        drafter, cost, num_slots = self._drafters[setting[1:]], NO_COST, self._num_slots(setting)
        if isinstance(drafter, DFlashDrafter):
            dtype, head = self.llm.config.dtype, self._shape.hidden_size * self.llm.target.vocab_size
            rates = deployment.flops_per_s(dtype), deployment.bytes_per_s, 4.0 if dtype == "float32" else 2.0
            cost = ShapeDrafter(num_parameters(drafter) + head, *rates, block=drafter.num_drafted + 1)
        costs = RooflineCosts(self._shape, deployment, cost)
        context = self.config.prompt_tokens + self.config.max_tokens / 2
        verify_s = costs.verify_s(setting.batch, 1 + (setting.num_nodes or num_slots), context)
        return verify_s + costs.draft_s(setting.batch, num_slots, context) + costs.host_s

    def as_line(self) -> dict[str, Any]:
        config = self.config
        drafter = next((drafter for drafter in self._drafters.values() if drafter.num_drafted), None)
        return {
            "results": self.results(),
            "lossless": False,
            "weights": self.llm.config.weights,
            **described(self.llm),
            "machine": asdict(self._machine),
            "drafter": drafter.name if drafter else "none",
            "prompt_tokens": config.prompt_tokens,
            "max_tokens": config.max_tokens,
            "repeat": config.repeat,
            "marginals": config.marginals if config.trees else None,
        }
