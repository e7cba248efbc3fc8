"""Errors about a number out of range name the option that the user gave, not one that is computed from it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.config import BenchConfig, LatencyConfig, MockConfig, ServingConfig, StepsConfig
from paceline.errors import ConfigError
from paceline.loop.adapt.config import DeployConfig, OtherEngineConfig, WatchConfig
from paceline.loop.audit.config import AuditConfig
from paceline.loop.distill.config import TeachingConfig
from paceline.loop.evals.config import EndpointConfig, EvalSampling
from paceline.loop.evals.sandbox.run import Limits
from paceline.loop.rl.judge import JudgeConfig
from paceline.loop.synthesize.config import SynthesizeConfig
from paceline.net.streaming import Client
from paceline.runs.ranks import Ranks
from paceline.serve.settings import ServeConfig
from paceline.train.answers.regenerate import engine_for
from paceline.train.config import AnswerConfig, RegenerateConfig, RemoteConfig, TrainConfig

OUT = Path("out")


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (lambda: BenchConfig(batches=(1, 100_000)), "batches"),
        (lambda: MockConfig(batches=(100_000,)), "batches"),
        (lambda: MockConfig(prompt_tokens=20_000_000), "prompt_tokens"),
        (lambda: MockConfig(max_tokens=20_000_000), "max_tokens"),
        (lambda: StepsConfig(batches=(100_000,)), "batches"),
        (lambda: StepsConfig(context=20_000_000), "context"),
        (lambda: StepsConfig(context=2**24), "context"),
        (lambda: StepsConfig(tokens_per_round=float("inf")), "tokens_per_round"),
        (lambda: AnswerConfig(max_tokens=20_000_000), "max_tokens"),
        (lambda: AnswerConfig(max_prompt_tokens=20_000_000), "max_prompt_tokens"),
        (lambda: RegenerateConfig(OUT, max_batch=100_000), "max_batch"),
        (lambda: RegenerateConfig(OUT, max_batch=0), "max_batch"),
        (lambda: SynthesizeConfig(OUT, max_batch=100_000), "max_batch"),
        (lambda: TrainConfig(max_len=20_000_000), "max_len"),
        (lambda: TrainConfig(max_len=1), "max_len"),
        (lambda: EvalSampling(at_once=100_000), "at_once"),
        (lambda: TeachingConfig(max_len=20_000_000), "max_len"),
    ],
)
def test_a_number_out_of_range_is_refused_when_it_is_set(make: Callable[[], Any], option: str) -> None:
    with pytest.raises(ConfigError, match=rf"^(\w+ and )?{option}\b"):
        make()


def test_a_prompt_and_an_answer_that_exceed_the_context_together_are_named() -> None:
    config = RegenerateConfig(OUT, answering=AnswerConfig(max_tokens=2**24))
    with pytest.raises(ConfigError, match="^max_prompt_tokens and max_tokens "):
        engine_for(config, Ranks())


@pytest.mark.parametrize("seconds", [1e30, float("inf"), float("nan"), 0.0])
def test_a_timeout_that_no_socket_takes_is_refused(seconds: float) -> None:
    makers: list[Callable[[], Any]] = [
        lambda: Client("http://h", timeout_s=seconds),
        lambda: AuditConfig(timeout_s=seconds),
        lambda: EndpointConfig("http://h", timeout_s=seconds),
        lambda: ServingConfig(timeout_s=seconds),
        lambda: LatencyConfig(timeout_s=seconds),
        lambda: DeployConfig(patience_s=seconds),
    ]
    for make in makers:
        with pytest.raises(ConfigError, match="^(timeout_s|patience_s) must be above 0 and at most 1000000 seconds"):
            make()


@pytest.mark.parametrize("wrong", [1e30, 1_000_001.0, float("inf"), float("nan"), -1.0])
@pytest.mark.parametrize(
    ("config", "field", "valid"),
    [
        (ServeConfig, "body_seconds", "above 0 and at most 1000000 seconds"),
        (ServeConfig, "header_seconds", "above 0 and at most 1000000 seconds"),
        (ServeConfig, "write_seconds", "above 0 and at most 1000000 seconds"),
        (ServeConfig, "drain_seconds", "between 0 and 1000000 seconds"),
        (Limits, "wall_s", "above 0 and at most 1000000 seconds"),
        (WatchConfig, "every_s", "above 0 and at most 1000000 seconds"),
        (TrainConfig, "step_timeout_minutes", "above 0 and at most 16666 minutes"),
        (partial(RemoteConfig, answers_from="http://h"), "patience_minutes", "above 0 and at most 16666 minutes"),
        (partial(JudgeConfig, "http://h", "judge"), "patience_minutes", "above 0 and at most 16666 minutes"),
        (OtherEngineConfig, "ready_minutes", "above 0 and at most 16666 minutes"),
    ],
)
def test_a_wait_that_no_clock_can_count_is_refused(
    config: Callable[..., object], field: str, valid: str, wrong: float
) -> None:
    """`--drain-seconds inf` failed only at the shutdown, and a training's process group only at its start."""
    with pytest.raises(ConfigError, match=f"^{field} must be {valid}"):
        config(**{field: wrong})
    config(**{field: 16_666.0})
