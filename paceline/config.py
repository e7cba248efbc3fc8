"""Engine settings: a frozen, documented dataclass, and `resolve`, which replaces "auto" values."""

from __future__ import annotations

import math
import os
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from numbers import Integral
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal

from paceline.bounds import (
    MAX_CONTEXT,
    MAX_DRAFTED,
    MAX_THREADS,
    Count,
    Name,
    Share,
    Streams,
    Whole,
    at_least,
    at_most,
    check_all,
    within,
)
from paceline.errors import ConfigError, refuse, reraised, shown
from paceline.plan.marginals import Marginals
from paceline.plan.speculate import Speculation
from paceline.types import NONE

YIELD = "at least 1, the target's own token of every round"
ISAS = ("amx", "avx512bf16", "avx512", "avxvnni", "avx2", "i8mm", "dotprod", "neon", "portable")
RULES = ("auto", "match", "rejection", "block")
DEVICES = re.compile(r"auto|cpu|cuda(:\d+)?|mps|xpu")
Bytes = Annotated[int, "bytes", at_least(1)]
"""A number of bytes; on the command line it may be written 512M."""
_ALSO_TAKEN: tuple[tuple[str, Any, Callable[[Any], Any]], ...] = (
    ("model", Path, str),
    ("drafter", Path, str),
    ("drafter", NoneType, lambda _: NONE),
    ("speculate", Integral, shown),
    ("kv_memory", float, lambda size: int(size) if math.isfinite(size) else size),
    ("mocked_marginals", list | tuple, lambda rows: tuple(tuple(r) if isinstance(r, list) else r for r in rows)),
)
"""(setting, further type of its values, conversion to the setting's type)."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Engine settings: model, drafter, memory and speculation. Each field's docstring is also its option's help
    text."""

    model: Name = "smollm2-135m"
    """A built-in name, a folder (also of a LoRA adapter), a GGUF file, or a hub id."""
    drafter: Name = "default"
    """default (the drafter shipped for the model, else ngram), none, ngram, mtp (the model's own MTP layer),
    random-dflash, random-eagle3, a folder, or a hub id."""
    dtype: Annotated[str, ("auto", "float32", "bfloat16", "float16")] = "auto"
    """auto selects bfloat16 if the device has instructions for it, else float32."""
    device: str = "auto"
    """auto, cpu or cuda; auto selects the GPU if there is one."""
    backend: Annotated[str, ("auto", "native", "torch")] = "auto"
    """native computes a whole forward pass in one C++ call, on the CPU only; torch uses PyTorch operations; auto
    selects native if it supports the model."""
    isa: Annotated[str, ("auto", *ISAS)] = "auto"
    """Instruction set of the native backend; auto selects the fastest. Outputs are the same for all if `dtype` is
    bfloat16 and the weights stay in quantised blocks (see `weight_format`)."""
    weight_format: Annotated[str, ("auto", "blocks", "dense", "q8_0", "q6_k", "q5_k", "q4_k", "q4_1")] = "auto"
    """blocks keeps the blocks of a quantised GGUF file (native backend only); dense expands them to `dtype`: the same
    values in more memory; auto selects the faster of the two, but blocks if a dense copy would need more than half of
    the memory; q8_0 and the others quantise dense weight matrices to this format when they are loaded (native backend
    only), which changes the model."""
    weights: Literal["checkpoint", "random"] = "checkpoint"
    """random builds the architecture with random weights: realistic speed, meaningless text."""
    max_batch: Streams = 8
    """Most requests that decode together: rows of the KV cache."""
    max_len: Annotated[int, at_least(2), at_most(MAX_CONTEXT)] | None = None
    """Longest prompt plus answer, in tokens [default: the model's limit, at most 2048]."""
    kv_memory: Bytes | None = None
    """Most memory for all KV caches, including the drafter's: 512M, 2G or bytes. Lowers `max_batch` until they fit."""
    num_drafted: Annotated[Whole, at_most(MAX_DRAFTED)] | None = None
    """Most tokens drafted per round [default: the drafter's own number]."""
    speculate: str = "auto"
    """auto verifies in each round as many drafts as give the most tokens per second, possibly none; they come from the
    drafter or, unless `num_drafted` is given, from prompt lookup (ngram). off loads no drafter. Independent of measured
    times, in every round: full verifies all drafts of the drafter, N (a number) drafts and verifies N tokens, tree:N
    verifies a tree of the N most probable drafts."""
    trees: bool = True
    """With `speculate` auto: verify a tree of several continuations where that is faster than a chain."""
    rule: Annotated[str, RULES] = "auto"
    """Verification of drafts for sampled requests: match (deterministic drafts), rejection or block; auto selects the
    best lossless rule."""
    mocked_tokens_per_round: Annotated[float, within(YIELD, least=1)] | None = None
    """Accept this many tokens per round on average, bonus token included, regardless of the target's logits: NOT
    lossless, for performance tests only."""
    mocked_survival: tuple[Share, ...] = ()
    """Mock acceptance by a survival curve: shares of rounds whose first 1, 2, ... drafts are accepted, sampled for each
    row and round."""
    mocked_marginals: tuple[tuple[float, ...], ...] = ()
    """Mock acceptance of trees: for each draft position and candidate rank, how often this candidate is accepted if the
    top tokens of all earlier positions are (`simulate.marginals.read_marginals`). Applies to a tree of N drafts with
    `speculate` tree:N, else to a chain."""
    prefill_chunk: Count = 256
    """Prompt tokens per engine step, so that a long prompt does not delay other requests."""
    threads: Annotated[Count, at_most(MAX_THREADS)] | None = None
    """CPU threads [default: PyTorch's choice]."""

    def __post_init__(self) -> None:
        for name, kind, convert in _ALSO_TAKEN:
            if isinstance(value := getattr(self, name), kind):
                object.__setattr__(self, name, convert(value))
        check_all(self)
        speculation = self.speculation
        if speculation.is_off:
            object.__setattr__(self, "drafter", NONE)
        rises = any(later > sooner for sooner, later in pairwise(self.mocked_survival))
        mocks = (bool(self.mocked_survival), bool(self.mocked_marginals), self.mocked_tokens_per_round is not None)
        refuse(
            ConfigError,
            (DEVICES.fullmatch(self.device) is None, _unknown_device(self.device)),
            (rises, "mocked_survival must fall: a round that accepts two drafts accepts one, as in 0.8, 0.6, 0.4"),
            (
                sum(mocks) > 1,
                "mocked_tokens_per_round, mocked_survival and mocked_marginals exclude each other: give one",
            ),
            (
                speculation.num_nodes > 0 and any(mocks) and not self.mocked_marginals,
                f"speculate {self.speculate} needs the acceptance of tokens other than the top one: mock it by "
                "mocked_marginals",
            ),
            (
                speculation.num_nodes > 0 and self.rule in ("rejection", "block"),
                f"rule {self.rule} verifies no trees: leave it out with speculate {self.speculate}, or choose match",
            ),
            (
                bool(speculation.num_drafted) and self.num_drafted is not None,
                f"speculate {self.speculate} and num_drafted both set the number of drafts: leave one out",
            ),
        )
        if self.mocked_marginals:
            Marginals(self.mocked_marginals)

    @property
    def speculation(self) -> Speculation:
        """The setting `speculate`, parsed from its text."""
        return Speculation.of(self.speculate)

    @property
    def most_drafted(self) -> int | None:
        """Maximum number of tokens drafted per round; None if the drafter decides. It is the number in `speculate`, if
        there is one above 0, otherwise the setting `num_drafted`."""
        return self.speculation.num_drafted or self.num_drafted

    @property
    def mocked(self) -> float | tuple[float, ...] | Marginals | None:
        """The mocked acceptance, with which performance tests accept drafts regardless of the target's logits; None if
        drafts are verified.

        - float: mean tokens per round, bonus token included
        - tuple: survival curve, the shares of rounds whose first 1, 2, ... drafts are accepted
        - Marginals: how often the candidate of each rank is accepted at each draft position"""
        if self.mocked_marginals:
            return Marginals(self.mocked_marginals)
        mean = self.mocked_tokens_per_round
        return mean if mean is not None else self.mocked_survival or None

    @property
    def mocked_as(self) -> str:
        """Description of the mocked acceptance (see `mocked`) for users, such as "4 tokens a round"; "" if drafts are
        verified."""
        if self.mocked_marginals:
            firsts = ", ".join(f"{share:.3g}" for share in Marginals(self.mocked_marginals).firsts)
            return f"marginals of {len(self.mocked_marginals)} draft positions, the most probable token's {firsts}"
        if self.mocked_survival:
            return "survival " + ", ".join(f"{share:g}" for share in self.mocked_survival)
        return "" if self.mocked_tokens_per_round is None else f"{self.mocked_tokens_per_round:g} tokens a round"

    @classmethod
    def of(cls, **settings: Any) -> EngineConfig:
        """Create the settings from keyword arguments. Raises ConfigError for an unknown name or an invalid value."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(settings) - known)
        if unknown:
            raise ConfigError(f"unknown setting {unknown[0]!r}: choose from {', '.join(sorted(known))}")
        return cls(**settings)


def _unknown_device(device: str) -> str:
    meant = "cpu" if "cpu" in device.lower() else "cuda"
    choices = "auto, cpu, cuda, or cuda:1 for the second GPU"
    return f"device {device!r} is not known: did you mean {meant}? Choose from {choices}"


def resolve(config: EngineConfig) -> EngineConfig:
    """Return the settings with a concrete device and dtype in place of "auto". `backend` and `weight_format` stay
    "auto" until the model is loaded. Raises ConfigError if the device is missing, or if the backend does not support
    it."""
    import torch

    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but PyTorch sees no GPU: use --device cpu")
    dtype = config.dtype
    if dtype == "auto":
        dtype = "bfloat16" if _multiplies_bfloat16(device) else "float32"
    if config.backend == "native" and device != "cpu":
        raise ConfigError(
            f"the native pass runs on the CPU only, not on {device}: use --device cpu, or leave --backend out"
        )
    return replace(config, device=device, dtype=dtype)


def _multiplies_bfloat16(device: str) -> bool:
    """Return True if the device has bfloat16 instructions; oneDNN's own check also accepts AVX-512 that emulates
    them."""
    import torch

    if device.startswith("cuda"):
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if platform.machine().lower() in ("x86_64", "amd64"):
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # not on a Mac


def short_name(name_or_path: str) -> str:
    """Return a model's name for users and clients: the last part of its path or hub id."""
    return Path(os.path.abspath(os.path.expanduser(name_or_path))).name or name_or_path


def read_api_keys(given: tuple[str, ...], file: Path | None, variable: str = "PACELINE_API_KEY") -> tuple[str, ...]:
    """Return all API keys without duplicates: `given`, then those in `file`, then those in the environment variable.
    The file has one key per line, # starts a comment; the variable separates keys by commas. Raises ConfigError if
    `file` cannot be read or contains no key."""
    more: list[str] = []
    if file is not None:
        unread = f"cannot read the API keys in {file}"
        with reraised(ConfigError, unread, "check the path and its permissions", OSError, UnicodeDecodeError):
            lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        more = [line for line in lines if line and not line.startswith("#")]
        refuse(ConfigError, (not more, f"there is no API key in {file}: put one on a line"))
    more += [key.strip() for key in os.environ.get(variable, "").split(",") if key.strip()]
    return tuple(dict.fromkeys([*given, *more]))
