"""What a drafter would bring that keeps so many tokens per round: the real engine, acceptance mocked, beside the roofline.

    paceline bench decode --weights random --mock-tokens-per-round 1,2,4,8

After SGLang's experiment with dummy weights (docs/simulate.md): a round's cost is real, what it keeps is set. Prompts are
random tokens, the text means nothing, and no figure made this way is lossless.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from paceline.bench.config import PLAIN, WARM_UP_TOKENS, MockConfig
from paceline.bench.passes import Pass, Request, described, mocked_engine, random_prompt, run_pass
from paceline.draft.base import Drafter, NoDrafter
from paceline.draft.dflash import DFlashDrafter
from paceline.draft.registry import make_drafter
from paceline.engine.llm import LLM
from paceline.errors import ConfigError
from paceline.figures import Rounds
from paceline.hardware import Machine
from paceline.progress import ignore
from paceline.simulate.calibrate import precisions_of
from paceline.simulate.costs import FractionDrafter, RooflineCosts, ShapeDrafter
from paceline.simulate.roofline import Deployment
from paceline.simulate.shapes import ModelShape
from paceline.types import SamplingParams


class MockBench:
    """A loaded model, the passes run so far. `run()`, then `results()`."""

    def __init__(self, llm: LLM, config: MockConfig, shape: ModelShape, machine: Machine) -> None:
        self.llm, self.config = llm, config
        self.passes: dict[tuple[int, float], list[Pass]] = {setting: [] for setting in config.settings}
        self._drafters = {value: self._drafter(config.drafts(value)) for _, value in config.settings}
        self._shape, self._machine = shape, machine

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
        """All settings, `repeat` times, in an order that turns around; a short pass of each before them warms up."""
        for number in range(-1, self.config.repeat):
            for setting in self.config.settings[:: -1 if number % 2 else 1]:
                done = self._pass(*setting, number)
                if number >= 0:
                    self.passes[setting].append(done)
                on_pass(f"batch {setting[0]}, {setting[1]:g} tokens per round")

    def _pass(self, batch: int, tokens_per_round: float, number: int) -> Pass:
        llm, length = self.llm, self.config.prompt_tokens
        engine = mocked_engine(llm, self._drafters[tokens_per_round], tokens_per_round)
        seeds = [f"{batch} {tokens_per_round} {number} {row}" for row in range(batch)]
        requests = [Request(seed, random_prompt(seed, length, llm.target.vocab_size)) for seed in seeds]
        max_tokens = self.config.max_tokens if number >= 0 else min(self.config.max_tokens, WARM_UP_TOKENS)
        return run_pass(engine, requests, [SamplingParams(max_tokens=max_tokens, ignore_eos=True)] * batch, batch)

    def results(self) -> list[dict[str, Any]]:
        """For each setting medians over the repetitions.

        "kept_tokens_per_round" is as it came out: an answer's last round may be cut short. "tokens_per_s" is of all rows,
        prefill apart, "speedup" over plain decoding of the same repetition.
        """
        return [self._result(batch, value) for batch, value in self.config.settings]

    def _result(self, batch: int, value: float) -> dict[str, Any]:
        own, plain = self.passes[batch, value], self.passes[batch, PLAIN]
        rounds = Rounds.counted(one for each in own for answer in each.answers for one in answer.rounds)
        steps_s = [(each.wall_s - (each.prefill_s or 0.0)) / each.num_passes for each in own]
        rates, plain_rates = ([each.decode_tokens_per_s or 0.0 for each in passes] for passes in (own, plain))
        predicted_s, plain_s = self._roofline_s(batch, value), self._roofline_s(batch, PLAIN)
        return {
            "batch": batch,
            "tokens_per_round": value,
            "num_drafted": self.config.drafts(value),
            "kept_tokens_per_round": rounds.tokens_per_round,
            "step_ms": 1e3 * statistics.median(steps_s),
            "tokens_per_s": statistics.median(rates),
            "speedup": statistics.median(ours / theirs for ours, theirs in zip(rates, plain_rates, strict=True)),
            "roofline_step_ms": 1e3 * predicted_s,
            "roofline_speedup": value * plain_s / predicted_s,
            "lossless": False,
        }

    def _roofline_s(self, batch: int, value: float) -> float:
        """Seconds of a round at the machine's full rates, the cache half full of the answer."""
        deployment = Deployment(self._machine, precisions_of(described(self.llm), self._shape.precisions))
        num_drafted = self.config.drafts(value)
        costs = RooflineCosts(self._shape, deployment, self._drafter_cost(value, deployment))
        context = self.config.prompt_tokens + self.config.max_tokens / 2
        return costs.verify_s(batch, num_drafted + 1, context) + costs.draft_s(batch, num_drafted, context)

    def _drafter_cost(self, value: float, deployment: Deployment) -> ShapeDrafter | FractionDrafter:
        """A DFlash drafter's from its parameters and the target's head; others are taken for free."""
        drafter = self._drafters[value]
        if not isinstance(drafter, DFlashDrafter):
            return FractionDrafter(0.0)
        parameters = sum(weight.numel() for weight in drafter.network.parameters())
        head = self._shape.hidden_size * self.llm.target.vocab_size
        rate, width = deployment.flops_per_s(self.llm.config.dtype), drafter.num_drafted + 1
        num_bytes = 4.0 if self.llm.config.dtype == "float32" else 2.0
        return ShapeDrafter(parameters + head, rate, deployment.bytes_per_s, num_bytes, block=width)

    def as_line(self) -> dict[str, Any]:
        config = self.config
        drafter = next((each for each in self._drafters.values() if each.num_drafted), None)
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
        }
