"""Settings of an engine: frozen, documented field by field, with "auto" settled in one place that says what it chose."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from paceline.bounds import Count, Share, Whole, at_least, check, within
from paceline.errors import ConfigError, refuse, reraised
from paceline.plan.marginals import Marginals
from paceline.plan.planner import fixed_planner

YIELD = "at least 1, the target's own token of every round"
ISAS = ("amx", "avx512bf16", "avx512", "avxvnni", "avx2", "i8mm", "dotprod", "neon", "portable")
RULES = ("auto", "match", "rejection", "block")
DEVICES = re.compile(r"auto|cpu|cuda(:\d+)?|mps|xpu")
Bytes = Annotated[int, "bytes", at_least(1)]
"""A number of bytes; on the command line it may be written 512M."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How a model is loaded and run. The text under a field is also the help of its option."""

    model: str = "smollm2-135m"
    """A built-in name, a folder, a GGUF file, or a hub id."""
    drafter: str = "default"
    """default (what ships for the model, else ngram), none, ngram, mtp (the model's own layer for it), random-dflash,
    random-eagle3, a folder, or a hub id."""
    dtype: Annotated[str, ("auto", "float32", "bfloat16", "float16")] = "auto"
    """auto takes bfloat16 where the device multiplies it natively, else float32."""
    device: str = "auto"
    """auto, cpu or cuda; auto takes the GPU when there is one."""
    backend: Annotated[str, ("auto", "native", "torch")] = "auto"
    """native computes a whole pass in one call, on the CPU only; auto takes it where it is built and knows the model."""
    isa: Annotated[str, ("auto", *ISAS)] = "auto"
    """Instruction set of the native pass, for the process; auto takes the best here. In bfloat16 blocks say the same on all."""
    weight_format: Annotated[str, ("auto", "blocks", "dense", "q8_0", "q6_k", "q5_k", "q4_k", "q4_1")] = "auto"
    """blocks reads the blocks of a quantised GGUF file as they are, where the native pass runs; dense expands them to `dtype`,
    the same numbers in more bytes; auto takes the faster of the two, but blocks where a dense copy would need half of the
    memory; the others round larger weights to such blocks: fewer bytes, and another model."""
    weights: Literal["checkpoint", "random"] = "checkpoint"
    """random builds the architecture without its weights: the right speed, meaningless text."""
    max_batch: Count = 8
    """Requests that decode together: rows of the KV cache."""
    max_len: Annotated[int, at_least(2)] | None = None
    """Tokens of prompt and answer together that a row holds [default: the model's limit, at most 2048]."""
    kv_memory: Bytes | None = None
    """Most memory for all KV caches together, the drafter's too: 512M, 2G or bytes. Lowers `max_batch` until they fit."""
    num_drafted: Whole | None = None
    """Most tokens drafted per round [default: the drafter's own number]."""
    plan: str = "auto"
    """auto checks in each round the drafts that bring the most tokens per second here, none when none do, and what an n-gram
    lookup finds where that promises more (unless `num_drafted` is given); fixed:K the drafter's first K in every round, fixed
    all that it may, tree:N a tree of its N likeliest: nothing then depends on the clock."""
    objective: Literal["throughput", "latency"] = "throughput"
    """With plan auto: throughput checks the drafts that bring the most tokens per second of all requests together; latency
    those that make each request's next tokens come soonest on average, when several run. Neither changes any text."""
    trees: bool = True
    """With plan auto, check several continuations together where that brings more; without, one."""
    rule: Annotated[str, RULES] = "auto"
    """How sampled drafts are verified: match (certain drafts), rejection or block; auto takes the best that is lossless."""
    mocked_tokens_per_round: Annotated[float, within(YIELD, least=1)] | None = None
    """Accept drafts at this rate, bonus token included, whatever the target says: NOT lossless, for modelling only."""
    mocked_survival: tuple[Share, ...] = ()
    """The same by a curve: shares of rounds whose first 1, 2, ... drafts stand, drawn for each row and round."""
    mocked_marginals: tuple[tuple[float, ...], ...] = ()
    """The same for trees: by slot and rank, how often this candidate stands where the likeliest tokens before it do
    (`simulate.marginals.read_marginals`). With plan tree:N a tree of N drafts stands by it, else a chain."""
    prefill_chunk: Count = 256
    """Prompt tokens per step, so that a long prompt does not stall the others."""
    threads: Count | None = None
    """CPU threads [default: PyTorch's choice]."""

    def __post_init__(self) -> None:
        check(self)
        rises = any(later > sooner for sooner, later in pairwise(self.mocked_survival))
        mocks = bool(self.mocked_survival), bool(self.mocked_marginals), self.mocked_tokens_per_round is not None
        refuse(
            ConfigError,
            (DEVICES.fullmatch(self.device) is None, _unknown_device(self.device)),
            (rises, "mocked_survival must fall: what stood for two drafts stood for one, as in 0.8, 0.6, 0.4"),
            (sum(mocks) > 1, "mocked_tokens_per_round, mocked_survival and mocked_marginals exclude each other: give one"),
            (
                self.plan.startswith("tree:") and any(mocks) and not self.mocked_marginals,
                f"plan {self.plan} needs to know how often other tokens than the likeliest stand: mock it by mocked_marginals",
            ),
        )
        if self.mocked_marginals:
            Marginals(self.mocked_marginals)
        if self.plan != "auto":
            fixed_planner(self.plan)
            refuse(
                ConfigError,
                (
                    self.objective != "throughput",
                    f"objective {self.objective} needs plan auto (serve: --speculate auto), not {self.plan}",
                ),
            )

    @property
    def mocked(self) -> float | tuple[float, ...] | Marginals | None:
        """Tokens a round, a survival curve or marginals where acceptance is mocked; None where it is the target's."""
        if self.mocked_marginals:
            return Marginals(self.mocked_marginals)
        return self.mocked_tokens_per_round if self.mocked_tokens_per_round is not None else self.mocked_survival or None

    @property
    def mocked_as(self) -> str:
        """For people: what acceptance is mocked; empty where it is not."""
        if self.mocked_marginals:
            firsts = ", ".join(f"{each:.3g}" for each in Marginals(self.mocked_marginals).firsts)
            return f"marginals of {len(self.mocked_marginals)} slots, the likeliest token's {firsts}"
        if self.mocked_survival:
            return "survival " + ", ".join(f"{share:g}" for share in self.mocked_survival)
        return "" if self.mocked_tokens_per_round is None else f"{self.mocked_tokens_per_round:g} tokens a round"

    @classmethod
    def of(cls, **settings: Any) -> EngineConfig:
        """Build from keyword arguments; an unknown one is refused by name."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(settings) - known)
        if unknown:
            raise ConfigError(f"unknown setting {unknown[0]!r}: choose from {', '.join(sorted(known))}")
        return cls(**settings)


def _unknown_device(device: str) -> str:
    meant = "cpu" if "cpu" in device.lower() else "cuda"
    return f"device {device!r} is not known: did you mean {meant}? Choose from auto, cpu, cuda, or cuda:1 for the second GPU"


def resolve(config: EngineConfig) -> EngineConfig:
    """Settle "auto" for device and dtype on this machine; backend and weight_format are settled when the model is loaded.

    Raises ConfigError when a named device is not there or not for the named backend.
    """
    import torch

    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError("device cuda was asked for, but PyTorch sees no GPU: use --device cpu")
    dtype = config.dtype
    if dtype == "auto":
        dtype = "bfloat16" if _multiplies_bfloat16(device) else "float32"
    if config.backend == "native" and device != "cpu":
        raise ConfigError(f"the native pass runs on the CPU only, not on {device}: use --device cpu, or leave --backend out")
    return replace(config, device=device, dtype=dtype)


def _multiplies_bfloat16(device: str) -> bool:
    """Whether the device has instructions for it: oneDNN alone would also say yes to AVX-512 that has to emulate them."""
    import torch

    if device.startswith("cuda"):
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if platform.machine().lower() in ("x86_64", "amd64"):
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # not on a Mac


def read_api_keys(given: tuple[str, ...], file: Path | None, variable: str = "PACELINE_API_KEY") -> tuple[str, ...]:
    """Keys `given`, of a file (one a line, # begins a comment) and of the environment. Raises ConfigError."""
    found: list[str] = []
    if file is not None:
        unread = f"cannot read the API keys in {file}"
        with reraised(ConfigError, unread, "check the path and its permissions", OSError, UnicodeDecodeError):
            lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        found = [line for line in lines if line and not line.startswith("#")]
        refuse(ConfigError, (not found, f"there is no API key in {file}: put one on a line"))
    found += [key.strip() for key in os.environ.get(variable, "").split(",") if key.strip()]
    return tuple(dict.fromkeys([*given, *found]))
