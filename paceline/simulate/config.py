"""What `paceline simulate`, `simulate-serving` and `advise` are asked; the docstring of a field is its option's help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from paceline.bounds import Count, Positive, Rate, Share, Whole, check, within
from paceline.errors import ConfigError, refuse
from paceline.simulate.assumed import CONTEXT

DraftLength = Annotated[int, within("between 0 and 1024", least=0, most=1024)]


@dataclass(frozen=True, slots=True)
class CostsConfig:
    """Where step times come from: a model on a machine, measured steps, a calibration, or nowhere. Raises ConfigError."""

    model: str | None = None
    """A name of --list, a config.json, a folder with one, or a GGUF file [default: smollm2-135m]."""
    hardware: str | None = None
    """A name of --list, or several of them as 2x H100; this measures the machine at hand [default: this]."""
    gpus: Count = 1
    """Tensor parallel over so many of them."""
    precision: str | None = None
    """bf16, fp8, ... for weights and experts, or by part: weights=fp8,experts=fp4,attention=bf16,kv=fp8."""
    expert_locality: Share | None = None
    """0: every position draws its experts anew; 1: a sequence's positions share them; 0.255: measured [default: 0; of a
    calibration what was counted in the passes it was fitted to]."""
    per_layer: bool = False
    """Take attention's limits by kind of layer, not over all."""
    drafter_cost: Annotated[float, within("0 or more of a target pass, such as 0.1", least=0)] | None = None
    """A drafter pass, as a share of a plain target pass at the same batch [default: 0.1]."""
    drafter_params: Annotated[float, within("above 0, such as 0.98e9", above=0)] | None = None
    """Parameters of the drafter, such as 0.98e9: its own roofline, not a share."""
    block: Count | None = None
    """Drafts of one drafter pass (DFlash: 16); without, a pass drafts one token (MTP, EAGLE)."""
    toy: bool = False
    """Drafting and verifying cost nothing: what acceptance alone would bring."""
    table: Path | None = None
    """Measured step times (steps.json of bench steps, or its run folder) in place of the roofline."""
    calibration: Path | None = None
    """A calibration.json: the roofline as it was fitted to a machine."""
    overhead_ms: Annotated[float, within("0 or more milliseconds", least=0)] | None = None
    """Milliseconds of every round beyond these costs: launches, scheduling, the host."""
    plain_rate: Rate | None = None
    """Measured tokens/s of one stream that decodes alone and plainly: solves for the overhead of every round."""
    server_log: Path | None = None
    """A log of vLLM or SGLang under a steady load, or the text of its /metrics: the overhead is fitted to its rounds."""

    def __post_init__(self) -> None:
        num_sources = sum((self.toy, self.table is not None, self.calibration is not None))
        is_double = None not in (self.drafter_cost, self.drafter_params)
        overheads = [each is not None for each in (self.overhead_ms, self.plain_rate, self.server_log)]
        check(self)
        refuse(
            ConfigError,
            (num_sources > 1, "--toy, --table and --calibration exclude each other: leave all but one out"),
            (is_double, "--drafter-cost and --drafter-params say the same in two ways: leave one out"),
            (sum(overheads) > 1, "--overhead-ms, --plain-rate and --server-log exclude each other: leave all but one out"),
            (self.toy and any(overheads), "--toy has no seconds to add an overhead to: leave one of the two out"),
        )


@dataclass(frozen=True, slots=True)
class PredictConfig:
    """What is to be predicted. Raises ConfigError."""

    batch: tuple[Count, ...] = (1,)
    """Sequences that decode together; several, comma-separated, make a sweep."""
    context: Count = CONTEXT
    """Tokens in each sequence's cache."""
    acceptance: str | None = None
    """One chance (0.8), a chance for each place (0.8,0.75,0.7), survival:.77,.57,.42, histogram:20,10,5, or a bench
    decode run, its results.json, a trace, or a log or the metrics of vLLM, SGLang or llama.cpp (FILE:MODEL where
    they tell of several models) [default: 0.8, with --tree that of the marginals]."""
    max_draft: DraftLength = 16
    """Longest draft considered."""
    tree: str | None = None
    """Also trees of so many drafts beside chains: 32, or 8,16,32; the best size is always told, best tells it alone."""
    marginals: str | None = None
    """With --tree, how often the second, third, ... likeliest token of a slot stands: greedy or sampled, measured
    on GSM8K, or a bench decode run with --plan tree:32 [default: greedy]."""
    method: str | None = None
    """For the flags: dflash, mtp, eagle3, draft-model, ngram [default: dflash with --block, else mtp]."""
    drafter: str | None = None
    """For the flags: the drafter's folder or hub id."""

    def __post_init__(self) -> None:
        check(self)
        if not self.batch:
            raise ConfigError("--batch is empty: write it as 1, or 1,8,32 for a sweep")
        if self.marginals and not self.tree:
            raise ConfigError("--marginals are of trees: add --tree best, or leave them out")


@dataclass(frozen=True, slots=True)
class ServingConfig:
    """Which server is to be simulated, and under which load. Raises ConfigError."""

    max_draft: Count | None = None
    """Most drafts of a round [default: what was measured or recorded, else 16]."""
    acceptance: str | None = None
    """As of simulate: 0.8, survival:.77,.57, a bench decode run [default: 0.8, or that of --against]."""
    rate: tuple[Rate, ...] = ()
    """Open loops: requests a second at random times [default: 0.3 to 1.2 of what plain decoding can finish]."""
    concurrency: tuple[Count, ...] = ()
    """Closed loops: requests in flight, comma-separated."""
    requests: Count = 400
    """Requests of each load."""
    prompt_tokens: str = "256"
    """Of each request: 256, 64-512 (equally likely), or lognormal:MEDIAN,SIGMA."""
    answer_tokens: str = "128"
    """Of each request, as `prompt_tokens`."""
    policy: tuple[str, ...] = ("off", "best", "adaptive")
    """Draft lengths compared: off, best (for the batch), adaptive (learned), numbers, or tree:N with --marginals."""
    marginals: str | None = None
    """Of a block drafter: with adaptive, trees too where they pay; as of simulate: greedy, sampled or a run. Then
    they are also the acceptance of chains."""
    max_rows: Count | None = None
    """Requests that decode together [default: 8, or as many as the server of --against had]."""
    prefill_chunk: Whole = 256
    """Prompt tokens of a step at most; 0 prefills a prompt at once."""
    request_overhead: Annotated[float, within("between 0 and 3600", least=0, most=3600)] = 0.005
    """Seconds of a request outside the engine, before its first token; 0.005 is our server on two cores."""
    seed: int = 0
    """Of arrivals, lengths and acceptance."""
    against: Path | None = None
    """Replay a bench serving run instead, with its own step times unless others are given: simulated beside measured."""

    def __post_init__(self) -> None:
        check(self)
        if self.against and (self.rate or self.concurrency):
            raise ConfigError("--against has its own loads: leave --rate and --concurrency out")
        if self.marginals and (self.acceptance or self.against):
            raise ConfigError("--marginals say what stands, as --acceptance and --against do: leave one of them out")


@dataclass(frozen=True, slots=True)
class ChartConfig:
    """A chart of speed-up over tokens a round, of `paceline compare`. Raises ConfigError."""

    results: tuple[Path, ...] = ()
    """With --simulate: points of a bench decode run, mocked or real."""
    batch: Count = 1
    """With --simulate: sequences that decode together."""
    context: Count = 512
    """With --simulate: tokens in the cache of each."""
    png: Path | None = None
    """With --simulate: also a PNG."""
    columns: Path | None = None
    """With --simulate: two columns of text that fill at the predicted rates, plain and best, an animated SVG."""
    columns_png: Path | None = None
    """With --simulate: how these columns stand at the end, as a PNG."""
    acceptance: str = "0.8"
    """With --columns: what stands, as of `paceline simulate`."""
    max_draft: DraftLength = 16
    """With --columns: longest draft considered."""

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class PriceConfig:
    """What a machine costs, and how fast answers must come. Raises ConfigError."""

    price_per_hour: Positive | None = None
    """Price of an hour of the machine, all its GPUs together: prints requests/s and the price of 1,000 answers."""
    slo: str | None = None
    """How fast answers must come, such as p90-total=2s or p99-first-token=500ms,p50-inter-token=20ms."""
    prompt_tokens: str | None = None
    """Of each request, as of simulate-serving [default: the context less half an answer]."""
    answer_tokens: str = "256"
    """Of each request, as `prompt_tokens`."""
    requests: Count = 200
    """Requests that are simulated at each rate."""
    seed: int = 0
    """Of arrivals, lengths and acceptance."""

    def __post_init__(self) -> None:
        check(self)

    @property
    def is_asked(self) -> bool:
        return self.price_per_hour is not None or self.slo is not None


@dataclass(frozen=True, slots=True)
class AdviceConfig:
    """The traffic, and what machines cost. Raises ConfigError."""

    streams: Count | None = None
    """Requests that decode together [default: as many as the server of --url runs, else 1]."""
    context: Count = CONTEXT
    """Tokens in the cache of each."""
    traffic: Annotated[str, ("mixed", "application")] = "mixed"
    """What is asked: anything, or one application's requests under its own prompt or schema."""
    answers: Count | None = None
    """Answers there are to learn from [default: counted in the traces]."""
    answer_tokens: Count | None = None
    """Tokens of an answer, on average [default: as in the traces, else 256]."""
    train_on: str | None = None
    """Machine of the training, as 8x H100 [default: that of --hardware]."""
    price_per_hour: Positive | None = None
    """Price of an hour of the serving machine, all its GPUs together."""
    train_price_per_hour: Positive | None = None
    """Price of an hour of the training machine [default: by the number of GPUs, as the serving one]."""
    busy_hours: Rate = 24.0
    """Hours of a day at this load."""

    def __post_init__(self) -> None:
        check(self)
        if self.busy_hours > 24:
            raise ConfigError(f"busy_hours must be at most 24, not {self.busy_hours:g}")
