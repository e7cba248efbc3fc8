"""What `paceline simulate` and `paceline simulate-serving` are asked; the docstring of a field is its option's help."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ConfigError, refuse, refuse_below


@dataclass(frozen=True, slots=True)
class CostsConfig:
    """Where step times come from: a model on a machine, measured steps, a calibration, or nowhere. Raises ConfigError."""

    model: str | None = None
    """A name of --list, a config.json, or a folder with one [default: smollm2-135m]."""
    hardware: str | None = None
    """A name of --list; this measures the machine at hand [default: this]."""
    gpus: int = 1
    """Tensor parallel over so many of them."""
    precision: str | None = None
    """bf16, fp8, ... for weights and experts, or by part: weights=fp8,experts=fp4,attention=bf16,kv=fp8."""
    expert_locality: float = 0.0
    """0: every position draws its experts anew; 1: a sequence's positions share them; 0.255: measured."""
    per_layer: bool = False
    """Take attention's limits by kind of layer, not over all."""
    drafter_cost: float | None = None
    """A drafter pass, as a share of a plain target pass at the same batch [default: 0.1]."""
    drafter_params: float | None = None
    """Parameters of the drafter, such as 0.98e9: its own roofline, not a share."""
    block: int | None = None
    """Drafts of one drafter pass (DFlash: 16); without, a pass drafts one token (MTP, EAGLE)."""
    toy: bool = False
    """Drafting and verifying cost nothing: what acceptance alone would bring."""
    table: Path | None = None
    """Measured step times (steps.json of bench steps, or its run folder) in place of the roofline."""
    calibration: Path | None = None
    """A calibration.json: the roofline as it was fitted to a machine."""

    def __post_init__(self) -> None:
        num_sources = sum((self.toy, self.table is not None, self.calibration is not None))
        cost, block, parameters = self.drafter_cost, self.block, self.drafter_params
        refuse(
            ConfigError,
            (num_sources > 1, "--toy, --table and --calibration exclude each other: leave all but one out"),
            (None not in (cost, parameters), "--drafter-cost and --drafter-params say the same in two ways: leave one out"),
            (
                cost is not None and not 0 <= cost < math.inf,
                f"--drafter-cost must be 0 or more of a target pass, such as 0.1, not {cost}",
            ),
            (parameters is not None and not parameters > 0, "--drafter-params must be above 0, such as 0.98e9"),
            (block is not None and block < 1, f"--block must be at least 1 draft for each drafter pass, not {block}"),
        )


@dataclass(frozen=True, slots=True)
class PredictConfig:
    """What is to be predicted. Raises ConfigError."""

    batch: tuple[int, ...] = (1,)
    """Sequences that decode together; several, comma-separated, make a sweep."""
    context: int = 4096
    """Tokens in each sequence's cache."""
    acceptance: str = "0.8"
    """One chance (0.8), a chance for each place (0.8,0.75,0.7), survival:.77,.57,.42, histogram:20,10,5, or a bench decode run,
    its results.json, or a trace."""
    max_draft: int = 16
    """Longest draft considered."""
    method: str | None = None
    """For the flags: dflash, mtp, eagle3, draft-model, ngram [default: dflash with --block, else mtp]."""
    drafter: str | None = None
    """For the flags: the drafter's folder or hub id."""

    def __post_init__(self) -> None:
        if not self.batch:
            raise ConfigError("--batch is empty: write it as 1, or 1,8,32 for a sweep")


@dataclass(frozen=True, slots=True)
class ServingConfig:
    """Which server is to be simulated, and under which load. Raises ConfigError."""

    max_draft: int | None = None
    """Most drafts of a round [default: what was measured or recorded, else 16]."""
    acceptance: str | None = None
    """As of simulate: 0.8, survival:.77,.57, a bench decode run [default: 0.8, or that of --against]."""
    rate: tuple[float, ...] = ()
    """Open loops: requests a second at random times [default: 0.3 to 1.2 of what plain decoding can finish]."""
    concurrency: tuple[int, ...] = ()
    """Closed loops: requests in flight, comma-separated."""
    requests: int = 400
    """Requests of each load."""
    prompt_tokens: str = "256"
    """Of each request: 256, 64-512 (equally likely), or lognormal:MEDIAN,SIGMA."""
    answer_tokens: str = "128"
    """Of each request, as `prompt_tokens`."""
    policy: tuple[str, ...] = ("off", "best", "adaptive")
    """Draft lengths compared: off, best (for the batch), adaptive (learned), or numbers."""
    max_rows: int | None = None
    """Requests that decode together [default: 8, or as many as the server of --against had]."""
    prefill_chunk: int = 256
    """Prompt tokens of a step at most; 0 prefills a prompt at once."""
    request_overhead: float = 0.005
    """Seconds of a request outside the engine, before its first token; 0.005 is our server on two cores."""
    seed: int = 0
    """Of arrivals, lengths and acceptance."""
    against: Path | None = None
    """Replay a bench serving run instead, with its own step times unless others are given: simulated beside measured."""

    def __post_init__(self) -> None:
        refuse(
            ConfigError,
            (not 0 <= self.request_overhead < 3600, f"--request-overhead must be 0 or more, not {self.request_overhead:g}"),
            (not all(0 < rate < math.inf for rate in self.rate), "--rate must be above 0"),
            (
                bool(self.against and (self.rate or self.concurrency)),
                "--against has its own loads: leave --rate and --concurrency out",
            ),
        )
        refuse_below(1, requests=self.requests, max_draft=self.max_draft, max_rows=self.max_rows)
        refuse_below(1, concurrency=min(self.concurrency, default=1))
        refuse_below(0, prefill_chunk=self.prefill_chunk)
