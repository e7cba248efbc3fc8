"""Settings of `paceline simulate`, `simulate-serving` and `advise`; the docstring of a field is its option's help."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from paceline.bounds import MAX_DRAFTED, Checked, Context, Count, Rate, Share, Streams, Whole, check, within
from paceline.errors import ConfigError, refuse
from paceline.simulate.assumed import CONTEXT


def _check(settings: Any) -> None:
    """Raises ConfigError for a value outside its limits and for an empty text, which is not the default."""
    check(settings)
    if empty := next((field.name for field in fields(settings) if getattr(settings, field.name) == ""), None):
        raise ConfigError(f"{empty} is empty: give a value, or leave it out")


def given_of(settings: Any, *names: str) -> list[str]:
    """Returns those of the options `names` whose values differ from their defaults, as written on the command line
    (--max-draft)."""
    own = {field.name: field.default for field in fields(settings)}
    return [f"--{name.replace('_', '-')}" for name in names if getattr(settings, name) != own[name]]


Requests = Annotated[int, within("between 1 and 1e6", least=1, most=1e6)]
DraftLength = Annotated[int, within(f"between 0 and {MAX_DRAFTED}", least=0, most=MAX_DRAFTED)]


@dataclass(frozen=True, slots=True)
class CostsConfig:
    """Selects the source of step times: a model on a machine, measured steps, a calibration, or the toy model, in which
    a round takes as long as a plain target pass. Raises ConfigError on invalid values or contradicting options."""

    model: str | None = None
    """A model name from --list, a config.json, a folder with one, or a GGUF file [default: smollm2-135m]."""
    hardware: str | None = None
    """A machine name from --list, or several machines as 2x H100; "this" measures this machine [default: this]."""
    gpus: Count = 1
    """Number of GPUs (tensor parallel)."""
    precision: str | None = None
    """bf16, fp8, ... for weights and experts, or by part: weights=fp8,experts=fp4,attention=bf16,kv=fp8."""
    expert_locality: Share | None = None
    """0: each position selects its experts independently; 1: all positions of a sequence share them; 0.255: measured
    [default: 0; with a calibration, the value counted in the passes that it was fitted to]."""
    per_layer: bool = False
    """Compare attention's arithmetic with its reading, of which the longer counts, for each kind of layer instead of
    for all layers together."""
    drafter_cost: Annotated[float, within("0 or more of a target pass, such as 0.1", least=0)] | None = None
    """A drafter pass, as a share of a plain target pass at the same batch [default: 0.1]."""
    drafter_params: Annotated[float, within("above 0, such as 0.98e9", above=0)] | None = None
    """Parameters of the drafter, such as 0.98e9: its cost comes from its own roofline, not from a share."""
    block: Count | None = None
    """Number of drafts that one drafter pass makes, and maximum number of drafts in a round; 7 for a DFlash drafter of
    block size 8, which counts the anchor. Without it, a pass drafts one token (MTP, EAGLE)."""
    toy: bool = False
    """Assume that drafting is free and that verifying takes as long as plain decoding: the effect of acceptance
    alone."""
    table: Path | None = None
    """Measured step times (steps.json of bench steps, or its run folder), used instead of the roofline."""
    calibration: Path | None = None
    """A calibration.json: the roofline fitted to measured step times of a machine."""
    overhead_ms: Annotated[float, within("between 0 and 3.6e6 milliseconds", least=0, most=3.6e6)] | None = None
    """Milliseconds added to the predicted time of every round: launches, scheduling, the host."""
    plain_rate: Annotated[float, within("at least 0.001 tokens/s", least=1e-3)] | None = None
    """Measured tokens/s of plain decoding with one stream; the overhead of every round is derived from it."""
    server_log: Path | None = None
    """A log of vLLM or SGLang under a steady load, or the text of its /metrics; the overhead is fitted to its
    rounds."""

    def __post_init__(self) -> None:
        num_sources = sum((self.toy, self.table is not None, self.calibration is not None))
        is_double = None not in (self.drafter_cost, self.drafter_params)
        overheads = [each is not None for each in (self.overhead_ms, self.plain_rate, self.server_log)]
        _check(self)
        refuse(
            ConfigError,
            (num_sources > 1, "--toy, --table and --calibration exclude each other: leave all but one out"),
            (is_double, "--drafter-cost and --drafter-params say the same in two ways: leave one out"),
            (
                sum(overheads) > 1,
                "--overhead-ms, --plain-rate and --server-log exclude each other: leave all but one out",
            ),
            (self.toy and any(overheads), "--toy has no seconds to add an overhead to: leave one of the two out"),
        )


@dataclass(frozen=True, slots=True)
class PredictConfig:
    """Options of a speed-up prediction. Raises ConfigError on invalid values."""

    batch: tuple[Streams, ...] = (1,)
    """Batch size; several, comma-separated, make a sweep."""
    context: Context = CONTEXT
    """Tokens in each sequence's cache."""
    acceptance: str | None = None
    """One chance (0.8), a chance for each draft position (0.8,0.75,0.7), survival:.77,.57,.42, histogram:20,10,5, or a
    run of bench decode or evaluate, traces (a file or their folder), or a log or the metrics of vLLM, SGLang or
    llama.cpp (FILE:MODEL if they cover several models) [default: 0.8, with --tree that of the marginals]."""
    max_draft: DraftLength = 16
    """Longest draft considered; also limited by --block, and by the longest draft that was measured."""
    tree: str | None = None
    """Also predict draft trees of this many drafts: 32, or 8,16,32. The best size is always predicted too; "best"
    predicts only the best size."""
    marginals: str | None = None
    """With --tree, chances that the candidates at a draft position are accepted, by rank: greedy or sampled, measured
    on GSM8K, or a bench decode run with --speculate tree:32 [default: greedy]."""
    method: str | None = None
    """Method in the server command lines: dflash, dspark, mtp, eagle3, draft-model, ngram [default: dflash with
    --block, else mtp]."""
    drafter: str | None = None
    """Drafter in the server command lines: a folder or hub id."""

    def __post_init__(self) -> None:
        _check(self)
        if not self.batch:
            raise ConfigError("--batch is empty: write it as 1, or 1,8,32 for a sweep")
        if self.marginals and not self.tree:
            raise ConfigError("--marginals are of trees: add --tree best, or leave them out")


@dataclass(frozen=True, slots=True)
class ServingConfig:
    """Settings of the simulated server and its load. Raises ConfigError on invalid values or contradicting options."""

    max_draft: Count | None = None
    """Maximum drafts of a round [default: the measured or recorded number, else 16]."""
    acceptance: str | None = None
    """Acceptance, as in simulate: 0.8, survival:.77,.57, a bench decode run [default: 0.8, or that of --against]."""
    rate: tuple[Rate, ...] = ()
    """Open loops: requests per second at random times [default: 0.3 to 1.2 of the capacity of plain decoding]."""
    concurrency: tuple[Streams, ...] = ()
    """Closed loops: requests in flight, comma-separated."""
    requests: Requests = 400
    """Number of requests of each load."""
    prompt_tokens: str = "256"
    """Prompt tokens of each request: 256, 64-512 (equally likely), or lognormal:MEDIAN,SIGMA."""
    answer_tokens: str = "128"
    """Answer tokens of each request, in the same forms."""
    policy: tuple[str, ...] = ("off", "best", "adaptive")
    """Draft lengths to compare: off, best (for the batch size), adaptive (chosen as in the engine), a number of drafts,
    or tree:N with --marginals."""
    marginals: str | None = None
    """Acceptance of a block drafter by draft position and candidate rank, as in simulate: greedy, sampled or a run. It
    is used for all policies, and adaptive may then verify trees."""
    max_rows: Streams | None = None
    """Maximum batch size [default: 8, or that of the server of --against]."""
    prefill_chunk: Whole = 256
    """Maximum prompt tokens of a step; 0 prefills a prompt in one step."""
    request_overhead: Annotated[float, within("between 0 and 3600", least=0, most=3600)] = 0.005
    """Seconds of a request outside the engine, before its first token; 0.005 is paceline's server on two cores."""
    seed: int = 0
    """Random seed of arrivals, lengths and acceptance."""
    against: Path | None = None
    """Replay a bench serving run, with its own step times unless others are given; prints simulated and measured
    figures."""

    def __post_init__(self) -> None:
        _check(self)
        loads = ("rate", "concurrency", "requests", "prompt_tokens", "answer_tokens", "policy")
        if self.against and (given := given_of(self, *loads)):
            raise ConfigError(f"--against has its own loads: leave {', '.join(given)} out")
        if self.marginals and (self.acceptance or self.against):
            raise ConfigError("--marginals say what stands, as --acceptance and --against do: leave one of them out")


@dataclass(frozen=True, slots=True)
class ChartConfig(Checked):
    """Settings of the chart of speed-up over acceptance length that `paceline compare --simulate` draws. Raises
    ConfigError on invalid values."""

    results: tuple[Path, ...] = ()
    """With --simulate: bench decode runs, mocked or real, whose points are drawn."""
    batch: Streams = 1
    """With --simulate: batch size."""
    context: Context = CONTEXT
    """With --simulate: tokens in each sequence's cache."""
    png: Path | None = None
    """With --simulate: also a PNG."""
    columns: Path | None = None
    """With --simulate: an animated SVG of two text columns that fill at the predicted rates, plain and best."""
    columns_png: Path | None = None
    """With --simulate: the final state of these columns, as a PNG."""
    acceptance: str = "0.8"
    """With --columns: acceptance, as in `paceline simulate`."""
    max_draft: DraftLength = 16
    """With --columns: longest draft considered."""


@dataclass(frozen=True, slots=True)
class PriceConfig:
    """Settings for the price of answers: the machine's price, required response times, and requests to simulate. Raises
    ConfigError on invalid values."""

    price_per_hour: Rate | None = None
    """Price per hour of the machine with all its GPUs; prints requests/s and the price of 1,000 answers."""
    slo: str | None = None
    """Required response times, such as p90-total=2s or p99-first-token=500ms,p50-inter-token=20ms."""
    prompt_tokens: str | None = None
    """Prompt tokens of each request, as in simulate-serving [default: the context less half an answer]."""
    answer_tokens: str = "256"
    """Answer tokens of each request, in the same forms."""
    requests: Requests = 200
    """Number of simulated requests at each rate."""
    seed: int = 0
    """Random seed of arrivals, lengths and acceptance."""

    def __post_init__(self) -> None:
        check(self)
        given = given_of(self, "prompt_tokens", "answer_tokens", "requests", "seed")
        if given and not self.is_asked:
            raise ConfigError(f"{', '.join(given)}: only with --price-per-hour or --slo: add one, or leave it out")

    @property
    def is_asked(self) -> bool:
        return self.price_per_hour is not None or self.slo is not None


@dataclass(frozen=True, slots=True)
class AdviceConfig:
    """Traffic, training machine and prices for `paceline advise`. Raises ConfigError on invalid values."""

    streams: Streams | None = None
    """Requests that decode together [default: the number that the server of --url runs, else 1]."""
    context: Context = CONTEXT
    """Tokens in the cache of each request."""
    traffic: Annotated[str | None, ("mixed", "application")] = None
    """Kind of traffic: mixed, or one application's requests with its own prompt or schema [default: unknown, with an
    interval that covers both]."""
    run: str | None = None
    """Folder of a training run of this target on this traffic, whose acceptance length is used; "none" for published
    trainings [default: the newest run in runs/ that has an acceptance length]."""
    answers: Annotated[int, within("between 1 and 1e9", least=1, most=1e9)] | None = None
    """Answers available for training [default: counted in the traces]."""
    answer_tokens: Count | None = None
    """Mean tokens of an answer [default: as in the traces, else 256]."""
    train_on: str | None = None
    """Machine for training, such as 8x H100 [default: that of --hardware or of the calibration]."""
    price_per_hour: Rate | None = None
    """Price per hour of the serving machine with all its GPUs."""
    train_price_per_hour: Rate | None = None
    """Price per hour of the training machine [default: that of the serving machine, scaled by the number of GPUs]."""
    busy_hours: Rate = 24.0
    """Hours per day at this load."""

    def __post_init__(self) -> None:
        _check(self)
        if self.busy_hours > 24:
            raise ConfigError(f"busy_hours must be at most 24, not {self.busy_hours:g}")
        if self.train_price_per_hour is not None and self.price_per_hour is None:
            raise ConfigError("--train-price-per-hour: only with --price-per-hour: add it, or leave it out")
